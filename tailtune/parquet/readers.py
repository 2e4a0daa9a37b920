"""Read a source file of a recipe as rows, in batches, with a reason for every bad row.

Formats: JSON (an array of objects), JSON Lines, CSV, plain text, and Parquet, each also compressed
as `.gz` or `.zst`. A row is good when every requested column is text or a number, is not blank, and
is valid Unicode; in JSON and Parquet, columns may also hold conversations, lists and objects. No row
is dropped silently: it is either in `Batch.columns` or in `Batch.rejects`. Blank lines are not rows.
The memory needed does not grow with the file: `data.max_row_bytes` bounds it.
"""

import csv
import io
import sys
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tailtune.errors import UserError, one_line
from tailtune.imports import require_train
from tailtune.parquet.json_reader import read_json
from tailtune.parquet.lines import (
    BadRow,
    Batch,
    Columns,
    Record,
    Source,
    check_length,
    collect_batches,
    decode_line,
    encoding_remedy,
    find_columns,
    numbered_lines,
    open_source,
)
from tailtune.recipe.schema import Data

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


def source_of(path: Path, data: Data, scratch: Path) -> Source:
    """Return a file as the recipe's `data` says how to read it. Raises UserError when its format is unknown."""
    return Source(path, *detect_format(path, data.format), scratch, data.max_row_bytes, data.max_file_bytes)


def read_rows(source: Source, columns: Columns) -> Generator[Batch, None, None]:
    """Yield batches of the columns, in the order of the source.

    Raises UserError when the file cannot be read in its format, or its header lacks a column.
    """
    if columns.messages and source.format in ("csv", "txt"):
        kind = source.format.upper()
        problem = f"{source.path.name} is {kind}, so its column '{columns.messages}' holds no conversations"
        raise UserError(problem, "give them as JSON, JSON Lines or Parquet")
    with _explained(source), closing(_read_records(source, columns)) as records:
        yield from collect_batches(records, columns)


def read_values(source: Source) -> Iterator[dict[str, Any] | BadRow]:
    """Yield every row with all of its columns, for `--inspect`: text, and what lists and objects hold.

    Raises UserError as `read_rows` does. Only Parquet needs pyarrow.
    """
    with _explained(source):
        if source.format == "parquet":
            require_train("reading Parquet")
            from tailtune.parquet.parquet_reader import read_parquet_values

            yield from read_parquet_values(source)
            return
        names = ["text"]
        if source.format == "csv":
            with open_source(source) as file:
                headers = (record.values for record in _read_csv(file, source, None))
                header = next((values for values in headers if isinstance(values, list)), [])
                names = [name for name in header if name.strip()]  # spreadsheets leave commas at the end of the lines
        columns = None if source.format in ("json", "jsonl") else Columns(names)
        with closing(_read_records(source, columns)) as records:
            for record in records:
                if isinstance(record.values, BadRow):
                    yield record.values
                else:
                    yield record.values[0] if columns is None else dict(zip(names, record.values, strict=True))


def nested_columns(source: Source, names: Sequence[str]) -> dict[str, Any]:
    """Return the Arrow types of those columns that hold lists or objects, in JSON by their first value.

    The type null is of those that hold no value at all. Raises UserError for objects without a key.
    """
    if source.format in ("csv", "txt"):
        return {}
    from tailtune.parquet import parquet_reader

    with _explained(source):
        if source.format == "parquet":
            return parquet_reader.nested_types(source, names)
        undecided, nested = set(names), set[str]()
        for row in read_values(source):
            found = {name for name in undecided if isinstance(row, dict) and row.get(name) is not None}
            nested |= {name for name in found if isinstance(row, dict) and isinstance(row[name], list | dict)}
            undecided -= found
            if not undecided:
                break
        types = dict.fromkeys(undecided, parquet_reader.NO_VALUE)
        if not nested:
            return types
        rows = (row for row in read_values(source) if isinstance(row, dict))
        return types | parquet_reader.infer_types(rows, nested)


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turn errors of the file's content into UserErrors."""
    if not source.path.is_file():
        raise UserError(f"data file {source.path} does not exist", "check data.source")
    try:
        yield
    except Exception as error:
        arrow = sys.modules.get("pyarrow")
        if not isinstance(error, (OSError, EOFError, zlib.error, *([arrow.ArrowException] if arrow else []))):
            raise
        description = f"{source.format}, {source.compression}" if source.compression else source.format
        problem = f"{source.path} cannot be read as {description}: {one_line(error)}"
        raise UserError(problem, "fetch or export it again") from error


def _read_records(source: Source, columns: Columns | None) -> Generator[Record, None, None]:
    """Yield the records of a file. Only JSON can be read without `columns`."""
    if source.format in ("json", "jsonl"):
        yield from read_json(source, columns)
        return
    assert columns is not None
    if source.format == "parquet":
        from tailtune.parquet.parquet_reader import read_parquet

        yield from read_parquet(source, columns)
        return
    with open_source(source) as file:
        yield from {"csv": _read_csv, "txt": _read_txt}[source.format](file, source, columns)


