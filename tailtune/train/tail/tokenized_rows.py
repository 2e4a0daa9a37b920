"""The tokenized rows, the prefix that they share, and the tokens to predict."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

IGNORED = -100
"""Label of a position without loss, as in Transformers."""
MIN_PREFIX_LENGTH = 8
"""Tokens; a shorter common prefix is not worth sharing."""


@dataclass(frozen=True)
class Targets:
    """What the head predicts in a batch; K predictions."""

    index: np.ndarray
    """[K] indices of the predicting tokens in the packed sequence; not unique, because rows share a prefix."""
    token: np.ndarray
    """[K] token ids to predict."""
    weight: np.ndarray
    """[K] number of rows that contain the prediction; above 1 only inside the shared prefix."""


class TokenizedRows:
    """N tokenized rows and the prefix that most of them share.

    The *own tokens* of a row are those after the shared prefix, or all of them where it does not have this prefix.
    """

    def __init__(self, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], *, share_prefix: bool = True):
        self.ids = [np.array(row, np.int64) for row in ids]
        self.labels = [np.array(row, np.int64) for row in labels]
        self.shared_prefix = find_shared_prefix(self.ids) if share_prefix else np.empty(0, np.int64)
        """[P] token ids; empty where rows share too little."""
        size = len(self.shared_prefix)
        self.has_prefix = np.array(
            [size > 0 and len(row) > size and np.array_equal(row[:size], self.shared_prefix) for row in self.ids], bool
        )
        """[N] whether the row begins with the shared prefix."""
        self.starts = np.where(self.has_prefix, size, 0)
        """[N] position of each row's first own token: P or 0."""
        self.lengths = np.array([len(row) for row in self.ids], np.int64) - self.starts
        """[N] number of own tokens."""

    def __len__(self) -> int:
        return len(self.ids)

    def own_ids(self, row: int) -> np.ndarray:
        """Token ids of a row's own tokens."""
        return self.ids[row][self.starts[row] :]

    @cached_property
    def fill_order(self) -> np.ndarray:
        """[N] the order in which the cache is filled: similar rows next to each other.

        Rows that begin alike follow each other, as a family in which every row but the first inherits tokens from the
        previous one. Families are sorted by their longest row; those with the shared prefix come last.
        """
        order = np.array(
            sorted(range(len(self)), key=lambda row: (self.has_prefix[row], _sort_key(self.own_ids(row)))), np.int64
        )
        family = np.cumsum(self.count_inherited(order.tolist()) == 0)
        longest = np.zeros(len(self) + 1, np.int64)
        np.maximum.at(longest, family, self.lengths[order])
        # the last key is the most significant one
        return order[np.lexsort((np.arange(len(self)), family, longest[family], self.has_prefix[order]))]

    def count_inherited(self, row_indices: Sequence[int]) -> np.ndarray:
        """[n] number of own tokens that each row shares with the previous one, for example the same question."""
        keys = [_sort_key(self.own_ids(row)) for row in row_indices]
        counts = [
            _common_length(key, next_key) if self.has_prefix[row] == self.has_prefix[next_row] else 0
            for (key, next_key), (row, next_row) in zip(pairwise(keys), pairwise(row_indices), strict=True)
        ]
        return np.array([0, *counts], np.int64)[: len(row_indices)]

    def targets(self, row_indices: Sequence[int], offsets: np.ndarray) -> Targets:
        """Return the predictions of a batch. `offsets` [n] are the indices of the rows' first own tokens.

        The last token of the shared prefix predicts a different token in each row, so it occurs once per row. The
        predictions inside the shared prefix are the same in all rows, so they occur once, weighted by the number of
        rows that have a label there.
        """
        index, token = [], []
        size = len(self.shared_prefix)
        prefix_weight = np.zeros(size, np.int64)
        for row, offset in zip(row_indices, offsets, strict=True):
            labels, start = self.labels[row], int(self.starts[row])
            predicted = np.flatnonzero(labels[1:] != IGNORED) + 1
            own = predicted[predicted >= max(start, 1)]
            index.append(np.where(own > start, offset + own - 1 - start, size - 1))
            token.append(labels[own])
            prefix_weight[predicted[predicted < start]] += 1
        in_prefix = np.flatnonzero(prefix_weight)
        index.append(in_prefix - 1)
        token.append(self.shared_prefix[in_prefix])
        num_own = sum(map(len, index)) - len(in_prefix)
        weight = np.concatenate([np.ones(num_own), prefix_weight[in_prefix]])
        return Targets(np.concatenate(index), np.concatenate(token), weight)


def find_shared_prefix(ids: Sequence[np.ndarray]) -> np.ndarray:
    """Return the prefix that saves the most tokens when the rows that have it compute it once.

    In sorted order, rows that begin alike are neighbours. The prefix is therefore the largest rectangle under the
    histogram of the common lengths of neighbours. Every row with the prefix keeps at least one own token.
    """
    keys = sorted(map(_sort_key, ids))
    common_lengths = [_common_length(key, next_key) for key, next_key in pairwise(keys)]
    best = (0, 0, 0)  # tokens saved, length of the prefix, index of a row that has it
    stack: list[tuple[int, int]] = []  # (first neighbour, length), lengths ascending
    for i, length in enumerate([*common_lengths, 0]):
        first = i
        while stack and stack[-1][1] >= length:
            first, height = stack.pop()
            best = max(best, (height * (i - first), height, i - 1))
        stack.append((first, length))
    _, length, row = best
    return np.frombuffer(keys[row][: 4 * length] if keys else b"", ">u4").astype(np.int64)


def _sort_key(ids: np.ndarray) -> bytes:
    """Bytes that sort as the token ids do, 4 per token."""
    return ids.astype(">u4").tobytes()


def _common_length(key: bytes, other_key: bytes) -> int:
    """Number of tokens that both rows begin with, one less than either row has at most; 0 below MIN_PREFIX_LENGTH."""
    size = min(len(key), len(other_key)) // 4
    differs = np.frombuffer(key, ">u4", size) != np.frombuffer(other_key, ">u4", size)
    num_equal = int(differs.argmax()) if differs.any() else size
    common = min(num_equal, size - 1)
    return common if common >= MIN_PREFIX_LENGTH else 0
