"""Attention over packed rows, compared with each row's attention computed token by token."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from tailtune.train.tail import attention
from tailtune.train.tail.layout import Layout, lay_out

HEADS, KEY_HEADS, SIZE, PREFIX = 4, 2, 8, 11


def draw_layout(draw: random.Random, *, inherits: bool) -> Layout:
    """Rows of 1 to 40 own tokens; some have the shared prefix, some inherit tokens from the previous row."""
    num_rows = draw.randint(1, 14)
    starts = np.array([draw.choice((0, PREFIX)) for _ in range(num_rows)])
    lengths = np.array([draw.randint(1, 40) for _ in range(num_rows)])
    num_inherited = np.zeros_like(lengths)
    for row in range(1, num_rows if inherits else 0):
        if starts[row] == starts[row - 1]:
            num_inherited[row] = draw.randint(0, min(lengths[row], lengths[row - 1]) - 1)
    return lay_out(PREFIX, starts, lengths, torch.device("cpu"), num_inherited=num_inherited)


def token_by_token(layout: Layout, q: Any, k: Any, v: Any, window: int | None) -> torch.Tensor:
    """Return the attention [T, heads, size]."""
    out = torch.full((q.shape[2], HEADS, SIZE), torch.nan, dtype=q.dtype)
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1)[0] for x in (k, v))
    rows, own, end = [(np.arange(PREFIX), 0)], np.arange(0), PREFIX
    for start, length, inherited in zip(layout.starts, layout.lengths, layout.num_inherited, strict=True):
        own = np.concatenate([own[:inherited], np.arange(end, end + length - inherited)])
        end += length - inherited
        rows.append((np.concatenate([np.arange(start), own]), start + inherited))
    for index, first in rows:
        for i in range(first, len(index)):
            seen = index[max(0, i + 1 - (window or len(index))) : i + 1]
            scores = torch.einsum("hd,hkd->hk", q[0, :, index[i]], k[:, seen]) * SIZE**-0.5
            out[index[i]] = torch.einsum("hk,hkd->hd", scores.softmax(-1), v[:, seen])
    return out


def attend(layout: Layout, q: Any, k: Any, v: Any, window: int | None) -> torch.Tensor:
    token = attention._layout.set(layout)
    try:
        return attention.attend(torch.nn.Identity(), q, k, v, None, SIZE**-0.5, sliding_window=window)[0][0]
    finally:
        attention._layout.reset(token)


@pytest.mark.parametrize("max_mask_elements", [1 << 23, 1000])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("inherits", [False, True])
def test_each_token_attends_to_the_same_tokens_as_in_its_row(
    inherits: bool, window: int | None, max_mask_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailtune.train.tail.layout.MAX_MASK_ELEMENTS", max_mask_elements)
    draw = random.Random(5)
    torch.manual_seed(0)
    for _ in range(25):
        layout = draw_layout(draw, inherits=inherits)
        num_tokens = len(layout.positions)
        q, k, v = (torch.randn(1, n, num_tokens, SIZE, dtype=torch.float64) for n in (HEADS, KEY_HEADS, KEY_HEADS))
        expected = token_by_token(layout, q, k, v, window)
        torch.testing.assert_close(attend(layout, q, k, v, window), expected)
        index = np.sort(np.array(draw.sample(range(num_tokens), draw.randint(1, num_tokens))))
        selective = layout.select_queries(index)
        with pytest.raises(attention.KeysReady):
            attend(selective, q, k, v, window)
        selected = q[:, :, torch.from_numpy(index)]
        torch.testing.assert_close(attend(selective, selected, selected, selected, window), expected[index])


def test_only_tokens_with_an_output_are_queries() -> None:
    starts, lengths = np.array([PREFIX] * 3), np.array([30, 30, 30])
    layout = lay_out(PREFIX, starts, lengths, torch.device("cpu"), includes_prefix=False,
                     num_inherited=np.array([0, 25, 28]))  # fmt: skip
    assert sorted(tuple(group.queries.shape) for group in layout.grouped[0]) == [(1, 30), (2, 5)]
    selective = layout.select_queries(np.array([3, 31, 35]))
    assert [tuple(group.queries.shape) for group in selective.grouped[0]] == [(3, 1)]


def test_long_rows_share_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = lay_out(PREFIX, np.array([PREFIX, 0]), np.array([40, 40]), torch.device("cpu"))
    index = np.arange(PREFIX + 30, PREFIX + 50)  # the end of one row, the beginning of the other
    assert all(group.columns is not None for group in layout.select_queries(index).grouped[0])
    monkeypatch.setattr("tailtune.train.tail.layout.MAX_MASK_ELEMENTS", 100)
    assert all(group.columns is None for group in layout.select_queries(index).grouped[0])


def test_a_mask_is_built_once_for_all_layers() -> None:
    group = lay_out(3, np.array([3, 3]), np.array([2, 5]), torch.device("cpu")).grouped[0][-1]
    mask = group.mask(None, 2, torch.float32)
    assert mask is group.mask(None, 2, torch.float32) and mask is not group.mask(4, 2, torch.float32)
    assert mask.shape == (1, 1, 2 * 5, 3 + 5) and mask[0, 0, 5].tolist() == [0.0] * 4 + [float("-inf")] * 4
