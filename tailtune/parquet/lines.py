"""What the readers share: numbered lines of a source file, and rows collected into batches.

Every reader yields `Record`s. `collect_batches` decides which of them are good, so that a good row
means the same in every format.
"""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, cast

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
BOM = b"\xef\xbb\xbf"


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
    values: Sequence[str | None] | BadRow
    """One value for each requested column, or why there are none."""


class Reject(NamedTuple):
    """One line of `rejects.jsonl`."""

    line: int
    """As in `Record`."""
    reason: str
    text: str


@dataclass
class Batch:
    """Consecutive rows of the source, good and bad."""

    columns: pa.Table
    """The good rows: N rows, one text column for each requested column."""
    lines: np.ndarray
    """Line of each good row: int64 [N]."""
    rejects: list[Reject]
    """The bad rows, by line."""
    rejected_columns: set[str]
    """Names of the columns in rejected rows, for the message about a column that no row has."""


@contextmanager
def open_source(source: Path, compression: str | None) -> Iterator[io.BufferedReader]:
    """Open a file to read its bytes, decompressed and without a byte order mark."""
    with io.BufferedReader(pa.input_stream(source, compression=compression), BATCH_BYTES) as file:
        if file.peek(len(BOM)).startswith(BOM):
            file.read(len(BOM))
        yield file


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


def collect_batches(records: Iterable[Record], names: list[str]) -> Iterator[Batch]:
    """Yield the records in batches, in their order. A row with a null or blank value is rejected.

    `names` are the columns that the records' values belong to.
    """
    rows: list[Sequence[str]] = []
    lines: list[int] = []
    rejects: list[Reject] = []
    rejected_columns: set[str] = set()
    num_chars = 0

    def batch() -> Batch:
        columns = zip(*rows, strict=True) if rows else [[] for _ in names]
        table = pa.table([pa.array(list(column), pa.string()) for column in columns], names=names)
        return Batch(table, np.array(lines, np.int64), sorted(rejects), rejected_columns)

    for line, text, values in records:
        row = values if isinstance(values, BadRow) else _check_values(values, names)
        if isinstance(row, BadRow):
            rejects.append(_make_reject(line, row.reason, text))
            rejected_columns |= row.columns
        else:
            rows.append(row)
            lines.append(line)
            num_chars += sum(map(len, row))
        if num_chars >= BATCH_BYTES or len(rows) + len(rejects) >= BATCH_ROWS:
            yield batch()
            rows, lines, rejects, rejected_columns, num_chars = [], [], [], set(), 0
    yield batch()


def _check_values(values: Sequence[str | None], names: list[str]) -> Sequence[str] | BadRow:
    """Return the values of one row, or why they are not all text with content."""
    texts = cast(Sequence[str], values)
    if all(texts) and not any(map(str.isspace, texts)):
        return texts
    name, value = next(item for item in zip(names, values, strict=True) if not item[1] or item[1].isspace())
    return BadRow(f"column '{name}' is {'null' if value is None else 'empty'}")


def _make_reject(line: int, reason: str, text: bytes | str | dict[str, Any]) -> Reject:
    if isinstance(text, dict):
        text = json.dumps(text, default=lambda value: value.decode(errors="backslashreplace"))
    if isinstance(text, str):
        text = text[:MAX_REJECT_CHARS].encode(errors="surrogateescape")
    return Reject(line, reason, text[: 4 * MAX_REJECT_CHARS].decode(errors="backslashreplace")[:MAX_REJECT_CHARS])
