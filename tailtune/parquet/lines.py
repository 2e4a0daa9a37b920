"""What the readers share: numbered lines of a source file, and rows collected into batches.

Every reader yields `Record`s. `collect_batches` decides which of them are good, so that a good row
means the same in every format. Only batches need pyarrow and numpy: `--inspect` reads rows without them.
"""

import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tailtune.errors import UserError, did_you_mean, one_line
from tailtune.imports import installed_version, require_train
from tailtune.progress import Progress

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

MAX_DEPTH = 64
"""Lists and objects that are nested more deeply are rejected."""
BATCH_BYTES = 4 << 20
"""Size of the read buffer, and of the text in a batch."""
BATCH_ROWS = 1 << 16
"""Maximum number of rows, good and bad, in a batch. This bounds its memory when rows are very short."""
MAX_REJECT_CHARS = 500
"""Length of the text in a reject; the rest of the bad row is cut off."""
MAX_REASON_CHARS = 300
MAX_COLUMNS_SHOWN = 30
MAX_COLUMN_CHARS = 60
"""Of a column's name in a message."""
BOM = b"\xef\xbb\xbf"
OTHER_FORMATS = {
    b"\x1f\x8b": ("gzip", "let its name end in .gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "let its name end in .zst"),
    b"PAR1": ("Parquet", "set data.format to parquet"),
    b"\xfd7zXZ": ("xz", "decompress it"),
    b"PK\x03\x04": ("a ZIP archive or a spreadsheet", "extract it, or export it as CSV"),
}
"""First bytes of files with a wrong name: what they are, and the remedy."""
WEB_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE)
"""Beginning of what a server sends in place of a file, often for a login."""


@dataclass(frozen=True)
class Source:
    """A file to read, and the limits on what is in it."""

    path: Path
    format: str
    compression: str | None
    scratch: Path
    """Directory for a decompressed Parquet file."""
    max_row_bytes: int
    """A longer line, array element, CSV record or Parquet row is rejected."""
    max_file_bytes: int
    """After decompression."""

    def too_long(self) -> "BadRow":
        return BadRow(f"row longer than data.max_row_bytes {self.max_row_bytes:,}")

    def too_large(self) -> UserError:
        problem = f"{self.path} has more bytes than data.max_file_bytes {self.max_file_bytes:,}, decompressed"
        return UserError(problem, "raise it, or split the file")


@dataclass(frozen=True)
class Columns:
    """What is read from a source."""

    names: Sequence[str]
    """Columns of the source, in the order of a record's values."""
    optional: frozenset[str] = frozenset()
    """Those that may be empty, null, or missing: the value is then the empty text, of lists and objects null."""
    messages: str | None = None
    """The one that holds conversations."""
    types: Mapping[str, Any] = field(default_factory=dict)
    """Arrow types of those that hold conversations, lists or objects. All others hold text."""
    where: str = "the data"
    """The source, as messages call it."""

    def are_plain(self) -> bool:
        """Return whether every column holds text and needs a value."""
        return not (self.optional or self.messages or self.types)


class BadRow(Exception):
    """Why one row is rejected, and the columns it has, where they are known."""

    def __init__(self, reason: str, columns: Iterable[str] = ()) -> None:
        super().__init__(reason)
        self.reason = reason if len(reason) <= MAX_REASON_CHARS else f"{reason[:MAX_REASON_CHARS]}…"
        self.columns = set(columns)


class Record(NamedTuple):
    """One row as a reader found it, good or bad."""

    line: int
    """Line on which the row begins, from 1. In Parquet, which has no lines, the number of the row."""
    text: bytes | str | dict[str, Any]
    """The row as it is in the source."""
    values: Sequence[Any] | BadRow
    """One value for each requested column, or why there are none. Text is a string; what is missing is None."""


class Reject(NamedTuple):
    """One line of `rejects.jsonl`."""

    line: int
    """As in `Record`."""
    reason: str
    text: str


@dataclass
class Batch:
    """Consecutive rows of the source, good and bad."""

    columns: "pa.Table"
    """The good rows: N rows, one column for each requested column."""
    lines: "np.ndarray"
    """Line of each good row: int64 [N]."""
    rejects: list[Reject]
    """The bad rows, by line."""
    rejected_columns: set[str]
    """Names of the columns in rejected rows, for the message about a column that no row has."""


