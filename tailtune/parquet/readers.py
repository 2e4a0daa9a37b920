"""Read a source file of a recipe as rows, in batches, with a reason for every bad row.

Formats: JSON (an array of objects), JSON Lines, CSV, plain text, and Parquet, each also compressed
as `.gz` or `.zst`. A row is good when every requested column is text or a number, is not blank, and
is valid Unicode; in JSON and Parquet, columns may also hold conversations, lists and objects. No row
is dropped silently: it is either in `Batch.columns` or in `Batch.rejects`. Blank lines are not rows.
The memory needed does not grow with the file, except for a JSON array.
"""

import csv
import sys
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tailtune.errors import UserError
from tailtune.imports import require_train
from tailtune.parquet import lines as source_lines
from tailtune.parquet.json_reader import read_json, read_json_lines
from tailtune.parquet.lines import (
    BadRow,
    Batch,
    Columns,
    Record,
    check_length,
    collect_batches,
    decode_line,
    find_columns,
    numbered_lines,
    open_source,
)

FORMATS = ("json", "jsonl", "csv", "txt", "parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
SUFFIXES = {f".{name}": name for name in FORMATS} | {".ndjson": "jsonl"}


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


def read_rows(source: Path, declared: str, columns: Columns, scratch: Path) -> Generator[Batch, None, None]:
    """Yield batches of the columns, in the order of the source.

    `declared` is the recipe's `data.format`; `scratch` is a directory for a decompressed Parquet
    file. Raises UserError when the file cannot be read in its format, or its header lacks a column.
    """
    file_format, compression = detect_format(source, declared)
    if columns.messages and file_format in ("csv", "txt"):
        problem = f"{source.name} is {file_format.upper()}, so its column '{columns.messages}' holds no conversations"
        raise UserError(problem, "give them as JSON, JSON Lines or Parquet")
    with (
        _explained(source, file_format, compression),
        closing(_read_records(source, file_format, compression, columns, scratch)) as records,
    ):
        yield from collect_batches(records, columns)


def read_values(source: Path, declared: str, scratch: Path) -> Iterator[dict[str, Any] | BadRow]:
    """Yield every row with all of its columns, for `--inspect`: text, and what lists and objects hold.

    Raises UserError as `read_rows` does. Only Parquet needs pyarrow.
    """
    file_format, compression = detect_format(source, declared)
    with _explained(source, file_format, compression):
        if file_format == "parquet":
            require_train("reading Parquet")
            from tailtune.parquet.parquet_reader import read_parquet_values

            yield from read_parquet_values(source, compression, scratch)
            return
        names = ["text"]
        if file_format == "csv":
            with open_source(source, compression) as file:
                headers = (record.values for record in _read_csv(numbered_lines(file), None))
                header = next((values for values in headers if isinstance(values, list)), [])
                names = [name for name in header if name.strip()]  # spreadsheets leave commas at the end of the lines
        columns = None if file_format in ("json", "jsonl") else Columns(names)
        with closing(_read_records(source, file_format, compression, columns, scratch)) as records:
            for record in records:
                if isinstance(record.values, BadRow):
                    yield record.values
                else:
                    yield record.values[0] if columns is None else dict(zip(names, record.values, strict=True))


def nested_columns(source: Path, declared: str, names: Sequence[str], scratch: Path) -> dict[str, Any]:
    """Return the Arrow types of those columns that hold lists or objects, in JSON by their first value.

    The type null is of those that hold no value at all. Raises UserError for objects without a key.
    """
    file_format, compression = detect_format(source, declared)
    if file_format in ("csv", "txt"):
        return {}
    from tailtune.parquet import parquet_reader

    with _explained(source, file_format, compression):
        if file_format == "parquet":
            return parquet_reader.nested_types(source, compression, names, scratch)
        undecided, nested = set(names), set[str]()
        for row in read_values(source, declared, scratch):
            found = {name for name in undecided if isinstance(row, dict) and row.get(name) is not None}
            nested |= {name for name in found if isinstance(row, dict) and isinstance(row[name], list | dict)}
            undecided -= found
            if not undecided:
                break
        types = dict.fromkeys(undecided, parquet_reader.NO_VALUE)
        if not nested:
            return types
        rows = (row for row in read_values(source, declared, scratch) if isinstance(row, dict))
        return types | parquet_reader.infer_types(rows, nested)


@contextmanager
def _explained(source: Path, file_format: str, compression: str | None) -> Iterator[None]:
    """Turn errors of the file's content into UserErrors."""
    if not source.is_file():
        raise UserError(f"data file {source} does not exist", "check data.source")
    try:
        yield
    except Exception as error:
        arrow = sys.modules.get("pyarrow")
        if not isinstance(error, (OSError, EOFError, zlib.error, *([arrow.ArrowException] if arrow else []))):
            raise
        description = f"{file_format}, {compression}" if compression else file_format
        raise UserError(f"{source} cannot be read as {description}: {error}", "fetch or export it again") from error


def _read_records(
    source: Path, file_format: str, compression: str | None, columns: Columns | None, scratch: Path
) -> Generator[Record, None, None]:
    """Yield the records of a file. Only JSON can be read without `columns`."""
    if file_format == "json":
        yield from read_json(source, compression, columns)
        return
    if file_format == "jsonl":
        with open_source(source, compression) as file:
            yield from read_json_lines(numbered_lines(file), columns)
        return
    assert columns is not None
    if file_format == "parquet":
        from tailtune.parquet.parquet_reader import read_parquet

        yield from read_parquet(source, compression, columns, scratch)
        return
    with open_source(source, compression) as file:
        yield from {"csv": _read_csv, "txt": _read_txt}[file_format](numbered_lines(file), columns)


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


def _read_csv(lines: Iterator[tuple[int, bytes]], columns: Columns | None) -> Iterator[Record]:
    """Parse CSV with a header. Values are not converted: `007` stays "007".

    A quote that is never closed loses only its own line, not the rest of the file. Without `columns`, the only record
    is the header.
    """
    csv.field_size_limit(max(csv.field_size_limit(), 2 * source_lines.MAX_LINE_BYTES))
    source = _CsvLines(lines)
    reader = csv.reader(source, strict=True)
    header: list[str] | None = None
    indices: list[int | None] = []
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
            if columns is None:
                yield Record(number, text, row)
                return
            indices = find_columns(header, columns)
        elif len(row) != len(header):
            yield Record(number, text, BadRow(f"{len(row)} values, but the header has {len(header)} columns"))
        elif not _is_unicode(text):
            yield Record(number, text, BadRow("invalid UTF-8"))
        else:
            yield Record(number, text, [None if index is None else row[index] for index in indices])
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


def _read_txt(lines: Iterator[tuple[int, bytes]], columns: Columns) -> Iterator[Record]:
    """Yield one row per line that is not blank, with the column `text`."""
    indices = find_columns(["text"], columns)
    for number, line in lines:
        try:
            text = decode_line(line)
        except BadRow as error:
            yield Record(number, line, error)
        else:
            if text.strip():
                yield Record(number, line, [None if index is None else text.removesuffix("\r") for index in indices])