# -- CSV -------------------------------------------------------------------------------------------


REREAD_BYTES = 1 << 28
"""How much of a file may be read again after quotes that are never closed."""
DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}


class _TooLong(Exception):
    """A CSV record does not end within the limit on rows: its quote is never closed."""


class _CsvLines:
    """Lines of text for csv.reader. It can put back the lines that an unclosed quote has consumed."""

    def __init__(self, file: io.BufferedReader, source: Source) -> None:
        self.source = source
        self.lines = numbered_lines(file, source.max_row_bytes)
        self.put_back: deque[tuple[int, str]] = deque()
        self.taken: list[tuple[int, str]] = []
        """Lines of the current record."""
        self.taken_chars = self.reread_chars = 0
        self.rejected: list[Record] = []
        """Lines that are too long and that csv.reader has not seen."""
        self.at_end = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, text = self.put_back.popleft() if self.put_back else self._read_line()
        self.taken.append((number, text))
        self.taken_chars += len(text) + 1
        if self.taken_chars > self.source.max_row_bytes + 1:
            raise _TooLong
        return text + "\n"

    def _read_line(self) -> tuple[int, str]:
        for number, line in self.lines:
            try:
                check_length(line, self.source)
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
        """Return (number, text) of the bad record's first line. Its other lines are read again. Raises UserError."""
        self.reread_chars += self.taken_chars
        if self.reread_chars > REREAD_BYTES:
            problem = (
                f"{self.source.path}: line {self.taken[0][0]:,} and many before it have a quote that is never closed"
            )
            raise UserError(problem, "correct the quotes, or export the rows as JSON Lines")
        self.put_back.extendleft(reversed(self.taken[1:]))
        self.taken = self.taken[:1]
        self.at_end = False
        return self.take_record()

    def take_rejected(self) -> list[Record]:
        rejected, self.rejected = self.rejected, []
        return rejected


def _read_csv(file: io.BufferedReader, source: Source, columns: Columns | None) -> Iterator[Record]:
    """Parse CSV with a header. Values are not converted: `007` stays "007".

    A quote that is never closed loses only its own line, not the rest of the file. Without `columns`, the only record
    is the header.
    """
    csv.field_size_limit(max(csv.field_size_limit(), 2 * source.max_row_bytes))
    lines = _CsvLines(file, source)
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    indices: list[int | None] = []
    while True:
        try:
            row = next(reader)
        except StopIteration:
            break
        except (csv.Error, _TooLong) as error:
            if header is None:
                _check_header([], lines.taken[0][1], columns, source)
                why = str(error) or "its quote is never closed"
                raise UserError(f"the CSV header cannot be read: {why}", "correct the first line") from None
            reason = "a quote is opened and never closed" if lines.at_end or not str(error) else str(error)
            number, text = lines.take_first_line()
            yield Record(number, text, BadRow(f"broken CSV ({reason})"))
            continue
        number, text = lines.take_record()
        if not text.strip():
            continue
        if header is None:
            header = row
            if lines.rejected:
                raise UserError(f"the CSV header cannot be read: {lines.rejected[0].values}", "correct the first line")
            _check_header(header, text, columns, source)
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
        yield from lines.take_rejected()
    yield from lines.take_rejected()


def _check_header(header: list[str], text: str, columns: Columns | None, source: Source) -> None:
    """Raise UserError for a header in another encoding, or with other delimiters than commas."""
    if not _is_unicode(text):
        raise UserError(f"the CSV header of {source.path} is not UTF-8", encoding_remedy("WINDOWS-1252"))
    lacking = set(columns.names if columns else ()).difference(header)
    if columns and not lacking:
        return
    for delimiter, name in DELIMITERS.items():
        names = text.split(delimiter)
        if len(names) > 1 and (len(header) <= 1 or lacking & {each.strip('" \r') for each in names}):
            program = "import csv,sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={!r}))"
            remedy = f'convert it with python -c "{program.format(delimiter)}" < FILE > NEW'
            raise UserError(f"the columns of {source.path} are separated by {name}, not commas", remedy)


def _is_unicode(text: str) -> bool:
    """Return whether a text that was decoded with `surrogateescape` was valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# -- Plain text ------------------------------------------------------------------------------------


def _read_txt(file: io.BufferedReader, source: Source, columns: Columns) -> Iterator[Record]:
    """Yield one row per line that is not blank, with the column `text`."""
    indices = find_columns(["text"], columns)
    for number, line in numbered_lines(file, source.max_row_bytes):
        try:
            text = decode_line(line, source)
        except BadRow as error:
            yield Record(number, line, error)
        else:
            if text.strip():
                yield Record(number, line, [None if index is None else text.removesuffix("\r") for index in indices])
