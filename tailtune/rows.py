"""Read the source file of a recipe as rows of text, block by block, with a reason for every bad row.

JSON (array), JSON Lines, CSV, TXT and Parquet, each also `.gz` or `.zst`. Memory is bounded by
`MAX_LINE_BYTES`, whatever the file holds. A row is good when every needed column is a text or a
number, not blank, and valid Unicode. Nothing is dropped: a row comes out in `Batch.columns` or in
`Batch.rejects`. Blank lines are no rows.
"""

import csv
import json
import math
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from tailtune.errors import UserError

FORMATS = ("json", "jsonl", "csv", "txt", "parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
SUFFIXES = {f".{name}": name for name in FORMATS} | {".ndjson": "jsonl"}

MAX_LINE_BYTES = 16 << 20
"""A longer line, array element or CSV record is rejected without being held in memory."""
BLOCK_BYTES = 1 << 20
"""Fits the processor's cache: JSON in blocks of 1 MiB parsed 20 % faster than in 16 MiB."""
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


class _Block(NamedTuple):
    """Whole lines. `lines[i]` is the source line on which the i-th of them begins."""

    data: bytes
    lines: np.ndarray
    rejects: list[Reject]


def detect_format(source: Path, declared: str) -> tuple[str, str | None]:
    """(format, compression or None) of a file, by its name unless the recipe declares the format."""
    name = source
    compression = COMPRESSIONS.get(name.suffix.lower())
    if compression:
        name = name.with_suffix("")
    found = SUFFIXES.get(name.suffix.lower()) if declared == "auto" else declared
    if found is None:
        raise UserError(
            f"the format of {source.name} is unknown; name the file .{', .'.join(FORMATS)} "
            f"(each also .gz or .zst), or set data.format to one of {', '.join(FORMATS)}"
        )
    return found, compression


def read_rows(source: Path, declared: str, names: list[str], scratch: Path) -> Iterator[Batch]:
    """Batches of the columns `names` as texts, in the source's order.

    `scratch` is a directory for a decompressed Parquet file. Raises UserError when the file cannot
    be read as its format says, or has a header without one of the columns.
    """
    kind, compression = detect_format(source, declared)
    if not source.is_file():
        raise UserError(f"data file {source} does not exist; check data.source")
    try:
        if kind == "parquet":
            yield from _read_parquet(source, compression, names, scratch)
            return
        chunks = _without_bom(_read_chunks(source, compression))
        if kind == "csv":
            yield from _read_csv(_cut_lines(chunks), names)
        elif kind == "txt":
            yield from _read_txt(_cut_lines(chunks), names)
        else:
            is_array, chunks = _peek_array(chunks) if kind == "json" else (False, chunks)
            blocks = _array_blocks(chunks) if is_array else _cut_lines(chunks)
            yield from _ahead(lambda block: _parse_json_lines(block, names), blocks)
    except (OSError, pa.ArrowException) as error:
        what = f"{kind}, {compression}" if compression else kind
        raise UserError(f"{source} cannot be read as {what}: {error}; fetch or export it again") from error


# -- bytes → lines ---------------------------------------------------------------------------------


def _read_chunks(source: Path, compression: str | None) -> Iterator[bytes]:
    with pa.input_stream(source, compression=compression) as stream:
        while chunk := stream.read(BLOCK_BYTES):
            yield chunk


def _without_bom(chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield next(chunks, b"").removeprefix(BOM)
    yield from chunks


def _cut_lines(chunks: Iterable[bytes]) -> Iterator[_Block]:
    """Blocks that end at a line end; a line over the limit becomes a reject, not memory."""
    rest: list[bytes] = []
    rest_bytes = 0
    line = 1
    for chunk in _end_last_line(chunks):
        first, last = chunk.find(b"\n"), chunk.rfind(b"\n")
        if first >= 0 and rest_bytes + first > MAX_LINE_BYTES:
            yield _Block(b"", np.empty(0, np.int64), [_too_long(line, b"".join([*rest, chunk[:first]]))])
            rest, rest_bytes = [], 0
            line += 1
            chunk = chunk[first + 1 :]
            last -= first + 1
        if last >= 0:
            data = b"".join([*rest, chunk[: last + 1]])
            count = data.count(b"\n")
            yield _Block(data, np.arange(line, line + count), [])
            line += count
            rest, rest_bytes = [], 0
            chunk = chunk[last + 1 :]
        if chunk:
            if rest_bytes <= MAX_LINE_BYTES:
                rest.append(chunk)
            rest_bytes += len(chunk)  # beyond the limit only counted


def _end_last_line(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks, with the last line ended."""
    last = b"\n"
    for chunk in chunks:
        last = chunk or last
        yield chunk
    if not last.endswith(b"\n"):
        yield b"\n"


def _too_long(line: int, text: bytes) -> Reject:
    limit = f"{MAX_LINE_BYTES >> 20} MiB" if MAX_LINE_BYTES >= 1 << 20 else f"{MAX_LINE_BYTES} bytes"
    return _reject(line, f"line longer than {limit}", text)


def _reject(line: int, reason: str, text: bytes | str) -> Reject:
    if isinstance(text, bytes):
        text = text[: 4 * MAX_TEXT].decode(errors="backslashreplace")
    return Reject(int(line), reason, text[:MAX_TEXT])


# -- JSON ------------------------------------------------------------------------------------------


class _Bad(Exception):
    """Why one row is rejected."""

    def __init__(self, reason: str, keys: Iterable[str] = ()):
        super().__init__(reason)
        self.keys = keys


class _Object(list):
    """A JSON object as its pairs, so that a key that stands twice is seen."""


class _Number(str):
    """A JSON number as it is written: 1.50 stays 1.50, and 5,000 digits are no problem."""


_DECODER = json.JSONDecoder(
    object_pairs_hook=_Object, parse_int=_Number, parse_float=_Number, parse_constant=lambda _: math.nan
)
_KINDS = {
    type(None): "null",
    bool: "a boolean",
    float: "not a number (NaN)",
    list: "a list",
    _Object: "an object",
    _Number: "a number",
    str: "a text",
}


def _parse_json_lines(block: _Block, names: list[str]) -> Batch:
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
    if spans is None or not (data.isascii() or _is_utf8(data)):
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
    return _without_bad(
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


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _parse_slow(data: bytes, lines: np.ndarray, names: list[str]) -> Batch:
    rows, raws, kept, rejects, keys = [], [], [], [], set()
    for line, raw in zip(lines.tolist(), data.split(b"\n"), strict=False):
        text = raw.strip(b" \t\r\n")
        if not text:
            continue
        try:
            rows.append(_json_row(text, names))
        except _Bad as bad:
            rejects.append(_reject(line, str(bad), text))
            keys.update(bad.keys)
        else:
            raws.append(text)
            kept.append(line)
    batch = _without_bad(_table(rows, names), np.array(kept, np.int64), raws.__getitem__)
    return Batch(batch.columns, batch.lines, sorted(rejects + batch.rejects), keys)


def _json_row(raw: bytes, names: list[str]) -> list[str]:
    """The needed values of one JSON object. Raises _Bad."""
    try:
        row = _DECODER.decode(raw.decode())
    except UnicodeDecodeError as error:
        raise _Bad(f"invalid UTF-8 (byte {error.start + 1})") from None
    except RecursionError:
        raise _Bad("JSON nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _Bad(f"broken JSON ({error.msg} at character {error.pos + 1})") from None
    if not isinstance(row, _Object):
        raise _Bad(f"not a JSON object but {_KINDS[type(row)]}")
    keys = [key for key, _ in row]
    values = []
    for name in names:
        found = [value for key, value in row if key == name]
        if len(found) != 1:
            raise _Bad(f"column '{name}' is missing" if not found else f"column '{name}' stands twice", keys)
        if not isinstance(found[0], str):
            raise _Bad(f"column '{name}' is {_KINDS[type(found[0])]}, not a text", keys)
        try:
            found[0].encode()
        except UnicodeEncodeError:
            raise _Bad(f"column '{name}' holds a lone surrogate, which is no valid Unicode", keys) from None
        values.append(str(found[0]))
    return values


def _table(rows: list[list[str]], names: list[str]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[] for _ in names]
    return pa.table([pa.array(list(column), pa.string()) for column in columns], names=names)


def _without_bad(
    table: pa.Table,
    lines: np.ndarray,
    text_of: Callable[[int], bytes | str],
    check: Callable[[Any], Any] = lambda text: None,
) -> Batch:
    """The batch without rows whose value is null or blank. `check` may raise _Bad with a better reason."""
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
        except _Bad as better:
            reasons[row] = str(better)
            keys.update(better.keys)
        rejects.append(_reject(lines[row], reasons[row], text))
    return Batch(table.filter(pa.array(~bad)), lines[~bad], rejects, keys)


def _ahead(parse: Callable[[_Block], Batch], blocks: Iterator[_Block]) -> Iterator[Batch]:
    """Parse in a thread of its own, a few blocks ahead of the consumer. Arrow's parser holds no GIL."""
    with ThreadPoolExecutor(1) as pool:
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


def _array_blocks(chunks: Iterator[bytes]) -> Iterator[_Block]:
    """The elements of a JSON array as lines, each with the source line on which it begins."""
    begins: deque[np.ndarray] = deque()
    for block in _cut_lines(_elements_to_lines(chunks, begins)):
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
            _nothing_follows(text[end + 1 :], chunks, line + int(np.searchsorted(line_ends, end)))
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


# -- CSV, TXT, Parquet -----------------------------------------------------------------------------


class _TooLong(Exception):
    """A CSV record does not end within the limit: its quote is never closed."""


class _CsvLines:
    """Lines of text for csv.reader, which can be taken back: what an open quote swallowed."""

    def __init__(self, blocks: Iterator[_Block]):
        self.blocks = blocks
        self.waiting: deque[tuple[int, str]] = deque()
        self.taken: list[tuple[int, str]] = []
        self.taken_chars = 0
        self.rejects: list[Reject] = []
        self.at_end = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self.waiting:
            block = next(self.blocks, None)
            if block is None:
                self.at_end = True
                raise StopIteration
            self.rejects += block.rejects
            text = block.data.decode(errors="surrogateescape").removesuffix("\n")
            if block.data:
                self.waiting.extend(zip(block.lines.tolist(), text.split("\n"), strict=True))
        self.taken.append(self.waiting.popleft())
        self.taken_chars += len(self.taken[-1][1])
        if self.taken_chars > MAX_LINE_BYTES:
            raise _TooLong
        return self.taken[-1][1] + "\n"

    def take(self) -> tuple[int, str]:
        """(first line, text) of the record that was just read."""
        line, text = self.taken[0][0], "\n".join(text for _, text in self.taken)
        self.taken, self.taken_chars = [], 0
        return line, text

    def take_first(self) -> tuple[int, str]:
        """(line, text) of the bad record's first line; the others are read again."""
        self.waiting.extendleft(reversed(self.taken[1:]))
        self.taken = self.taken[:1]
        self.at_end = False
        return self.take()


def _read_csv(blocks: Iterator[_Block], names: list[str]) -> Iterator[Batch]:
    """Python's csv reader: strings stay as they are (`007`), and every record has its line.

    A quote that is opened and never closed costs its own line, not the rest of the file.
    """
    csv.field_size_limit(max(csv.field_size_limit(), 2 * MAX_LINE_BYTES))
    source = _CsvLines(blocks)
    reader = csv.reader(source, strict=True)
    header: list[str] | None = None
    places: list[int] = []
    rows: list[list[str]] = []
    lines: list[int] = []
    texts: list[str] = []
    rejects: list[Reject] = []
    chars = 0

    def flush() -> Batch:
        batch = _without_bad(_table(rows, names), np.array(lines, np.int64), list(texts).__getitem__)
        batch.rejects = sorted(batch.rejects + rejects + source.rejects)
        for column in (rows, lines, texts, rejects, source.rejects):
            column.clear()
        return batch

    while True:
        try:
            row = next(reader)
        except StopIteration:
            break
        except (csv.Error, _TooLong) as error:
            if header is None:
                raise UserError(f"the CSV header cannot be read: {error}") from None
            reason = "a quote is opened and never closed" if source.at_end or not str(error) else str(error)
            line, text = source.take_first()
            rejects.append(_reject(line, f"broken CSV ({reason})", text))
            continue
        line, text = source.take()
        chars += len(text)
        if not text.strip():
            continue
        if header is None:
            header = row
            places = _header_places(header, names)
        elif len(row) != len(header):
            rejects.append(_reject(line, f"{len(row)} values where the header has {len(header)}", text))
        elif not _is_unicode(text):
            rejects.append(_reject(line, "invalid UTF-8", text.encode(errors="surrogateescape")))
        else:
            rows.append([row[place] for place in places])
            lines.append(line)
            texts.append(text)
        if chars > BLOCK_BYTES:
            yield flush()
            chars = 0
    yield flush()


def _header_places(header: list[str], names: list[str]) -> list[int]:
    """Where the needed columns stand. Raises UserError that lists what there is."""
    for name in names:
        if name not in header:
            raise missing_column(name, header)
        if header.count(name) > 1:
            raise UserError(
                f"column '{name}' stands {header.count(name)} times in the header; rename all but one"
            )
    return [header.index(name) for name in names]


def missing_column(name: str, found: Iterable[str]) -> UserError:
    found = list(found)
    more = f" and {len(found) - 30} more" if len(found) > 30 else ""
    return UserError(
        f"column '{name}' is not in the data; found: {', '.join(found[:30]) or 'none'}{more}; map them in data.columns"
    )


def _is_unicode(text: str) -> bool:
    """Whether a text that was decoded with `surrogateescape` was valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_txt(blocks: Iterator[_Block], names: list[str]) -> Iterator[Batch]:
    """One row per line that is not blank, in the column `text`."""
    _header_places(["text"], names)
    for block in blocks:
        rows, kept, rejects = [], [], block.rejects
        texts = block.data.decode(errors="surrogateescape").split("\n")
        for line, text in zip(block.lines.tolist(), texts, strict=False):  # after the last line end stands ""
            if not text.strip():
                continue
            if text.isascii() or _is_unicode(text):
                rows.append([text.removesuffix("\r")])
                kept.append(line)
            else:
                rejects.append(_reject(line, "invalid UTF-8", text.encode(errors="surrogateescape")))
        batch = _without_bad(
            _table(rows, ["text"]), np.array(kept, np.int64), lambda row, rows=rows: rows[row][0]
        )
        yield Batch(batch.columns.select(names), batch.lines, sorted(rejects + batch.rejects))


def _read_parquet(source: Path, compression: str | None, names: list[str], scratch: Path) -> Iterator[Batch]:
    """Rows in batches; a compressed file is decompressed first, because Parquet is read from its end."""
    if compression:
        unpacked = scratch / "source.parquet"
        try:
            with pa.input_stream(source, compression=compression) as stream, unpacked.open("wb") as out:
                shutil.copyfileobj(stream, out, BLOCK_BYTES)
            yield from _read_parquet(unpacked, None, names, scratch)
        finally:
            unpacked.unlink(missing_ok=True)
        return
    with pq.ParquetFile(source, pre_buffer=False) as file:
        schema = file.schema_arrow
        _header_places(schema.names, names)
        for name in names:
            if not _is_textual(schema.field(name).type):
                raise UserError(
                    f"column '{name}' is {schema.field(name).type}, not text or numbers; map another in data.columns"
                )
        row = 1
        for batch in file.iter_batches(batch_size=2048, columns=names, use_threads=False):
            lines = np.arange(row, row + batch.num_rows)
            row += batch.num_rows
            yield _parquet_batch(pa.table([_texts(batch[name]) for name in names], names=names), lines)


def _is_textual(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary")
    numbers = ("is_integer", "is_floating", "is_decimal")
    return any(getattr(pa.types, test)(kind) for test in tests + numbers)


def _texts(column: pa.Array) -> pa.Array:
    """Any textual column as binary, numbers as Python writes them; not a number is null."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_floating(column.type):
        values = (None if value is None or math.isnan(value) else str(value) for value in column.to_pylist())
        column = pa.array(values, pa.string())
    if pa.types.is_integer(column.type) or pa.types.is_decimal(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.binary())


def _parquet_batch(table: pa.Table, lines: np.ndarray) -> Batch:
    """Binary columns → text; Parquet does not promise that its texts are valid UTF-8."""
    schema = pa.schema([(name, pa.string()) for name in table.column_names])

    def text_of(row: int) -> str:
        values = {name: table[name][row].as_py() for name in table.column_names}
        return json.dumps(
            {name: value and value.decode(errors="backslashreplace") for name, value in values.items()}
        )

    rejects = []
    try:
        texts = table.cast(schema)
    except pa.ArrowInvalid:
        columns = [table[name].to_pylist() for name in table.column_names]
        good = np.array(
            [all(value is None or _is_utf8(value) for value in row) for row in zip(*columns, strict=True)]
        )
        rejects = [
            _reject(lines[row], "invalid UTF-8", text_of(row)) for row in np.flatnonzero(~good).tolist()
        ]
        table, lines = table.filter(pa.array(good)), lines[good]
        texts = table.cast(schema)
    batch = _without_bad(texts, lines, text_of)
    return Batch(batch.columns, batch.lines, sorted(rejects + batch.rejects))
