"""Tokenized rows and the prefix that they share."""

import random

import numpy as np

from tailtune.train.tail.tokenized_rows import find_shared_prefix


def saved_tokens(prefix: tuple[int, ...], rows: list[tuple[int, ...]]) -> int:
    return len(prefix) * (sum(len(row) > len(prefix) and row[: len(prefix)] == prefix for row in rows) - 1)


def test_the_shared_prefix_saves_the_most_tokens() -> None:
    """Compared with all prefixes of all rows, on rows that branch often."""
    draw = random.Random(3)
    for _ in range(50):
        stems = [tuple(draw.choices(range(3), k=draw.randint(8, 14))) for _ in range(3)]
        rows = [draw.choice(stems)[: draw.randint(1, 14)] + tuple(draw.choices(range(3), k=3)) for _ in range(12)]
        prefix = tuple(find_shared_prefix([np.array(row) for row in rows]).tolist())
        candidates = {row[:n] for row in rows for n in range(8, len(row))}
        best = max((saved_tokens(candidate, rows) for candidate in candidates), default=0)
        assert (saved_tokens(prefix, rows) if prefix else 0) == max(best, 0)


def test_one_row_or_none_shares_nothing() -> None:
    assert len(find_shared_prefix([np.arange(50)])) == 0
    assert len(find_shared_prefix([])) == 0
    assert len(find_shared_prefix([np.arange(50), np.arange(50) + 100])) == 0
    assert len(find_shared_prefix([np.arange(5)] * 9)) == 0  # too short to share
