"""Read the source file of a recipe as rows of text, in batches, with a reason for every bad row.

Formats: JSON (an array of objects), JSON Lines, CSV, plain text, and Parquet, each also compressed
as `.gz` or `.zst`. A row is good when every requested column is text or a number, is not blank, and
is valid Unicode. No row is dropped silently: it is either in `Batch.columns` or in `Batch.rejects`.
Blank lines are not rows. The memory needed does not grow with the file, except for a JSON array.
"""

import csv
import math
import shutil
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tailtune.errors import UserError, did_you_mean
from tailtune.parquet import lines as source_lines
from tailtune.parquet.json_reader import read_json, read_json_lines
from tailtune.parquet.lines import (
    BadRow,
    Batch,
    Record,
    check_length,
    collect_batches,
    decode_line,
    numbered_lines,
    open_source,
)

FORMATS = ("json", "jsonl", "csv", "txt", "parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
SUFFIXES = {f".{name}": name for name in FORMATS} | {".ndjson": "jsonl"}
MAX_COLUMNS_SHOWN = 30


def detect_format(source: Path, declared: str) -> tuple[str, str | None]:
    """Return (format, compression or None) of a file.

    The format follows from the file's name unless `declared`, the recipe's `data.format`, is not
    `auto`. Raises UserError when the name has no known suffix.
    """
    path = source
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression:
        path = path.with_suffix("")
    file_format = SUFFIXES.get(path.suffix.lower()) if declared == "auto" else declared
    if file_format is None:
        raise UserError(
            f"the format of {source.name} is unknown",
            f"give the file one of the suffixes .{', .'.join(FORMATS)} (optionally followed by .gz or .zst), "
            f"or set data.format to one of {', '.join(FORMATS)}",
        )
    return file_format, compression


def read_rows(source: Path, declared: str, names: list[str], scratch: Path) -> Generator[Batch, None, None]:
    """Yield batches of the columns `names` as text, in the order of the source.

    `declared` is the recipe's `data.format`; `scratch` is a directory for a decompressed Parquet
    file. Raises UserError when the file cannot be read in its format, or its header lacks a column.
    """
    file_format, compression = detect_format(source, declared)
    if not source.is_file():
        raise UserError(f"data file {source} does not exist", "check data.source")
    try:
        with closing(_read_records(source, file_format, compression, names, scratch)) as records:
            yield from collect_batches(records, names)
    except (OSError, pa.ArrowException) as error:
        description = f"{file_format}, {compression}" if compression else file_format
        raise UserError(f"{source} cannot be read as {description}: {error}", "fetch or export it again") from error


def _read_records(
    source: Path, file_format: str, compression: str | None, names: list[str], scratch: Path
) -> Generator[Record, None, None]:
    if file_format == "parquet":
        yield from _read_parquet(source, compression, names, scratch)
    elif file_format == "json":
        yield from read_json(source, compression, names)
    else:
        read = {"jsonl": read_json_lines, "csv": _read_csv, "txt": _read_txt}[file_format]
        with open_source(source, compression) as file:
            yield from read(numbered_lines(file), names)


def missing_column(name: str, columns: Iterable[str]) -> UserError:
    """Return the error about a column that is not among the `columns` of the data."""
    columns = list(columns)
    shown = ", ".join(columns[:MAX_COLUMNS_SHOWN]) or "none"
    more = f" and {len(columns) - MAX_COLUMNS_SHOWN} more" if len(columns) > MAX_COLUMNS_SHOWN else ""
    return UserError(
        f"column '{name}' is not in the data{did_you_mean(name, columns)}; found: {shown}{more}",
        "map your columns in data.columns, as the README shows",
    )


def _find_columns(header: list[str], names: list[str]) -> list[int]:
    """Return the index of each requested column. Raises UserError when one is missing or appears twice."""
    for name in names:
        if name not in header:
            raise missing_column(name, header)
        if header.count(name) > 1:
            raise UserError(f"column '{name}' appears {header.count(name)} times in the header", "rename all but one")
    return [header.index(name) for name in names]


# -- CSV -------------------------------------------------------------------------------------------


class _TooLong(Exception):
    """A CSV record does not end within MAX_LINE_BYTES: its quote is never closed."""


class _CsvLines:
    """Lines of text for csv.reader. It can put back the lines that an unclosed quote has consumed."""

    def __init__(self, lines: Iterator[tuple[int, bytes]]) -> None:
        self.lines = lines
        self.put_back: deque[tuple[int, str]] = deque()
        self.taken: list[tuple[int, str]] = []
        """Lines of the current record."""
        self.taken_chars = 0
        self.rejected: list[Record] = []
        """Lines that are too long and that csv.reader has not seen."""
        self.at_end = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, text = self.put_back.popleft() if self.put_back else self._read_line()
        self.taken.append((number, text))
        self.taken_chars += len(text)
        if self.taken_chars > source_lines.MAX_LINE_BYTES:
            raise _TooLong
        return text + "\n"

    def _read_line(self) -> tuple[int, str]:
        for number, line in self.lines:
            try:
                check_length(line)
            except BadRow as error:
                self.rejected.append(Record(number, line, error))
            else:
                return number, line.decode(errors="surrogateescape")
        self.at_end = True
        raise StopIteration

    def take_record(self) -> tuple[int, str]:
        """Return (number of the first line, text) of the record that was just read."""
        number, text = self.taken[0][0], "\n".join(text for _, text in self.taken)
        self.taken, self.taken_chars = [], 0
        return number, text

    def take_first_line(self) -> tuple[int, str]:
        """Return (number, text) of the bad record's first line. Its other lines are read again."""
        self.put_back.extendleft(reversed(self.taken[1:]))
        self.taken = self.taken[:1]
        self.at_end = False
        return self.take_record()

    def take_rejected(self) -> list[Record]:
        rejected, self.rejected = self.rejected, []
        return rejected


def _read_csv(lines: Iterator[tuple[int, bytes]], names: list[str]) -> Iterator[Record]:
    """Parse CSV with a header. Values are not converted: `007` stays "007".

    A quote that is never closed loses only its own line, not the rest of the file.
    """
    csv.field_size_limit(max(csv.field_size_limit(), 2 * source_lines.MAX_LINE_BYTES))
    source = _CsvLines(lines)
    reader = csv.reader(source, strict=True)
    header: list[str] | None = None
    indices: list[int] = []
    while True:
        try:
            row = next(reader)
        except StopIteration:
            break
        except (csv.Error, _TooLong) as error:
            if header is None:
                raise UserError(f"the CSV header cannot be read: {error}", "correct the first line") from None
            reason = "a quote is opened and never closed" if source.at_end or not str(error) else str(error)
            number, text = source.take_first_line()
            yield Record(number, text, BadRow(f"broken CSV ({reason})"))
            continue
        number, text = source.take_record()
        if not text.strip():
            continue
        if header is None:
            header = row
            indices = _find_columns(header, names)
        elif len(row) != len(header):
            yield Record(number, text, BadRow(f"{len(row)} values, but the header has {len(header)} columns"))
        elif not _is_unicode(text):
            yield Record(number, text, BadRow("invalid UTF-8"))
        else:
            yield Record(number, text, [row[index] for index in indices])
        yield from source.take_rejected()
    yield from source.take_rejected()


def _is_unicode(text: str) -> bool:
    """Return whether a text that was decoded with `surrogateescape` was valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# -- Plain text ------------------------------------------------------------------------------------


def _read_txt(lines: Iterator[tuple[int, bytes]], names: list[str]) -> Iterator[Record]:
    """Yield one row per line that is not blank, with the column `text`."""
    _find_columns(["text"], names)
    for number, line in lines:
        try:
            text = decode_line(line)
        except BadRow as error:
            yield Record(number, line, error)
        else:
            if text.strip():
                yield Record(number, line, [text.removesuffix("\r")] * len(names))


# -- Parquet ---------------------------------------------------------------------------------------


def _read_parquet(source: Path, compression: str | None, names: list[str], scratch: Path) -> Iterator[Record]:
    """Read Parquet. A compressed file is decompressed first, because Parquet is read from its end."""
    if compression:
        decompressed = scratch / "source.parquet"
        try:
            with pa.input_stream(source, compression=compression) as stream, decompressed.open("wb") as out:
                shutil.copyfileobj(stream, out, source_lines.BATCH_BYTES)
            yield from _read_parquet(decompressed, None, names, scratch)
        finally:
            decompressed.unlink(missing_ok=True)
        return
    with pq.ParquetFile(source, pre_buffer=False) as file:
        schema = file.schema_arrow
        _find_columns(schema.names, names)
        for name in names:
            if not _is_textual(schema.field(name).type):
                raise UserError(
                    f"column '{name}' is {schema.field(name).type}, not text or numbers",
                    "map another column in data.columns",
                )
        number = 0
        for batch in file.iter_batches(batch_size=2048, columns=names, use_threads=False):
            columns = [_to_binary(batch[name]).to_pylist() for name in names]
            for row in zip(*columns, strict=True):
                number += 1
                yield Record(number, dict(zip(names, row, strict=True)), _decode_values(row))


def _is_textual(data_type: pa.DataType) -> bool:
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    texts = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary")
    numbers = ("is_integer", "is_floating", "is_decimal")
    return any(getattr(pa.types, test)(data_type) for test in texts + numbers)


def _to_binary(column: pa.Array) -> pa.Array:
    """Convert text to its bytes, and numbers to the text that Python writes for them. NaN becomes null.

    Text becomes bytes because Parquet does not guarantee that it is valid UTF-8.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_floating(column.type):
        values = (None if value is None or math.isnan(value) else str(value) for value in column.to_pylist())
        column = pa.array(values, pa.string())
    if pa.types.is_integer(column.type) or pa.types.is_decimal(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.binary())


def _decode_values(row: tuple[bytes | None, ...]) -> list[str | None] | BadRow:
    try:
        return [None if value is None else value.decode() for value in row]
    except UnicodeDecodeError:
        return BadRow("invalid UTF-8")
