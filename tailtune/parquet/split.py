"""Split the rows into train and validation: those of the recipe's own source of validation rows, or a share.

A share is split off so that equal questions are on the same side.

The side depends only on a seeded hash of the question. It does not change when rows are added,
removed or reordered, so validation results stay comparable between revisions of the data.
"""

import hashlib
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailtune.errors import UserError
from tailtune.parquet.lines import message_type
from tailtune.recipe.schema import IS_VALIDATION, Recipe
from tailtune.run import DATA_FILE


def read_split(recipe: Recipe, path: Path) -> tuple[pa.Table, pa.Table]:
    """Return (train, validation) of a Parquet file, split as the recipe says. Raises UserError."""
    table, data = pq.read_table(path), recipe.data
    if data.split_by is not None and data.validation_share is not None:
        return split_rows(table, data.split_by, data.validation_share, recipe.seed)
    if IS_VALIDATION not in table.column_names:
        remedy = f"give the {DATA_FILE} of a run of this recipe, or set data.split_by instead"
        raise UserError(f"data.validation_source is set, but {path} has no validation rows of its own", remedy)
    mask, rows = table[IS_VALIDATION], table.drop_columns(IS_VALIDATION)
    return rows.filter(pc.invert(mask)), rows.filter(mask)


def split_rows(table: pa.Table, by: str, validation_share: float, seed: int) -> tuple[pa.Table, pa.Table]:
    """Return (train, validation): two parts of `table`, in its order, split by the values of column `by`.

    Values that differ only in case or white space count as equal; conversations, when their first questions are equal.
    Raises UserError when the column is missing or a side would be empty.
    """
    if by not in table.column_names:
        raise UserError(
            f"data.split_by is '{by}', but the data has the columns {', '.join(table.column_names)}",
            f"name one of them, or give the {DATA_FILE} of this recipe",
        )
    values = split_values(table[by])
    is_validation = np.concatenate([np.empty(0, bool)] + [_sides(c, validation_share, seed) for c in values.chunks])
    for side, empty in (("train", is_validation.all()), ("validation", not is_validation.any())):
        if empty:
            raise UserError(
                f"splitting {table.num_rows:,} rows by '{by}' with data.validation_share {validation_share:g} leaves "
                f"the {side} side empty",
                f"change the share, or use data with more distinct values of '{by}'",
            )
    return table.filter(pa.array(~is_validation)), table.filter(pa.array(is_validation))


def split_values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the texts that decide the side: of a conversation its first question, of other lists their JSON."""
    if not pa.types.is_nested(column.type):
        return column

    def text_of(value: Any) -> str:
        if column.type.equals(message_type()):
            questions = [message["content"] for message in value or [] if message and message["role"] == "user"]
            if questions and questions[0]:
                return str(questions[0])
        return json.dumps(value, sort_keys=True, default=str)

    return pa.chunked_array([pa.array(map(text_of, chunk.to_pylist()), pa.string()) for chunk in column.chunks],
                            pa.string())  # fmt: skip


def normalise(value: str) -> str:
    """Return what texts have in common that look alike but for case and white space.

    Composed and decomposed letters count as equal, and so do texts with and without invisible characters, or a space
    before a punctuation mark.
    """
    visible = "".join(each for each in unicodedata.normalize("NFKC", value) if unicodedata.category(each) != "Cf")
    return re.sub(r" (?=[?!:;,.])", "", " ".join(visible.casefold().split()))


def _sides(values: pa.Array, validation_share: float, seed: int) -> np.ndarray:
    """Return the mask of the validation rows, bool [rows]. Each distinct value is hashed once."""
    encoded = values.dictionary_encode()
    sides = [_position(str(value), seed) < validation_share for value in encoded.dictionary.to_pylist()]
    return np.array(sides, bool).take(np.asarray(encoded.indices))


def _position(value: str, seed: int) -> float:
    """Map a value to [0, 1), in the same way on every machine and in every version of Python."""
    digest = hashlib.blake2b(f"{seed}\0{normalise(value)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
