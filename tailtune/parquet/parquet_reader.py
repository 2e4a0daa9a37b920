"""Read Parquet, and find the types of columns that hold lists or objects."""

import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tailtune.errors import UserError
from tailtune.parquet import lines as source_lines
from tailtune.parquet.conversation import read_conversation
from tailtune.parquet.lines import BadRow, Columns, Record, find_columns, open_source
from tailtune.progress import Progress

BATCH_ROWS = 2048
NO_VALUE = pa.null()
"""Type of a column in which every row is null or has no value."""


def read_parquet(source: Path, compression: str | None, columns: Columns, scratch: Path) -> Iterator[Record]:
    """Yield the rows of a Parquet file. `scratch` is a directory for a decompressed file. Raises UserError."""
    names = list(columns.names)
    with _open(source, compression, scratch) as file:
        schema = file.schema_arrow
        find_columns(schema.names, columns)
        found = [name for name in names if name in schema.names]
        for name in found:
            data_type = schema.field(name).type
            if name not in columns.types and not _is_textual(data_type):
                raise UserError(
                    f"column '{name}' is {data_type}, not text or numbers", "map another column in data.columns"
                )
        number = 0
        with Progress("parquet: row", file.metadata.num_rows, "rows") as progress:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=found, use_threads=False):
                missing = [None] * batch.num_rows
                values = [_values(batch[name], name, columns) if name in found else missing for name in names]
                for row in zip(*values, strict=True):
                    number += 1
                    yield Record(number, dict(zip(names, row, strict=True)), _decode_row(row, columns))
                progress.update(batch.num_rows)


def read_parquet_values(source: Path, compression: str | None, scratch: Path) -> Iterator[dict[str, Any] | BadRow]:
    """Yield every row with all of its columns, as Python values: binary ones as text, where they are UTF-8."""
    with _open(source, compression, scratch) as file:
        types = {field.name: field.type for field in file.schema_arrow}
        columns = Columns(list(types), types=types)
    for record in read_parquet(source, compression, columns, scratch):
        assert isinstance(record.text, dict)
        bad = next((value for value in record.text.values() if isinstance(value, BadRow)), None)
        yield bad or {name: _as_text_if_utf8(value) for name, value in record.text.items()}


def _as_text_if_utf8(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def nested_types(source: Path, compression: str | None, names: Sequence[str], scratch: Path) -> dict[str, pa.DataType]:
    """Return the types of those columns that hold lists or objects, or no values."""
    with _open(source, compression, scratch) as file:
        types = {field.name: field.type for field in file.schema_arrow}
    found = {name: types.get(name, NO_VALUE) for name in names}
    return {name: each for name, each in found.items() if pa.types.is_nested(each) or pa.types.is_null(each)}


def infer_types(rows: Iterable[dict[str, Any]], names: Iterable[str]) -> dict[str, pa.DataType]:
    """Return the types of columns of lists or objects, which hold all of their values but those that do not fit.

    Raises UserError.
    """
    types = dict.fromkeys(names, NO_VALUE)
    rows = iter(rows)
    while batch := list(islice(rows, BATCH_ROWS)):
        for name in types:
            values = [row.get(name) for row in batch if isinstance(row.get(name), list | dict)]
            types[name] = _widened(types[name], values)
    for name, data_type in types.items():
        if _has_empty_object(data_type):
            raise UserError(f"column '{name}' holds objects without a key", "leave it out of data.columns")
    return types


def _widened(data_type: pa.DataType, values: list[Any]) -> pa.DataType:
    """Return a type that holds further values as well; those that have no type in common with it are left out."""
    try:
        wider = common_type(data_type, pa.infer_type(values))
        pa.array(values, wider)  # of texts and numbers, Arrow infers numbers
        return wider
    except (pa.ArrowException, OverflowError):
        half = len(values) // 2
        return _widened(_widened(data_type, values[:half]), values[half:]) if half else data_type


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
def _open(source: Path, compression: str | None, scratch: Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. A compressed one is decompressed first, because Parquet is read from its end."""
    path = source
    try:
        if compression:
            path = scratch / "source.parquet"
            with open_source(source, compression) as stream, path.open("wb") as out:
                shutil.copyfileobj(stream, out, source_lines.BATCH_BYTES)
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield file
    finally:
        if compression:
            path.unlink(missing_ok=True)


def _is_textual(data_type: pa.DataType) -> bool:
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    texts = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary")
    numbers = ("is_integer", "is_floating", "is_decimal")
    return any(getattr(pa.types, test)(data_type) for test in (*texts, *numbers, "is_null"))


def _values(column: pa.Array, name: str, columns: Columns) -> list[Any]:
    """Return one value per row: text as bytes, because Parquet does not guarantee that it is valid UTF-8."""
    if name not in columns.types:
        return list(_to_binary(column).to_pylist())
    values: list[Any] = []
    for value in column:
        try:
            values.append(value.as_py())
        except UnicodeDecodeError:
            values.append(BadRow("invalid UTF-8"))
    return values


def _to_binary(column: pa.Array) -> pa.Array:
    """Convert text to its bytes, and numbers to the text that Python writes for them. NaN becomes null."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_floating(column.type):
        values = (None if value is None or math.isnan(value) else str(value) for value in column.to_pylist())
        column = pa.array(values, pa.string())
    if pa.types.is_integer(column.type) or pa.types.is_decimal(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.binary())


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
