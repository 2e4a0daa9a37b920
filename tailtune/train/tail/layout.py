"""Packs the rows of a batch into one sequence without padding.

A row consists of the *shared prefix*, with which most rows begin, and of its *own tokens*. A row that begins
differently has only own tokens. The packed sequence holds the shared prefix once, then the own tokens of each row:

    shared prefix | own tokens of row 0 | own tokens of row 1 | …

Linear layers, norms and activations treat every token separately, so they run on the packed sequence. Attention does
not: `attention.py` gathers the rows into padded *groups* and runs on those. Throughout this package,

- a token's *index* counts from the start of the packed sequence, 0 to T - 1;
- its *position* counts from the start of its row, which is what rotary embeddings use;
- its *column* counts from its row's first own token.

Worked example
--------------
The shared prefix has the three tokens x y z. Row 0 has the own tokens a b, row 1 has c d e f:

    token       x  y  z  a  b  c  d  e  f
    index       0  1  2  3  4  5  6  7  8
    position    0  1  2  3  4  3  4  5  6
    column               0  1  0  1  2  3

`lay_out(prefix_length=3, starts=[3, 3], lengths=[2, 4], device=…)` returns a layout with

    offsets          [3, 5]                    index of each row's first own token
    token_indices    [3, 4], [5, 6, 7, 8]      indices of each row's own tokens
    positions        [0, 1, 2, 3, 4, 3, 4, 5, 6]

`Layout.grouped` returns two groups. Group 0 is the shared prefix, which attends to itself. Group 1 is both rows, padded
to four columns; each attends to the shared prefix and to itself.

                     group 0        group 1
    prefix_length    0              3
    keys             [[0, 1, 2]]    [[3, 4, 4, 4], [5, 6, 7, 8]]    padded with the row's last token
    queries          [[0, 1, 2]]    [[3, 4, 4, 4], [5, 6, 7, 8]]
    columns          None           None                            all columns are computed
    slots            [0, 1, 2]      [0, 1, 4, 5, 6, 7]              slots 2 and 3 are row 0's padding

In group 1, queries of shape [2, heads, 4, size] attend to keys of shape [2, key heads, 3 + 4, size]. The output has
2 × 4 query slots, and `slots` selects those that are not padding. The outputs of both groups, concatenated, are then in
the order of the packed sequence, so `grouped` returns None as their permutation. A permutation is needed, for example,
when rows with and without the shared prefix alternate, because these are in different groups.

*Fewer queries.* The last layer needs outputs only where a label is predicted. If only the tokens b and f predict one,
`layout.select_queries([4, 8])` keeps all keys and two queries. The shared prefix has no query, so it has no group:

    keys             [[3, 4, 4, 4], [5, 6, 7, 8]]
    queries          [[0], [1]]                    b is the first selected token, f the second
    columns          [[1], [3]]                    b is in column 1 of its row, f in column 3
    slots            [0, 1]

*Inherited tokens.* While the cache is filled, rows that begin alike follow each other. If the own tokens of row 1 are
a d e f, the row inherits the first of them from row 0. With `num_inherited=[0, 1]`, the packed sequence holds a once:

    token       x  y  z  a  b  d  e  f
    index       0  1  2  3  4  5  6  7
    position    0  1  2  3  4  4  5  6

    offsets          [3, 5]                    index of each row's first token that is not inherited
    token_indices    [3, 4], [3, 5, 6, 7]      row 1 begins with the a of row 0

Row 1 has no query for a, whose output is computed in row 0. The rows now have two and three queries, so each gets its
own group. Group 0 is the shared prefix, as above.

                     group 1     group 2
    keys             [[3, 4]]    [[3, 5, 6, 7]]
    queries          [[3, 4]]    [[5, 6, 7]]
    columns          None        [[1, 2, 3]]
    slots            [0, 1]      [0, 1, 2]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
MAX_GROUPS = 4
"""Maximum number of groups per prefix length when rows inherit tokens. Rows are grouped by their number of queries.

