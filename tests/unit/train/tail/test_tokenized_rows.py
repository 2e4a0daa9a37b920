"""Rows, the prompt that they share, and their layout."""

import random

import numpy as np
import torch

from tailtune.train.tail.layout import lay_out
from tailtune.train.tail.tokenized_rows import find_shared_prompt


def saved_tokens(prompt: tuple[int, ...], rows: list[tuple[int, ...]]) -> int:
    return len(prompt) * (sum(len(r) > len(prompt) and r[: len(prompt)] == prompt for r in rows) - 1)


def test_the_shared_prompt_saves_most_tokens() -> None:
    """Against all beginnings of all rows, on rows that branch often."""
    draw = random.Random(3)
    for _ in range(50):
        stems = [tuple(draw.choices(range(3), k=draw.randint(8, 14))) for _ in range(3)]
        rows = [draw.choice(stems)[: draw.randint(1, 14)] + tuple(draw.choices(range(3), k=3)) for _ in range(12)]
        found = tuple(find_shared_prompt([np.array(row) for row in rows]).tolist())
        every = {row[:n] for row in rows for n in range(8, len(row))}
        best = max((saved_tokens(prompt, rows) for prompt in every), default=0)
        assert (saved_tokens(found, rows) if found else 0) == max(best, 0)


def test_nothing_is_shared_by_one_row_or_by_none() -> None:
    assert len(find_shared_prompt([np.arange(50)])) == 0
    assert len(find_shared_prompt([])) == 0
    assert len(find_shared_prompt([np.arange(50), np.arange(50) + 100])) == 0
    assert len(find_shared_prompt([np.arange(5)] * 9)) == 0  # too short for a place of its own


def test_positions_are_those_of_the_whole_row() -> None:
    layout = lay_out(3, np.array([3, 0, 3]), np.array([2, 4, 1]), torch.device("cpu"))
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 3]
    assert layout.offsets.tolist() == [3, 5, 9]
