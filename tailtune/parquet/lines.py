"""The parts that every reader of rows shares: blocks of whole lines, good rows, and reasons for bad ones."""

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_LINE_BYTES = 16 << 20
"""A longer line, array element or CSV record is rejected without being held in memory."""
BLOCK_BYTES = 4 << 20
"""12 % less CPU time than 1 MiB: fewer steps in Python, which the threads would wait for."""
BLOCK_LINES = 1 << 16
"""A block of bad rows is held as Python objects, so very short lines make smaller blocks."""
MAX_TEXT = 500
"""Characters of a bad row that go to the rejects file."""
BOM = b"\xef\xbb\xbf"


class Reject(NamedTuple):
    line: int
    reason: str
    text: str


@dataclass
class Batch:
    """Good rows and bad rows of one stretch of the source, each with its line number from 1.

    A line number is the row's first line; in Parquet, which has no lines, the row's number.
    """

    columns: pa.Table
    lines: np.ndarray
    rejects: list[Reject]
    keys: set[str] = field(default_factory=set)
    """Columns seen in rejected rows: for the message about a column that is nowhere."""


class Block(NamedTuple):
    """Whole lines. `lines[i]` is the source line on which the i-th of them begins."""

    data: bytes
    lines: np.ndarray
    rejects: list[Reject]


@contextmanager
def open_source(source: Path, compression: str | None) -> Iterator[io.BufferedReader]:
    """Open a file for reading bytes, decompressed and without a byte order mark."""
    with io.BufferedReader(pa.input_stream(source, compression=compression), BLOCK_BYTES) as file:
        if file.peek(len(BOM)).startswith(BOM):
            file.read(len(BOM))
        yield file


def read_chunks(source: Path, compression: str | None) -> Iterator[bytes]:
    with pa.input_stream(source, compression=compression) as stream:
        while chunk := stream.read(BLOCK_BYTES):
            yield chunk


def without_bom(chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield next(chunks, b"").removeprefix(BOM)
    yield from chunks


def cut_lines(chunks: Iterable[bytes]) -> Iterator[Block]:
    """Blocks that end at a line end; a line over the limit becomes a reject, not memory."""
    rest: list[bytes] = []
    rest_bytes = 0
    line = 1
    for chunk in _end_last_line(chunks):
        first, last = chunk.find(b"\n"), chunk.rfind(b"\n")
        if first >= 0 and rest_bytes + first > MAX_LINE_BYTES:
            yield Block(b"", np.empty(0, np.int64), [make_reject(line, too_long(), b"".join([*rest, chunk[:first]]))])
            rest, rest_bytes = [], 0
            line += 1
            chunk = chunk[first + 1 :]
            last -= first + 1
        if last >= 0:
            data = b"".join([*rest, chunk[: last + 1]])
            count = int(np.count_nonzero(np.frombuffer(data, np.uint8) == 10))  # 5 times bytes.count
            yield from _at_most_block_lines(Block(data, np.arange(line, line + count), []))
            line += count
            rest, rest_bytes = [], 0
            chunk = chunk[last + 1 :]
        if chunk:
            if rest_bytes <= MAX_LINE_BYTES:
                rest.append(chunk)
            rest_bytes += len(chunk)  # beyond the limit only counted


def _at_most_block_lines(block: Block) -> Iterator[Block]:
    if len(block.lines) <= BLOCK_LINES:
        yield block
        return
    ends = np.flatnonzero(np.frombuffer(block.data, np.uint8) == 10) + 1
    begin = 0
    for start in range(0, len(ends), BLOCK_LINES):
        lines = block.lines[start : start + BLOCK_LINES]
        end = int(ends[start + len(lines) - 1])
        yield Block(block.data[begin:end], lines, [])
        begin = end


def _end_last_line(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks, with the last line ended."""
    last = b"\n"
    for chunk in chunks:
        last = chunk or last
        yield chunk
    if not last.endswith(b"\n"):
        yield b"\n"


def too_long() -> str:
    """The reason to reject a line or array element over the limit."""
    limit = f"{MAX_LINE_BYTES >> 20} MiB" if MAX_LINE_BYTES >= 1 << 20 else f"{MAX_LINE_BYTES} bytes"
    return f"line longer than {limit}"


def make_reject(line: int, reason: str, text: bytes | str) -> Reject:
    if isinstance(text, bytes):
        text = text[: 4 * MAX_TEXT].decode(errors="backslashreplace")
    return Reject(int(line), reason, text[:MAX_TEXT])


class Bad(Exception):
    """Why one row is rejected."""

    def __init__(self, reason: str, keys: Iterable[str] = ()):
        super().__init__(reason)
        self.keys = keys


def table_of(rows: list[list[str]], names: list[str]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[] for _ in names]
    return pa.table([pa.array(list(column), pa.string()) for column in columns], names=names)


def without_bad(
    table: pa.Table,
    lines: np.ndarray,
    text_of: Callable[[int], bytes | str],
    check: Callable[[Any], Any] = lambda text: None,
) -> Batch:
    """The batch without rows whose value is null or blank. `check` may raise Bad with a better reason."""
    bad = np.zeros(len(lines), bool)
    reasons: dict[int, str] = {}
    keys: set[str] = set()
    for name in table.column_names:
        column = table[name]
        blank = pc.or_(pc.equal(pc.binary_length(column), 0), pc.utf8_is_space(column))
        rows = np.flatnonzero(np.asarray(pc.fill_null(blank, True)))
        bad[rows] = True
        for row in rows.tolist():
            what = "empty" if column[row].is_valid else "null"
            reasons.setdefault(row, f"column '{name}' is {what}")
    if not reasons:
        return Batch(table, lines, [])
    rejects = []
    for row in sorted(reasons):
        text = text_of(row)
        try:
            check(text)
        except Bad as better:
            reasons[row] = str(better)
            keys.update(better.keys)
        rejects.append(make_reject(lines[row], reasons[row], text))
    return Batch(table.filter(pa.array(~bad)), lines[~bad], rejects, keys)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_unicode(text: str) -> bool:
    """Whether a text that was decoded with `surrogateescape` was valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