def missing_column(name: str, columns: Iterable[str], where: str = "the data") -> UserError:
    """Return the error about a column that is not among the `columns` of the data."""
    columns = [each if len(each) <= MAX_COLUMN_CHARS else f"{each[:MAX_COLUMN_CHARS]}…" for each in columns]
    shown = ", ".join(columns[:MAX_COLUMNS_SHOWN]) or "none"
    more = f" and {len(columns) - MAX_COLUMNS_SHOWN} more" if len(columns) > MAX_COLUMNS_SHOWN else ""
    return UserError(
        f"column '{name}' is not in {where}{did_you_mean(name, columns[:1000])}; found: {shown}{more}",
        "map your columns in data.columns, as docs/data.md shows",
    )


def find_columns(header: list[str], columns: Columns) -> list[int | None]:
    """Return the index of each requested column, None of an optional one that is missing.

    Raises UserError when another one is missing, or one appears twice.
    """
    for name in columns.names:
        if name not in header and name not in columns.optional:
            raise missing_column(name, header, columns.where)
        if header.count(name) > 1:
            raise UserError(f"column '{name}' appears {header.count(name)} times in the header", "rename all but one")
    return [header.index(name) if name in header else None for name in columns.names]


@contextmanager
def open_source(source: Source) -> Iterator[io.BufferedReader]:
    """Open a file to read its bytes, decompressed and without a byte order mark. Shows how much of it has been read.

    Raises UserError, also where the beginning shows that the file has another format than its name says.
    """
    with (
        source.path.open("rb", buffering=0) as raw,
        io.BufferedReader(_decompressed(raw, source), BATCH_BYTES) as file,
        Progress(f"parquet: {source.path.name}", source.path.stat().st_size, "bytes", measure=raw.tell),
    ):
        beginning = file.peek(len(BOM))
        if beginning.startswith(BOM):
            file.read(len(BOM))
        if source.format != "parquet":
            _check_beginning(beginning[:1024], source)
        yield file


def _check_beginning(beginning: bytes, source: Source) -> None:
    """Raise UserError when the first bytes of a text are those of another format or encoding."""
    for first, (name, remedy) in OTHER_FORMATS.items():
        if beginning.startswith(first):
            raise UserError(f"{source.path} is {name}, not {source.format}", remedy)
    if source.format != "txt" and WEB_PAGE.match(beginning):
        raise UserError(
            f"{source.path} is a web page, not {source.format}", "download the file itself, after the login"
        )
    if encoding := _other_encoding(beginning):
        raise UserError(f"{source.path} is {encoding}, not UTF-8", encoding_remedy(encoding))


def _other_encoding(beginning: bytes) -> str | None:
    """Return which encoding with more than one byte per character a text has, by its mark or by its NULs."""
    if beginning.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    if beginning.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    low, high = beginning[::2], beginning[1::2]
    for encoding, letters, nuls in (("UTF-16LE", low, high), ("UTF-16BE", high, low)):
        if nuls and not any(nuls) and all(letters):
            return encoding
    return None


def encoding_remedy(encoding: str) -> str:
    return f"convert it with iconv -f {encoding} -t UTF-8 FILE > NEW"


class _Bounded(io.RawIOBase):
    """What a decompressor yields, up to the source's limit."""

    def __init__(self, stream: Any, source: Source) -> None:
        self._stream, self._source, self._num_bytes = stream, source, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._stream.readinto(buffer))
        self._num_bytes += count
        if self._num_bytes > self._source.max_file_bytes:
            raise self._source.too_large()
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def _decompressed(raw: io.FileIO, source: Source) -> Any:
    if source.compression is None:
        return raw
    if installed_version("pyarrow") is None:
        if source.compression != "gzip":
            require_train(f"reading {source.path.name}")
        return _Bounded(gzip.open(raw), source)
    import pyarrow as pa

    return _Bounded(pa.input_stream(raw, compression=source.compression), source)


def numbered_lines(file: io.BufferedReader, max_row_bytes: int) -> Iterator[tuple[int, bytes]]:
    r"""Yield (number from 1, text without its final `\n`) for each line of the file.

    Only the first `max_row_bytes` + 1 bytes of a longer line are kept.
    """
    for number in count(1):
        text = part = file.readline(max_row_bytes + 1)
        if not text:
            return
        while part and not part.endswith(b"\n"):
            part = file.readline(BATCH_BYTES)
        yield number, text.removesuffix(b"\n")