Without inherited tokens, there is one group per prefix length: in training, more groups do not pay off, because each
one adds a forward and a backward pass of attention (BENCHMARKS.md).
"""
MAX_MASK_ELEMENTS = 1 << 23
"""Largest attention mask, in elements, of a group with one mask per row. Larger ones are avoided (`_query_columns`)."""


@dataclass(frozen=True)
class Group:
    """Rows with the same prefix length, padded to the same number of keys and of queries for attention."""

    prefix_length: int
    """Tokens of the shared prefix before each row's own tokens: 0 or P."""
    keys: torch.Tensor
    """[n, width] indices of each row's own tokens; shorter rows repeat their last one."""
    queries: torch.Tensor
    """[n, q] index of each query among the selected tokens (`Layout.query_index`); arbitrary in unused slots."""
    columns: torch.Tensor | None
    """[n or 1, q] columns that are computed as queries; None if all columns are. Only those in `slots` are used."""
    slots: torch.Tensor
    """[m] query slots in use, as indices into the flattened [n * q] outputs."""
    masks: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False)

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive attention mask (0 or minus infinity). It is built once and reused by the other layers.

        Its shape is [n or 1, 1, repeats * q, prefix_length + width]: the queries are repeated for the heads that share
        a key. `window` is the size of a sliding window, in tokens.
        """
        if (mask := self.masks.get((window, repeats, dtype))) is not None:
            return mask
        device = self.keys.device
        columns = torch.arange(self.queries.shape[1], device=device)[None] if self.columns is None else self.columns
        query = self.prefix_length + columns[..., None]
        key = torch.arange(self.prefix_length + self.keys.shape[1], device=device)
        masked = (key > query) if window is None else (key > query) | (key <= query - window)
        mask = torch.zeros(masked.shape, dtype=dtype, device=device).masked_fill_(masked, float("-inf"))
        return self.masks.setdefault((window, repeats, dtype), mask.repeat(1, repeats, 1)[:, None])


@dataclass(frozen=True)
class Layout:
    """A batch of n rows as one packed sequence of T tokens; the module's docstring has an example."""

    prefix_length: int
    """Tokens of the shared prefix, P."""
    includes_prefix: bool
    """Whether the packed sequence begins with the shared prefix. Otherwise `prefix_memory` has the prefix's."""
    starts: np.ndarray
    """[n] position of each row's first own token: P for rows with the shared prefix, 0 for the others."""
    offsets: np.ndarray
    """[n] index of each row's first own token that is not inherited."""
    lengths: np.ndarray
    """[n] number of own tokens of each row."""
    num_inherited: np.ndarray
    """[n] number of leading own tokens that each row inherits from the previous one."""
    token_indices: tuple[np.ndarray, ...]
    """Indices of each row's own tokens."""
    positions: torch.Tensor
    """[T] position of each token in its row."""
    prefix_memory: dict[torch.nn.Module, KeysAndValues] | None = field(default=None, repr=False)
    """Keys and values of the shared prefix for each attention module.

    A layout that contains only the prefix writes them, and layouts without the prefix read them. Only the frozen layers
    use this (`cache.FrozenLayers`); in a training step, the prefix is part of the sequence and this is None.
    """
    query_index: np.ndarray | None = None
    """[K] indices of the tokens that are queries and have an output; None for all tokens."""
    all_keys_and_values: list[KeysAndValues] = field(default_factory=list, repr=False)
    """With a `query_index`: keys and values of the whole sequence. Empty until the last layer has computed them."""

    def select_queries(self, query_index: np.ndarray) -> "Layout":
        """Return the same layout with the tokens at the unique indices `query_index` [K] as its only queries."""
        return replace(self, query_index=query_index, all_keys_and_values=[])

    @cached_property
    def grouped(self) -> tuple[tuple[Group, ...], torch.Tensor | None]:
        """The groups, and the permutation that sorts their concatenated outputs; None if these are sorted already."""
        device, output_index = self.positions.device, self._output_index()
        built = [_build_group(*members, output_index, device) for members in self._members(output_index)]
        outputs = np.concatenate([np.empty(0, np.int64), *(indices for _, indices in built)])
        order = np.argsort(outputs)
        is_sorted = (order == np.arange(len(order))).all()
        return tuple(group for group, _ in built), None if is_sorted else to_tensor(order, device)

    def _output_index(self) -> np.ndarray:
        """[T] index of each token's output among all outputs; -1 for tokens that are not queries."""
        if self.query_index is None:
            return np.arange(len(self.positions))
        output_index = np.full(len(self.positions), -1)
        output_index[self.query_index] = np.arange(len(self.query_index))
        return output_index

    def _members(self, output_index: np.ndarray) -> list[tuple[int, list[np.ndarray], np.ndarray]]:
        """Return, for each group, its prefix length, its rows' token indices, and their numbers of inherited tokens.

        The shared prefix is a group with a single row. The rows are grouped by prefix length and number of queries
        (`_buckets`).
        """
        prefix = np.arange(self.prefix_length if self.includes_prefix else 0)
        has_queries = (output_index[prefix] >= 0).any()
        members = [(0, [prefix], np.zeros(1, np.int64))] if has_queries else []
        buckets = self._buckets(output_index)
        for start, bucket in sorted(set(zip(self.starts.tolist(), buckets.tolist(), strict=True))):
            rows = np.flatnonzero((self.starts == start) & (buckets == bucket))
            if bucket:
                members.append((start, [self.token_indices[row] for row in rows], self.num_inherited[rows]))
        return members

    def _buckets(self, output_index: np.ndarray) -> np.ndarray:
        """[n] bucket of each row by its number of queries: 0 for rows without queries, otherwise 1 to MAX_GROUPS."""
        num_queries = np.array(
            [
                np.count_nonzero(output_index[indices[inherited:]] >= 0)
                for indices, inherited in zip(self.token_indices, self.num_inherited, strict=True)
            ],
            np.int64,
        )
        num_buckets = MAX_GROUPS if self.num_inherited.any() else 1
        return -(-num_queries * num_buckets // max(1, num_queries.max(initial=0)))  # rounded up


def lay_out(
    prefix_length: int,
    starts: np.ndarray,
    lengths: np.ndarray,
    device: torch.device,
    *,
    includes_prefix: bool = True,
    num_inherited: np.ndarray | None = None,
    prefix_memory: dict[torch.nn.Module, KeysAndValues] | None = None,
) -> Layout:
    """Return the layout of a batch of n rows. See the fields of `Layout` for the arguments."""
    first = prefix_length if includes_prefix else 0
    num_inherited = np.zeros_like(lengths) if num_inherited is None else num_inherited
    num_new = lengths - num_inherited
    offsets = first + np.cumsum(num_new) - num_new
    positions = [np.arange(first)]
    token_indices: list[np.ndarray] = []
    for start, offset, new, inherited in zip(starts, offsets, num_new, num_inherited, strict=True):
        positions.append(start + inherited + np.arange(new))
        inherited_indices = token_indices[-1][:inherited] if inherited else offsets[:0]
        token_indices.append(np.concatenate([inherited_indices, offset + np.arange(new)]))
    return Layout(
        prefix_length=prefix_length,
        includes_prefix=includes_prefix,
        starts=starts,
        offsets=offsets,
        lengths=lengths,
        num_inherited=num_inherited,
        token_indices=tuple(token_indices),
        positions=to_tensor(np.concatenate(positions), device),
        prefix_memory=prefix_memory,
    )


def _build_group(
    prefix_length: int,
    token_indices: Sequence[np.ndarray],
    num_inherited: np.ndarray,
    output_index: np.ndarray,
    device: torch.device,
) -> tuple[Group, np.ndarray]:
    """Return a group, and the output index of each query [m] in the order of the group's slots.

    `token_indices` and `num_inherited` describe its n rows; `output_index` is that of `Layout._output_index`.
    """
    lengths = np.array([len(indices) for indices in token_indices])
    column = np.arange(lengths.max())
    keys = np.stack([indices[np.minimum(column, len(indices) - 1)] for indices in token_indices])
    is_new = (column >= num_inherited[:, None]) & (column < lengths[:, None])
    is_query = is_new & (output_index[keys] >= 0)
    columns = _query_columns(is_query, prefix_length)
    queries = output_index[np.take_along_axis(keys, columns, 1)]
    slots = np.flatnonzero(np.take_along_axis(is_query, columns, 1))
    same_in_all_rows = (columns == columns[0]).all()
    all_columns = same_in_all_rows and columns.shape == keys.shape
    group = Group(
        prefix_length=prefix_length,
        keys=to_tensor(keys, device),
        queries=to_tensor(queries.clip(0), device),
        columns=None if all_columns else to_tensor(columns[:1] if same_in_all_rows else columns, device),
        slots=to_tensor(slots, device),
    )
    return group, queries.ravel()[slots]


def _query_columns(is_query: np.ndarray, prefix_length: int) -> np.ndarray:
    """Choose the columns [n, q] that attention computes. `is_query` [n, width] marks the columns that have a query.

    The query columns of each row come first, padded with other columns to the largest number of queries in a row. All
    columns are computed instead where that is cheaper:

    - without a prefix, if a row has queries in more than half of the columns: plain causal attention needs no mask;
    - if one mask per row would need more than MAX_MASK_ELEMENTS elements: all columns need only one mask for all rows.
    """
    num_rows, width = is_query.shape
    num_queries = is_query.sum(1).max()
    if prefix_length == 0 and 2 * num_queries > width:
        num_queries = width
    if num_rows * num_queries * (prefix_length + width) > MAX_MASK_ELEMENTS:
        num_queries = width
    if num_queries == width:
        return np.broadcast_to(np.arange(width), is_query.shape)
    return np.argsort(~is_query, axis=1, kind="stable")[:, :num_queries]


def to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
