"""Train and validation, by question: rows with the same question stand on the same side.

The side follows from a seeded hash of the question alone, so it stays when rows are added, removed
or reordered, and validation answers stay comparable between data revisions.
"""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tailtune.errors import UserError
from tailtune.recipe.schema import Recipe


def read_split(recipe: Recipe, path: Path) -> tuple[pa.Table, pa.Table]:
    """Return (train, validation) of a Parquet file, split as the recipe says. Raises UserError."""
    return split_rows(pq.read_table(path), recipe.data.split_by, recipe.data.validation_share, recipe.seed)


def split_rows(table: pa.Table, by: str, validation_share: float, seed: int) -> tuple[pa.Table, pa.Table]:
    """(train, validation): two parts of `table`, in its order, by the values of column `by`.

    Values that differ in case or white space only count as equal. Raises UserError when the column
    is missing or a side would be empty.
    """
    if by not in table.column_names:
        raise UserError(f"data.split_by is '{by}', but the data has the columns {', '.join(table.column_names)}; "
                        "name one of them, or give the data.parquet of this recipe")  # fmt: skip
    is_validation = np.concatenate([np.empty(0, bool)] + [_sides(c, validation_share, seed) for c in table[by].chunks])
    for side, empty in (("train", is_validation.all()), ("validation", not is_validation.any())):
        if empty:
            raise UserError(
                f"the {side} part of {table.num_rows:,} rows is empty, split by '{by}' with "
                f"data.validation_share {validation_share:g}; change the share, "
                f"or use data with more different values of '{by}'"
            )
    return table.filter(pa.array(~is_validation)), table.filter(pa.array(is_validation))


def _sides(values: pa.Array, validation_share: float, seed: int) -> np.ndarray:
    """Mask of the validation rows; every distinct value is hashed once."""
    encoded = values.dictionary_encode()
    sides = [_position(str(value), seed) < validation_share for value in encoded.dictionary.to_pylist()]
    return np.array(sides, bool).take(np.asarray(encoded.indices))


def _position(value: str, seed: int) -> float:
    """A value's place in [0, 1), the same on every machine and in every version of Python."""
    normalised = " ".join(value.casefold().split())
    digest = hashlib.blake2b(f"{seed}\0{normalised}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
