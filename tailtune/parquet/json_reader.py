"""Rows of JSON Lines and of JSON arrays: Arrow's parser where it can, Python's to say what is wrong.

A row is accepted or rejected for itself, never for its neighbours.
"""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from tailtune.errors import UserError
from tailtune.parquet import lines as source_lines
from tailtune.parquet.lines import (
    Bad,
    Batch,
    Block,
    cut_lines,
    is_utf8,
    make_reject,
    open_source,
    read_chunks,
    table_of,
    too_long,
    without_bad,
    without_bom,
)

MAX_ARRAY_BYTES = 256 << 20
"""A larger JSON array, decompressed, is refused: an array is read into memory as a whole."""


def read_json_lines(chunks: Iterator[bytes], names: list[str]) -> Iterator[Batch]:
    """Batches of the columns `names` from one JSON object per line."""
    yield from _ahead(lambda block: _parse_json_lines(block, names), cut_lines(chunks))


def read_json(source: Path, compression: str | None, names: list[str]) -> Iterator[Batch]:
    """Batches of the columns `names` from a JSON array; a file without one is read as JSON Lines."""
    if _is_array(source, compression):
        for elements in _batched(_array_elements(_read_array(source, compression))):
            yield _parse_slow(elements, names)
    else:
        yield from read_json_lines(without_bom(read_chunks(source, compression)), names)


class _Object(list[Any]):
    """A JSON object as its pairs, so that a key that stands twice is seen."""


class _Number(str):
    """A JSON number as it is written: 1.50 stays 1.50, and 5,000 digits are no problem."""


_DECODER = json.JSONDecoder(
    object_pairs_hook=_Object, parse_int=_Number, parse_float=_Number, parse_constant=lambda _: math.nan
)
_JSON_TYPES = {
    type(None): "null",
    bool: "a boolean",
    float: "not a number (NaN)",
    list: "a list",
    _Object: "an object",
    _Number: "a number",
    str: "a text",
}


def _parse_json_lines(block: Block, names: list[str]) -> Batch:
    """Arrow's parser for good lines; what it does not take is cut smaller, at last into single lines.

    Every decision is per line and the same on both ways. So one bad line costs the slow parser for
    64 KiB, not for its block.
    """
    pieces = [(block.data, block.lines)]
    batches = []
    while pieces:
        data, lines = pieces.pop(0)
        batch = _parse_fast(data, lines, names)
        if batch is None and len(data) > 1 << 16 and len(lines) > 1:
            pieces[:0] = _halves(data, lines)
        else:
            batches.append(batch or _parse_slow(zip(lines.tolist(), data.split(b"\n"), strict=False), names))
    return Batch(
        pa.concat_tables([batch.columns for batch in batches]),
        np.concatenate([batch.lines for batch in batches]),
        block.rejects + [reject for batch in batches for reject in batch.rejects],
        set().union(*(batch.keys for batch in batches)),
    )


def _halves(data: bytes, lines: np.ndarray) -> list[tuple[bytes, np.ndarray]]:
    """The two halves of at least two lines."""
    middle = data.find(b"\n", len(data) // 2) + 1
    if middle == len(data):
        middle = data.rfind(b"\n", 0, middle - 1) + 1
    count = data.count(b"\n", 0, middle)
    return [(data[:middle], lines[:count]), (data[middle:], lines[count:])]


def _parse_fast(data: bytes, lines: np.ndarray, names: list[str]) -> Batch | None:
    """The rows when every line is one JSON object that Arrow takes, else None."""
    spans = _object_spans(data)
    if spans is None or not (data.isascii() or is_utf8(data)):
        return None
    try:
        table = pa_json.read_json(
            pa.BufferReader(data),
            read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data)),
            parse_options=pa_json.ParseOptions(
                explicit_schema=pa.schema([(name, pa.string()) for name in names]),
                unexpected_field_behavior="ignore",
            ),
        )
    except pa.ArrowInvalid:
        return None
    index, begins, ends = spans
    if table.num_rows != len(index):
        return None
    return without_bad(
        table.select(names),
        lines[index],
        lambda row: data[begins[row] : ends[row]],
        lambda raw: _json_row(raw, names),
    )


