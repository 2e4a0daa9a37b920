"""The tokenised rows, the prompt that they share, and which token predicts what."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

IGNORED = -100
"""Label of a position without loss, as in Transformers."""
MIN_PROMPT_LENGTH = 8
"""Tokens; a shorter common beginning is not worth a place of its own."""


@dataclass(frozen=True)
class Targets:
    """What the head has to predict in a batch; K predictions."""

    index: np.ndarray
    """[K] positions in the packed sequence whose state predicts."""
    token: np.ndarray
    """[K] the tokens to predict."""
    weight: np.ndarray
    """[K] in how many rows this prediction stands: above 1 inside the shared prompt."""


class Rows:
    """Tokenised rows and the prompt that most of them begin with.

    A row's *own* tokens are those after the shared prompt, or all of them when it does not share it.
    """

    def __init__(self, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], *, share_prompt: bool = True):
        self.ids = [np.array(row, np.int64) for row in ids]
        self.labels = [np.array(row, np.int64) for row in labels]
        self.prompt = find_shared_prompt(self.ids) if share_prompt else np.empty(0, np.int64)
        size = len(self.prompt)
        self.shares = np.array(
            [size > 0 and len(row) > size and np.array_equal(row[:size], self.prompt) for row in self.ids], bool
        )
        self.starts = np.where(self.shares, size, 0)
        """[N] position of each row's first own token."""
        self.lengths = np.array([len(row) for row in self.ids], np.int64) - self.starts
        """[N] number of own tokens."""

    def __len__(self) -> int:
        return len(self.ids)

    def own(self, row: int) -> np.ndarray:
        """Ids of a row's own tokens."""
        return self.ids[row][self.starts[row] :]

    @cached_property
    def families(self) -> np.ndarray:
        """[N] all rows, those of similar length near each other and those that begin alike side by side.

        A family are neighbours in sorted order of which each inherits tokens. Rows on the prompt come last, families
        by their longest row (the last key of `lexsort` counts first).
        """
        order = np.array(sorted(range(len(self)), key=lambda row: (self.shares[row], _key(self.own(row)))), np.int64)
        family = np.cumsum(self.inherited(order.tolist()) == 0)
        longest = np.zeros(len(self) + 1, np.int64)
        np.maximum.at(longest, family, self.lengths[order])
        return order[np.lexsort((np.arange(len(self)), family, longest[family], self.shares[order]))]

    def inherited(self, rows: Sequence[int]) -> np.ndarray:
        """[n] own tokens that each row has in common with the one before it: the same question, for example."""
        keys = [_key(self.own(row)) for row in rows]
        common = [
            _common_length(a, b) if self.shares[i] == self.shares[j] else 0
            for (a, b), (i, j) in zip(pairwise(keys), pairwise(rows), strict=True)
        ]
        return np.array([0, *common], np.int64)[: len(rows)]

    def targets(self, rows: Sequence[int], offsets: np.ndarray) -> Targets:
        """The predictions of a batch; `offsets` are the places of the rows' first own tokens.

        The last prompt token predicts another token in each row; every row that shares the prompt has one. Predictions
        inside the prompt are the same in all rows, so each stands once, with the number of rows as its weight.
        """
        index, token = [], []
        size = len(self.prompt)
        inside = np.zeros(size, np.int64)
        for row, offset in zip(rows, offsets, strict=True):
            labels, start = self.labels[row], int(self.starts[row])
            predicted = np.flatnonzero(labels[1:] != IGNORED) + 1
            own = predicted[predicted >= max(start, 1)]
            index.append(np.where(own > start, offset + own - 1 - start, size - 1))
            token.append(labels[own])
            inside[predicted[predicted < start]] += 1
        in_prompt = np.flatnonzero(inside)
        index.append(in_prompt - 1)
        token.append(self.prompt[in_prompt])
        num_own = sum(map(len, index)) - len(in_prompt)
        weight = np.concatenate([np.ones(num_own), inside[in_prompt]])
        return Targets(np.concatenate(index), np.concatenate(token), weight)


def find_shared_prompt(rows: Sequence[np.ndarray]) -> np.ndarray:
    """The beginning that saves most tokens when the rows that have it compute it once.

    In sorted order the rows that begin alike are neighbours, so this is the largest rectangle under
    the histogram of the neighbours' common lengths. Every sharing row keeps a token of its own.
    """
    keys = sorted(map(_key, rows))
    common = [_common_length(a, b) for a, b in pairwise(keys)]
    best = (0, 0, 0)  # tokens saved, length, a row
    stack: list[tuple[int, int]] = []  # (first neighbour, length), lengths ascending
    for place, length in enumerate([*common, 0]):
        first = place
        while stack and stack[-1][1] >= length:
            first, height = stack.pop()
            best = max(best, (height * (place - first), height, place - 1))
        stack.append((first, length))
    _, length, row = best
    return np.frombuffer(keys[row][: 4 * length] if keys else b"", ">u4").astype(np.int64)


def _key(row: np.ndarray) -> bytes:
    """Bytes that sort as the tokens do."""
    return row.astype(">u4").tobytes()


def _common_length(a: bytes, b: bytes) -> int:
    """Tokens that both begin with, at least one less than either has; 0 when too few to share."""
    size = min(len(a), len(b)) // 4
    differs = np.frombuffer(a, ">u4", size) != np.frombuffer(b, ">u4", size)
    same = int(differs.argmax()) if differs.any() else size
    common = min(same, size - 1)
    return common if common >= MIN_PROMPT_LENGTH else 0
