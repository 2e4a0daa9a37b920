"""What the readers share: numbered lines of a source file, and rows collected into batches.

Every reader yields `Record`s. `collect_batches` decides which of them are good, so that a good row
means the same in every format. Only batches need pyarrow and numpy: `--inspect` reads rows without them.
"""

import gzip
import io
import json
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

MAX_LINE_BYTES = 16 << 20
"""A longer line, array element or CSV record is rejected."""
BATCH_BYTES = 4 << 20
"""Size of the read buffer, and of the text in a batch."""
BATCH_ROWS = 1 << 16
"""Maximum number of rows, good and bad, in a batch. This bounds its memory when rows are very short."""
MAX_REJECT_CHARS = 500
"""Length of the text in a reject; the rest of the bad row is cut off."""
MAX_COLUMNS_SHOWN = 30
BOM = b"\xef\xbb\xbf"


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
        self.reason, self.columns = reason, set(columns)


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
    columns = list(columns)
    shown = ", ".join(columns[:MAX_COLUMNS_SHOWN]) or "none"
    more = f" and {len(columns) - MAX_COLUMNS_SHOWN} more" if len(columns) > MAX_COLUMNS_SHOWN else ""
    return UserError(
        f"column '{name}' is not in {where}{did_you_mean(name, columns)}; found: {shown}{more}",
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
def open_source(source: Path, compression: str | None) -> Iterator[io.BufferedReader]:
    """Open a file to read its bytes, decompressed and without a byte order mark. Shows how much of it has been read.

    Raises UserError.
    """
    with (
        source.open("rb", buffering=0) as raw,
        io.BufferedReader(_decompressed(raw, source.name, compression), BATCH_BYTES) as file,
        Progress(f"parquet: {source.name}", source.stat().st_size, "bytes", measure=raw.tell),
    ):
        if file.peek(len(BOM)).startswith(BOM):
            file.read(len(BOM))
        yield file


def _decompressed(raw: io.FileIO, name: str, compression: str | None) -> Any:
    if compression is None:
        return raw
    if installed_version("pyarrow") is None:
        if compression != "gzip":
            require_train(f"reading {name}")
        return gzip.open(raw)
    import pyarrow as pa

    return pa.input_stream(raw, compression=compression)


def numbered_lines(file: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    r"""Yield (number from 1, text without its final `\n`) for each line of the file.

    Only the first MAX_LINE_BYTES + 1 bytes of a longer line are read into memory; see `check_length`.
    """
    for number in count(1):
        text = part = file.readline(MAX_LINE_BYTES + 1)
        if not text:
            return
        while part and not part.endswith(b"\n"):
            part = file.readline(MAX_LINE_BYTES)
        yield number, text.removesuffix(b"\n")


def check_length(text: bytes) -> None:
    """Raise BadRow when the text is longer than MAX_LINE_BYTES."""
    if len(text) > MAX_LINE_BYTES:
        limit = f"{MAX_LINE_BYTES >> 20} MiB" if MAX_LINE_BYTES >= 1 << 20 else f"{MAX_LINE_BYTES} bytes"
        raise BadRow(f"line longer than {limit}")


def decode_line(text: bytes) -> str:
    """Decode UTF-8. Raises BadRow when the text is too long or not valid UTF-8."""
    check_length(text)
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