def _object_spans(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(index, begin, end) of the lines that are not blank, when each starts with `{` and ends with `}`.

    Arrow ignores line ends: two objects on one line are two rows to it. Between a line that ends
    with `}` and one that begins with `{` JSON has no way to go on with an object, and a raw line end
    in a text is an error. So when there are as many rows as such lines, each line is one row. A NUL
    would end Arrow's input early, hence its own test.
    """
    if b"\0" in data:
        return None
    bytes_ = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(bytes_ == 10)
    begins = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    index = np.arange(len(ends))
    if not (np.all(bytes_[begins] == ord("{")) and np.all(bytes_[ends - 1] == ord("}"))):
        solid = np.flatnonzero((bytes_ != 32) & (bytes_ != 10) & (bytes_ != 13) & (bytes_ != 9))
        before, after = np.searchsorted(solid, begins), np.searchsorted(solid, ends)
        index = np.flatnonzero(after > before)
        begins, ends = solid[before[index]], solid[after[index] - 1] + 1
        if not (np.all(bytes_[begins] == ord("{")) and np.all(bytes_[ends - 1] == ord("}"))):
            return None
    return (index, begins, ends) if len(index) else None


def _parse_slow(texts: Iterable[tuple[int, bytes]], names: list[str]) -> Batch:
    """The rows of (line, text) pairs, with Python's parser."""
    rows, raws, kept, rejects = [], [], [], []
    keys: set[str] = set()
    for line, raw in texts:
        text = raw.strip(b" \t\r\n")
        if not text:
            continue
        try:
            if len(text) > source_lines.MAX_LINE_BYTES:
                raise Bad(too_long())
            rows.append(_json_row(text, names))
        except Bad as bad:
            rejects.append(make_reject(line, str(bad), text))
            keys.update(bad.keys)
        else:
            raws.append(text)
            kept.append(line)
    batch = without_bad(table_of(rows, names), np.array(kept, np.int64), raws.__getitem__)
    return Batch(batch.columns, batch.lines, sorted(rejects + batch.rejects), keys)


def _json_row(raw: bytes, names: list[str]) -> list[str]:
    """The needed values of one JSON object. Raises Bad."""
    try:
        row = _DECODER.decode(raw.decode())
    except UnicodeDecodeError as error:
        raise Bad(f"invalid UTF-8 (byte {error.start + 1})") from None
    except RecursionError:
        raise Bad("JSON nested too deeply") from None
    except json.JSONDecodeError as error:
        raise Bad(f"broken JSON ({error.msg} at character {error.pos + 1})") from None
    if not isinstance(row, _Object):
        raise Bad(f"not a JSON object but {_JSON_TYPES[type(row)]}")
    keys = [key for key, _ in row]
    values = []
    for name in names:
        found = [value for key, value in row if key == name]
        if len(found) != 1:
            raise Bad(f"column '{name}' is missing" if not found else f"column '{name}' stands twice", keys)
        if not isinstance(found[0], str):
            raise Bad(f"column '{name}' is {_JSON_TYPES[type(found[0])]}, not a text", keys)
        try:
            found[0].encode()
        except UnicodeEncodeError:
            raise Bad(f"column '{name}' holds a lone surrogate, which is no valid Unicode", keys) from None
        values.append(str(found[0]))
    return values


def _ahead(parse: Callable[[Block], Batch], blocks: Iterator[Block]) -> Iterator[Batch]:
    """Parse a few blocks ahead of the consumer, in order. Arrow's parser holds no GIL."""
    with ThreadPoolExecutor(2) as pool:
        pending: deque[Future[Batch]] = deque()
        for block in blocks:
            pending.append(pool.submit(parse, block))
            if len(pending) > 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# -- JSON arrays -----------------------------------------------------------------------------------

_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{},]', re.DOTALL)
"""A quoted text (its end may be missing), a bracket, or a comma."""
_BLANKS = re.compile(rb"[ \t\r\n]*+")


def _is_array(source: Path, compression: str | None) -> bool:
    """Return whether the first character is `[`. Many files named .json hold JSON Lines."""
    with open_source(source, compression) as file:
        while character := file.read(1):
            if character.strip():
                return character == b"["
    return False


def _read_array(source: Path, compression: str | None) -> bytearray:
    """Return the whole file. Raises UserError above MAX_ARRAY_BYTES."""
    data = bytearray()
    for chunk in without_bom(read_chunks(source, compression)):
        data += chunk
        if len(data) > MAX_ARRAY_BYTES:
            raise UserError(
                f"{source} is a JSON array of more than {MAX_ARRAY_BYTES >> 20} MiB",
                "convert it to JSON Lines with `jq -c '.[]'` and set data.source to the result",
            )
    return data


def _array_elements(data: bytearray) -> Iterator[tuple[int, bytes]]:
    """Yield every element of the array in `data` with the source line on which it begins.

    Only brackets, commas, and quotes are looked at, so that a broken element does not affect its
    neighbours. Raises UserError when the array has no end or is not the last thing in the file.
    """
    line, counted, depth, begin = 1, 0, 0, 0
    for token in _TOKENS.finditer(data):
        character = data[token.start()]
        if character == ord('"'):
            continue
        if character in b"[{":
            depth += 1
            begin = begin or token.end()  # the array's own bracket
        elif character in b"]}":
            depth -= 1
        if depth <= 0 or (depth == 1 and character == ord(",")):
            first = _end_of_blanks(data, begin)
            line, counted = line + data.count(b"\n", counted, first), first
            yield line, bytes(data[first : min(token.start(), first + source_lines.MAX_LINE_BYTES + 1)])
            begin = token.end()
        if depth <= 0:
            rest = _end_of_blanks(data, begin)
            if rest < len(data):
                line += data.count(b"\n", counted, rest)
                raise UserError(f"line {line}: text follows the end of the JSON array", "a file holds one array")
            return
    line += data.count(b"\n", counted, begin)
    raise UserError(
        "the JSON array does not end: the file is cut off, or a quote or bracket is missing in the row "
        f"after line {line}",
        "fetch it again, or correct that row",
    )


def _end_of_blanks(data: bytearray, begin: int) -> int:
    """Return the index of the first byte from `begin` that is not white space."""
    match = _BLANKS.match(data, begin)
    assert match is not None
    return match.end()


def _batched(elements: Iterator[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the elements in lists of about BLOCK_BYTES."""
    batch, num_bytes = [], 0
    for element in elements:
        batch.append(element)
        num_bytes += len(element[1])
        if num_bytes > source_lines.BLOCK_BYTES or len(batch) >= source_lines.BLOCK_LINES:
            yield batch
            batch, num_bytes = [], 0
    yield batch
