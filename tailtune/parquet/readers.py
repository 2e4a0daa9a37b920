"""Read the source file of a recipe as rows of text, block by block, with a reason for every bad row.

JSON (array), JSON Lines, CSV, TXT and Parquet, each also `.gz` or `.zst`. Memory is bounded by
`MAX_LINE_BYTES`, whatever the file holds. A row is good when every needed column is a text or a
number, not blank, and valid Unicode. Nothing is dropped: a row comes out in `Batch.columns` or in
`Batch.rejects`. Blank lines are no rows.
"""

import csv
import difflib
import json
import math
import shutil
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tailtune.errors import UserError
from tailtune.parquet import lines as source_lines
from tailtune.parquet.json_reader import read_json, read_json_lines
from tailtune.parquet.lines import (
    Batch,
    Block,
    Reject,
    cut_lines,
    is_unicode,
    is_utf8,
    make_reject,
    read_chunks,
    table_of,
    without_bad,
    without_bom,
)

FORMATS = ("json", "jsonl", "csv", "txt", "parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
SUFFIXES = {f".{name}": name for name in FORMATS} | {".ndjson": "jsonl"}


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


def read_rows(source: Path, declared: str, names: list[str], scratch: Path) -> Generator[Batch, None, None]:
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
        chunks = without_bom(read_chunks(source, compression))
        if kind == "csv":
            yield from _read_csv(cut_lines(chunks), names)
        elif kind == "txt":
            yield from _read_txt(cut_lines(chunks), names)
        elif kind == "json":
            yield from read_json(source, compression, names)
        else:
            yield from read_json_lines(chunks, names)
    except (OSError, pa.ArrowException) as error:
        what = f"{kind}, {compression}" if compression else kind
        raise UserError(f"{source} cannot be read as {what}: {error}; fetch or export it again") from error


class _TooLong(Exception):
    """A CSV record does not end within the limit: its quote is never closed."""


class _CsvLines:
    """Lines of text for csv.reader, which can be taken back: what an open quote swallowed."""

    def __init__(self, blocks: Iterator[Block]):
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
        if self.taken_chars > source_lines.MAX_LINE_BYTES:
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


def _read_csv(blocks: Iterator[Block], names: list[str]) -> Iterator[Batch]:
    """Python's csv reader: strings stay as they are (`007`), and every record has its line.

    A quote that is opened and never closed costs its own line, not the rest of the file.
    """
    csv.field_size_limit(max(csv.field_size_limit(), 2 * source_lines.MAX_LINE_BYTES))
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
        batch = without_bad(table_of(rows, names), np.array(lines, np.int64), list(texts).__getitem__)
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
            rejects.append(make_reject(line, f"broken CSV ({reason})", text))
            continue
        line, text = source.take()
        chars += len(text)
        if not text.strip():
            continue
        if header is None:
            header = row
            places = _header_places(header, names)
        elif len(row) != len(header):
            rejects.append(make_reject(line, f"{len(row)} values where the header has {len(header)}", text))
        elif not is_unicode(text):
            rejects.append(make_reject(line, "invalid UTF-8", text.encode(errors="surrogateescape")))
        else:
            rows.append([row[place] for place in places])
            lines.append(line)
            texts.append(text)
        if chars > source_lines.BLOCK_BYTES or len(lines) + len(rejects) > source_lines.BLOCK_LINES:
            yield flush()
            chars = 0
    yield flush()


def _header_places(header: list[str], names: list[str]) -> list[int]:
    """Where the needed columns stand. Raises UserError that lists what there is."""
    for name in names:
        if name not in header:
            raise missing_column(name, header)
        if header.count(name) > 1:
            raise UserError(f"column '{name}' stands {header.count(name)} times in the header; rename all but one")
    return [header.index(name) for name in names]


def missing_column(name: str, found: Iterable[str]) -> UserError:
    found = list(found)
    more = f" and {len(found) - 30} more" if len(found) > 30 else ""
    near = difflib.get_close_matches(name, found, n=1)
    hint = f", did you mean '{near[0]}'?" if near else ""
    return UserError(
        f"column '{name}' is not in the data{hint}; found: {', '.join(found[:30]) or 'none'}{more}; "
        "map them in data.columns, as the README shows"
    )


def _read_txt(blocks: Iterator[Block], names: list[str]) -> Iterator[Batch]:
    """One row per line that is not blank, in the column `text`."""
    _header_places(["text"], names)
    for block in blocks:
        rows, kept, rejects = [], [], block.rejects
        texts = block.data.decode(errors="surrogateescape").split("\n")
        for line, text in zip(block.lines.tolist(), texts, strict=False):  # after the last line end stands ""
            if not text.strip():
                continue
            if text.isascii() or is_unicode(text):
                rows.append([text.removesuffix("\r")])
                kept.append(line)
            else:
                rejects.append(make_reject(line, "invalid UTF-8", text.encode(errors="surrogateescape")))
        batch = without_bad(table_of(rows, ["text"]), np.array(kept, np.int64), [row[0] for row in rows].__getitem__)
        yield Batch(batch.columns.select(names), batch.lines, sorted(rejects + batch.rejects))


def _read_parquet(source: Path, compression: str | None, names: list[str], scratch: Path) -> Iterator[Batch]:
    """Rows in batches; a compressed file is decompressed first, because Parquet is read from its end."""
    if compression:
        unpacked = scratch / "source.parquet"
        try:
            with pa.input_stream(source, compression=compression) as stream, unpacked.open("wb") as out:
                shutil.copyfileobj(stream, out, source_lines.BLOCK_BYTES)
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
        values = ((name, table[name][row].as_py()) for name in table.column_names)
        return json.dumps(
            {name: value if value is None else value.decode(errors="backslashreplace") for name, value in values}
        )

    rejects = []
    try:
        texts = table.cast(schema)
    except pa.ArrowInvalid:
        columns = [table[name].to_pylist() for name in table.column_names]
        good = np.array([all(value is None or is_utf8(value) for value in row) for row in zip(*columns, strict=True)])
        rejects = [make_reject(lines[row], "invalid UTF-8", text_of(row)) for row in np.flatnonzero(~good).tolist()]
        table, lines = table.filter(pa.array(good)), lines[good]
        texts = table.cast(schema)
    batch = without_bad(texts, lines, text_of)
    return Batch(batch.columns, batch.lines, sorted(rejects + batch.rejects))