def check_length(text: bytes, source: Source) -> None:
    """Raise BadRow when a row is too long."""
    if len(text) > source.max_row_bytes:
        raise source.too_long()


def decode_line(text: bytes, source: Source) -> str:
    """Decode UTF-8. Raises BadRow when the text is too long or not valid UTF-8."""
    check_length(text, source)
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise BadRow("invalid UTF-8") from None


def collect_batches(records: Iterable[Record], columns: Columns) -> Iterator[Batch]:
    """Yield the records in batches, in their order. A row without a value that it needs is rejected.

    `columns` are those that the records' values belong to.
    """
    import numpy as np
    import pyarrow as pa

    names, plain = list(columns.names), columns.are_plain()
    types = [columns.types.get(name, pa.string()) for name in names]
    rows: list[Sequence[Any]] = []
    lines: list[int] = []
    rejects: list[Reject] = []
    rejected_columns: set[str] = set()
    num_chars = 0

    def table_of(good: list[Sequence[Any]]) -> pa.Table:
        values = zip(*good, strict=True) if good else [[] for _ in names]
        arrays = [pa.array(list(column), of_type) for column, of_type in zip(values, types, strict=True)]
        return pa.table(arrays, names=names)

    def batch() -> Batch:
        kept = list(range(len(rows)))
        try:
            table = table_of(rows)
        except (pa.ArrowException, OverflowError):
            reasons = [_misfit(row, names, types) for row in rows]
            kept = [index for index in kept if not reasons[index]]
            rejects.extend(_make_reject(line, reason, dict(zip(names, row, strict=True)))
                           for line, reason, row in zip(lines, reasons, rows, strict=True) if reason)  # fmt: skip
            table = table_of([rows[index] for index in kept])
        return Batch(table, np.array(lines, np.int64)[kept], sorted(rejects), rejected_columns)

    for line, text, values in records:
        row = values if isinstance(values, BadRow) else _check_values(values, columns, plain)
        if isinstance(row, BadRow):
            rejects.append(_make_reject(line, row.reason, text))
            rejected_columns |= row.columns
        else:
            rows.append(row)
            lines.append(line)
            num_chars += sum(map(len, row if plain else map(str, row)))
        if num_chars >= BATCH_BYTES or len(rows) + len(rejects) >= BATCH_ROWS:
            yield batch()
            rows, lines, rejects, rejected_columns, num_chars = [], [], [], set(), 0
    yield batch()


def _misfit(row: Sequence[Any], names: list[str], types: list[Any]) -> str:
    """Return which value of a row its column's type cannot hold; empty when there is none."""
    import pyarrow as pa

    for name, value, of_type in zip(names, row, types, strict=True):
        try:
            pa.array([value], of_type)
        except (pa.ArrowException, OverflowError) as error:
            return f"column '{name}' does not fit the other rows: {one_line(error, 150)}"
    return ""


def message_type() -> Any:
    """Return the Arrow type of a conversation: a list of messages."""
    import pyarrow as pa

    return pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def _check_values(values: Sequence[Any], columns: Columns, plain: bool) -> Sequence[Any] | BadRow:
    """Return the values of one row, or which one it lacks. `plain` is that of the columns."""
    if plain and all(values) and not any(map(str.isspace, values)):
        return values
    for name, value in zip(columns.names, values, strict=True):
        is_empty = value is None or (isinstance(value, str) and (not value or value.isspace()))
        if is_empty and name not in columns.optional:
            return BadRow(f"column '{name}' is {'null' if value is None else 'empty'}")
    return ["" if value is None and name not in columns.types else value
            for name, value in zip(columns.names, values, strict=True)]  # fmt: skip


def _as_text(value: Any) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _make_reject(line: int, reason: str, text: bytes | str | dict[str, Any]) -> Reject:
    if isinstance(text, dict):
        text = json.dumps(text, default=_as_text)
    if isinstance(text, str):
        text = text[:MAX_REJECT_CHARS].encode(errors="surrogateescape")
    return Reject(line, reason, text[: 4 * MAX_REJECT_CHARS].decode(errors="backslashreplace")[:MAX_REJECT_CHARS])
