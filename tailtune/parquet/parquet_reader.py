"""Read Parquet, and find the types of columns that hold lists or objects."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailtune.errors import UserError, one_line
from tailtune.files import free_bytes
from tailtune.parquet import lines as source_lines
from tailtune.parquet.conversation import read_conversation
from tailtune.parquet.lines import BadRow, Columns, Record, Source, find_columns, open_source
from tailtune.progress import Progress

BATCH_ROWS = 2048
BATCH_BYTES = 1 << 30
"""What the values of a batch can have at most, as a dictionary repeats long ones for a few bits each."""
MAX_FIELDS = 1000
"""Of the objects of a column, with those in lists and objects below."""
NO_VALUE = pa.null()
"""Type of a column in which every row is null or has no value."""


def read_parquet(source: Source, columns: Columns) -> Iterator[Record]:
    """Yield the rows of a Parquet file. Raises UserError."""
    names = list(columns.names)
    with _open(source) as file:
        schema = file.schema_arrow
        find_columns(schema.names, columns)
        found = [name for name in names if name in schema.names]
        for name in found:
            data_type = schema.field(name).type
            if name not in columns.types and not _is_textual(data_type):
                raise UserError(
                    f"column '{name}' is {data_type}, not text or numbers", "map another column in data.columns"
                )
        number = num_bytes = 0
        with Progress("parquet: row", file.metadata.num_rows, "rows") as progress:
            for batch in file.iter_batches(_batch_rows(file.metadata, found), columns=found, use_threads=False):
                sizes = _row_sizes(batch)
                for begin, end in _pieces(sizes):
                    piece, num_rows = batch.slice(begin, end - begin), end - begin
                    if num_rows == 1 and sizes[begin] > source.max_row_bytes:
                        piece = piece.slice(0, 0)  # is not converted
                    missing = [None] * len(piece)
                    values = [_values(piece[name], name, columns) if name in found else missing for name in names]
                    rows = list(zip(*values, strict=True)) if names and len(piece) else [()] * num_rows
                    for row, size in zip(rows, sizes[begin:end], strict=True):
                        number += 1
                        num_bytes += size + 1
                        if size > source.max_row_bytes:
                            yield Record(number, "", source.too_long())
                        else:
                            yield Record(number, dict(zip(names, row, strict=True)), _decode_row(row, columns))
                    if num_bytes > source.max_file_bytes:
                        raise source.too_large()
                progress.update(batch.num_rows)


def _batch_rows(metadata: pq.FileMetaData, names: Sequence[str]) -> int:
    """Return how many rows are read at once, for each of which a dictionary may hold a value of its own size."""
    row_bytes = 1
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        chunks = [group.column(number) for number in range(group.num_columns)]
        wanted = [each for each in chunks if each.path_in_schema.split(".")[0] in names]
        row_bytes = max(row_bytes, sum(map(_longest_value, wanted)))
    return max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))


def _longest_value(chunk: pq.ColumnChunkMetaData) -> int:
    """Return a limit on the bytes of a value in a chunk's dictionary, which its metadata do not say by themselves."""
    if not chunk.has_dictionary_page:
        return 0
    data_bytes = chunk.total_compressed_size - (chunk.data_page_offset - (chunk.dictionary_page_offset or 0))
    return max(0, chunk.total_uncompressed_size - max(0, data_bytes))


