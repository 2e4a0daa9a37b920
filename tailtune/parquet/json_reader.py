"""Rows of JSON Lines and of JSON arrays: Arrow's parser where it can, Python's to say what is wrong.

A row is accepted or rejected for itself, never for its neighbours.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from tailtune.errors import UserError
from tailtune.parquet.lines import Bad, Batch, Block, Reject, cut_lines, is_utf8, make_reject, table_of, without_bad


def read_json_lines(chunks: Iterator[bytes], names: list[str]) -> Iterator[Batch]:
    """Batches of the columns `names` from one JSON object per line."""
    yield from _ahead(lambda block: _parse_json_lines(block, names), cut_lines(chunks))


def read_json(chunks: Iterator[bytes], names: list[str]) -> Iterator[Batch]:
    """The same from a JSON array; a file that does not begin with `[` is read as JSON Lines."""
    is_array, chunks = _peek_array(chunks)
    blocks = _array_blocks(chunks) if is_array else cut_lines(chunks)
    yield from _ahead(lambda block: _parse_json_lines(block, names), blocks)


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
            batches.append(batch or _parse_slow(data, lines, names))
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


def _parse_slow(data: bytes, lines: np.ndarray, names: list[str]) -> Batch:
    rows, raws, kept, rejects = [], [], [], []
    keys: set[str] = set()
    for line, raw in zip(lines.tolist(), data.split(b"\n"), strict=False):
        text = raw.strip(b" \t\r\n")
        if not text:
            continue
        try:
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


# -- JSON array → JSON lines -----------------------------------------------------------------------


def _peek_array(chunks: Iterator[bytes]) -> tuple[bool, Iterator[bytes]]:
    """Whether the first character is `[`. Many files named .json hold JSON Lines."""
    head = b""
    for chunk in chunks:
        head += chunk
        if head.strip():
            break
    return head.lstrip().startswith(b"["), chain([head], chunks)


def _array_blocks(chunks: Iterator[bytes]) -> Iterator[Block]:
    """The elements of a JSON array as lines, each with the source line on which it begins."""
    begins: deque[np.ndarray] = deque()
    for block in cut_lines(_elements_to_lines(chunks, begins)):
        count = len(block.lines) or len(block.rejects)
        while len(begins) > 1 and len(begins[0]) < count:
            begins.appendleft(np.concatenate([begins.popleft(), begins.popleft()]))
        lines, begins[0] = begins[0][:count], begins[0][count:]
        if block.rejects:
            _, reason, text = block.rejects[0]
            text = text.lstrip(" \t\r")
            line = int(lines[0]) + block.rejects[0].text.removesuffix(text).count("\r")
            yield block._replace(rejects=[Reject(line, reason, text)])
            continue
        data = np.frombuffer(block.data, np.uint8)
        ends = np.flatnonzero(data == 10)
        starts = np.concatenate([[0], ends[:-1] + 1])
        solid = np.flatnonzero((data != 32) & (data != 13) & (data != 9))  # the line's own end at the latest
        breaks = np.flatnonzero(data == 13)
        first = solid[np.searchsorted(solid, starts)]
        yield block._replace(lines=lines + np.searchsorted(breaks, first) - np.searchsorted(breaks, starts))


def _elements_to_lines(chunks: Iterator[bytes], begins: deque[np.ndarray]) -> Iterator[bytes]:
    """Put a line end for every comma between elements, in whole-chunk numpy steps.

    Structure is what stands outside texts: quotes that are not escaped toggle, brackets count.
    A source line end becomes a carriage return outside texts (white space to JSON, and countable)
    and a control character inside (an error to JSON, as before). `begins` gets, for every line
    that is begun, the source line of its first byte. About 250 MB/s.
    """
    line, depth, inside, held = 1, 0, 0, b""
    begins.append(np.array([1]))
    last_cut = 1
    for chunk in chain(chunks, [b""]):
        text = held + chunk
        # An escape must not be cut in two: an odd last backslash waits for the next chunk.
        odd = chunk and (len(text) - len(text.rstrip(b"\\"))) % 2
        text, held = (text[:-1], b"\\") if odd else (text, b"")
        if not text:
            continue
        bare = text.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in text else text
        data = np.frombuffer(bare, np.uint8)
        inside_text = np.bitwise_xor.accumulate((data == ord('"')).view(np.uint8)) ^ inside
        inside = int(inside_text[-1])
        outside = inside_text == 0
        folded = data | 32  # [ { and ] } in pairs
        marks = np.flatnonzero(((folded == ord("{")) | (folded == ord("}")) | (data == ord(","))) & outside)
        steps = np.where(data[marks] == ord(","), 0, np.where(folded[marks] == ord("{"), 1, -1))
        depths = depth + np.cumsum(steps)
        closed = np.flatnonzero(depths <= 0)
        line_ends = np.flatnonzero(data == 10)
        cuts = marks[(depths == 1) & (steps == 0)]
        out = np.frombuffer(text, np.uint8).copy()
        out[(out == 13) & outside] = 32
        out[line_ends] = np.where(outside[line_ends], 13, 1)
        if depth == 0 and len(marks):  # the array's own bracket
            out[marks[0]] = 32
        if len(closed):
            end = int(marks[closed[0]])
            cuts = np.append(cuts[cuts < end], end)
            _nothing_follows(text[end + 1 :] + held, chunks, line + int(np.searchsorted(line_ends, end)))
            out = out[: end + 1]
        out[cuts] = 10
        begins.append(line + np.searchsorted(line_ends, cuts))
        last_cut = int(begins[-1][-1]) if len(cuts) else last_cut
        yield out.tobytes()
        if len(closed):
            return
        depth = int(depths[-1]) if len(depths) else depth
        line += len(line_ends)
    raise UserError(
        f"the JSON array does not end: the file is cut off, or a quote or bracket is missing in the row "
        f"after line {last_cut}; fetch it again, or correct that row"
    )


def _nothing_follows(rest: bytes, chunks: Iterator[bytes], line: int) -> None:
    for text in chain([rest], chunks):
        if text.strip():
            line += text[: len(text) - len(text.lstrip())].count(b"\n")
            raise UserError(f"line {line}: text follows the end of the JSON array; a file holds one array")
        line += text.count(b"\n")
