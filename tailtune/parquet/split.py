"""Split the rows into train and validation, so that equal questions are on the same side.

The side depends only on a seeded hash of the question. It does not change when rows are added,
removed or reordered, so validation results stay comparable between revisions of the data.
"""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tailtune.errors import UserError
from tailtune.recipe.schema import Recipe
from tailtune.run import DATA_FILE


def read_split(recipe: Recipe, path: Path) -> tuple[pa.Table, pa.Table]:
    """Return (train, validation) of a Parquet file, split as the recipe says. Raises UserError."""
    return split_rows(pq.read_table(path), recipe.data.split_by, recipe.data.validation_share, recipe.seed)


def split_rows(table: pa.Table, by: str, validation_share: float, seed: int) -> tuple[pa.Table, pa.Table]:
    """Return (train, validation): two parts of `table`, in its order, split by the values of column `by`.

    Values that differ only in case or white space count as equal. Raises UserError when the column
    is missing or a side would be empty.
    """
    if by not in table.column_names:
        raise UserError(
            f"data.split_by is '{by}', but the data has the columns {', '.join(table.column_names)}",
            f"name one of them, or give the {DATA_FILE} of this recipe",
        )
    is_validation = np.concatenate([np.empty(0, bool)] + [_sides(c, validation_share, seed) for c in table[by].chunks])
    for side, empty in (("train", is_validation.all()), ("validation", not is_validation.any())):
        if empty:
            raise UserError(
                f"splitting {table.num_rows:,} rows by '{by}' with data.validation_share {validation_share:g} leaves "
                f"the {side} side empty",
                f"change the share, or use data with more distinct values of '{by}'",
            )
    return table.filter(pa.array(~is_validation)), table.filter(pa.array(is_validation))


def _sides(values: pa.Array, validation_share: float, seed: int) -> np.ndarray:
    """Return the mask of the validation rows, bool [rows]. Each distinct value is hashed once."""
    encoded = values.dictionary_encode()
    sides = [_position(str(value), seed) < validation_share for value in encoded.dictionary.to_pylist()]
    return np.array(sides, bool).take(np.asarray(encoded.indices))


def _position(value: str, seed: int) -> float:
    """Map a value to [0, 1), in the same way on every machine and in every version of Python."""
    normalised = " ".join(value.casefold().split())
    digest = hashlib.blake2b(f"{seed}\0{normalised}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