def _row_sizes(batch: pa.RecordBatch) -> list[int]:
    """Return the bytes of each row: of texts exactly, of numbers, lists and objects on average."""
    sizes = pa.repeat(0, batch.num_rows)
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            lengths = pc.binary_length(column.dictionary.cast(pa.large_binary())).take(column.indices)
        elif any(
            test(column.type)
            for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
        ):
            lengths = pc.binary_length(column)
        else:
            lengths = pa.repeat(column.nbytes // max(batch.num_rows, 1), batch.num_rows)
        sizes = pc.add(sizes, pc.fill_null(lengths.cast(pa.int64()), 0))
    return list(sizes.to_pylist())


def _pieces(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the parts of a batch, from and to a row, that are converted together; a very long row is one by itself."""
    begin = num_bytes = 0
    for index, size in enumerate(sizes):
        if index > begin and num_bytes + size > source_lines.BATCH_BYTES:
            yield begin, index
            begin, num_bytes = index, 0
        num_bytes += size
    if sizes:
        yield begin, len(sizes)


def read_parquet_values(source: Source) -> Iterator[dict[str, Any] | BadRow]:
    """Yield every row with all of its columns, as Python values: binary ones as text, where they are UTF-8."""
    with _open(source) as file:
        types = {field.name: field.type for field in file.schema_arrow}
        columns = Columns(list(types), types=types)
    for record in read_parquet(source, columns):
        if isinstance(record.values, BadRow) and not isinstance(record.text, dict):
            yield record.values
            continue
        assert isinstance(record.text, dict)
        bad = next((value for value in record.text.values() if isinstance(value, BadRow)), None)
        yield bad or {name: _as_text_if_utf8(value) for name, value in record.text.items()}


def _as_text_if_utf8(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def nested_types(source: Source, names: Sequence[str]) -> dict[str, pa.DataType]:
    """Return the types of those columns that hold lists or objects, or no values."""
    with _open(source) as file:
        types = {field.name: field.type for field in file.schema_arrow}
    found = {name: types.get(name, NO_VALUE) for name in names}
    return {name: each for name, each in found.items() if pa.types.is_nested(each) or pa.types.is_null(each)}


def infer_types(rows: Iterable[dict[str, Any]], names: Iterable[str]) -> dict[str, pa.DataType]:
    """Return the types of columns of lists or objects, which hold all of their values but those that do not fit.

    Raises UserError.
    """
    types = dict.fromkeys(names, NO_VALUE)
    values: dict[str, list[Any]] = {name: [] for name in types}
    num_chars = 0

    def widen() -> None:
        for name in types:
            types[name] = _widened(types[name], values[name])
            if _num_fields(types[name]) > MAX_FIELDS:
                problem = f"column '{name}' holds objects with more than {MAX_FIELDS:,} different keys"
                raise UserError(problem, "leave it out of data.columns, or write it as text")
            values[name] = []

    for row in rows:
        for name in types:
            if isinstance(value := row.get(name), list | dict):
                values[name].append(value)
                num_chars += len(str(value))
        if num_chars > source_lines.BATCH_BYTES or any(len(each) >= BATCH_ROWS for each in values.values()):
            widen()
            num_chars = 0
    widen()
    for name, data_type in types.items():
        if _has_empty_object(data_type):
            raise UserError(f"column '{name}' holds objects without a key", "leave it out of data.columns")
    return types


def _widened(data_type: pa.DataType, values: list[Any]) -> pa.DataType:
    """Return a type that holds further values as well; those that have no type in common with it are left out."""
    try:
        wider = common_type(data_type, pa.infer_type(values))
        if _num_fields(wider) <= MAX_FIELDS:  # else it would have as many values in each row
            pa.array(values, wider)  # of texts and numbers, Arrow infers numbers
        return wider
    except (pa.ArrowException, OverflowError):
        half = len(values) // 2
        return _widened(_widened(data_type, values[:half]), values[half:]) if half else data_type


def _num_fields(data_type: pa.DataType) -> int:
    """Return the number of fields of a type, with those of its fields."""
    fields = (data_type.field(index).type for index in range(data_type.num_fields))
    return data_type.num_fields + sum(map(_num_fields, fields))


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return a type that holds the values of both: objects with the keys of both. Raises ArrowTypeError."""
    schemas = [pa.schema([("value", each)]) for each in (one, other)]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def _has_empty_object(data_type: pa.DataType) -> bool:
    """Return whether a type has an object without keys, which Parquet cannot hold."""
    if pa.types.is_struct(data_type) and data_type.num_fields == 0:
        return True
    return any(_has_empty_object(data_type.field(index).type) for index in range(data_type.num_fields))


@contextmanager
def _open(source: Source) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. A compressed one is decompressed first, because Parquet is read from its end."""
    path = source.path
    try:
        if source.compression:
            path = source.scratch / "source.parquet"
            _decompress(source, path)
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield file
    finally:
        if source.compression:
            path.unlink(missing_ok=True)


def _decompress(source: Source, path: Path) -> None:
    """Write a file decompressed, where it leaves as much space free as it takes. Raises UserError."""
    free = free_bytes(path.parent)
    with open_source(source) as stream, path.open("wb") as out:
        while part := stream.read(source_lines.BATCH_BYTES):
            if out.tell() + len(part) > free // 2:
                raise UserError(
                    f"{source.path} does not fit decompressed into half of the {free:,} free bytes of {path.parent}",
                    "decompress it where there is space, and set data.source to the result: Parquet compresses itself",
                )
            out.write(part)
            if not part.startswith(b"PAR1") and out.tell() == len(part):
                return  # no Parquet file, which the reader will say


def _is_textual(data_type: pa.DataType) -> bool:
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    texts = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary")
    numbers = ("is_integer", "is_floating", "is_decimal")
    return any(getattr(pa.types, test)(data_type) for test in (*texts, *numbers, "is_null"))


def _values(column: pa.Array, name: str, columns: Columns) -> list[Any]:
    """Return one value per row: text as bytes, because Parquet does not guarantee that it is valid UTF-8."""
    if name not in columns.types:
        if pa.types.is_dictionary(column.type) and pa.types.is_floating(column.type.value_type):
            column = column.dictionary_decode()
        if pa.types.is_floating(column.type):
            return [_float_as_text(value) for value in column.to_pylist()]
        return list(_to_binary(column).to_pylist())
    values: list[Any] = []
    for value in column:
        try:
            values.append(value.as_py())
        except UnicodeDecodeError:
            values.append(BadRow("invalid UTF-8"))
        except (ValueError, OverflowError) as error:  # a date that Python does not have
            values.append(BadRow(f"column '{name}': {one_line(error)}"))
    return values


def _to_binary(column: pa.Array) -> pa.Array:
    """Convert text to its bytes, and whole numbers to text."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_integer(column.type) or pa.types.is_decimal(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.binary())


def _float_as_text(value: float | None) -> bytes | BadRow | None:
    """Return the text that Python writes for a number. NaN is a missing value, as in pandas."""
    if value is None or math.isnan(value):
        return None
    return BadRow("a number is infinite") if math.isinf(value) else str(value).encode()


def _decode_row(row: Sequence[Any], columns: Columns) -> list[Any] | BadRow:
    """Return the values of one row, or why it is bad."""
    values: list[Any] = []
    for name, value in zip(columns.names, row, strict=True):
        if isinstance(value, BadRow):
            return value
        try:
            if name == columns.messages and value is not None:
                value = read_conversation(value)
            elif isinstance(value, bytes):
                value = value.decode()
        except UnicodeDecodeError:
            return BadRow("invalid UTF-8")
        except BadRow as error:
            return BadRow(f"column '{name}': {error.reason}")
        values.append(value)
    return values
