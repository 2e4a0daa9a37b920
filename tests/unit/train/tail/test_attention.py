"""Attention over packed rows, against each row's own attention written out."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from tailtune.train.tail import attention
from tailtune.train.tail.layout import Layout, lay_out

HEADS, KEY_HEADS, SIZE, PROMPT = 4, 2, 8, 11


def draw_layout(draw: random.Random, *, inherits: bool) -> Layout:
    """Rows of 1 to 40 tokens; some share the prompt, some have their beginning from the row before."""
    num_rows = draw.randint(1, 14)
    starts = np.array([draw.choice((0, PROMPT)) for _ in range(num_rows)])
    lengths = np.array([draw.randint(1, 40) for _ in range(num_rows)])
    inherited = np.zeros_like(lengths)
    for row in range(1, num_rows if inherits else 0):
        if starts[row] == starts[row - 1]:
            inherited[row] = draw.randint(0, min(lengths[row], lengths[row - 1]) - 1)
    return lay_out(PROMPT, starts, lengths, torch.device("cpu"), inherited=inherited)


def written_out(layout: Layout, q: Any, k: Any, v: Any, window: int | None) -> torch.Tensor:
    """[T, heads, size], token by token."""
    out = torch.full((q.shape[2], HEADS, SIZE), torch.nan, dtype=q.dtype)
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1)[0] for x in (k, v))
    rows, own, end = [(np.arange(PROMPT), 0)], np.arange(0), PROMPT
    for start, length, old in zip(layout.starts, layout.lengths, layout.inherited, strict=True):
        own = np.concatenate([own[:old], np.arange(end, end + length - old)])
        end += length - old
        rows.append((np.concatenate([np.arange(start), own]), start + old))
    for places, first in rows:
        for i in range(first, len(places)):
            seen = places[max(0, i + 1 - (window or len(places))) : i + 1]
            scores = torch.einsum("hd,hkd->hk", q[0, :, places[i]], k[:, seen]) * SIZE**-0.5
            out[places[i]] = torch.einsum("hk,hkd->hd", scores.softmax(-1), v[:, seen])
    return out


def attend(layout: Layout, q: Any, k: Any, v: Any, window: int | None) -> torch.Tensor:
    token = attention._layout.set(layout)
    try:
        return attention.attend(torch.nn.Identity(), q, k, v, None, SIZE**-0.5, sliding_window=window)[0][0]
    finally:
        attention._layout.reset(token)


@pytest.mark.parametrize("max_mask", [1 << 23, 1000])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("inherits", [False, True])
def test_each_token_sees_what_it_sees_in_its_row(
    inherits: bool, window: int | None, max_mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailtune.train.tail.layout.MAX_MASK", max_mask)
    draw = random.Random(5)
    torch.manual_seed(0)
    for _ in range(25):
        layout = draw_layout(draw, inherits=inherits)
        num_tokens = len(layout.positions)
        q, k, v = (torch.randn(1, n, num_tokens, SIZE, dtype=torch.float64) for n in (HEADS, KEY_HEADS, KEY_HEADS))
        expected = written_out(layout, q, k, v, window)
        torch.testing.assert_close(attend(layout, q, k, v, window), expected)
        index = np.sort(np.array(draw.sample(range(num_tokens), draw.randint(1, num_tokens))))
        narrowed = layout.narrowed(index)
        with pytest.raises(attention.KeysKnown):
            attend(narrowed, q, k, v, window)
        few = q[:, :, torch.from_numpy(index)]
        torch.testing.assert_close(attend(narrowed, few, few, few, window), expected[index])


def test_only_what_is_wanted_asks() -> None:
    starts, lengths = np.array([PROMPT] * 3), np.array([30, 30, 30])
    layout = lay_out(PROMPT, starts, lengths, torch.device("cpu"), has_prompt=False, inherited=np.array([0, 25, 28]))
    assert sorted(tuple(group.queries.shape) for group in layout.grouped[0]) == [(1, 30), (2, 5)]
    narrowed = layout.narrowed(np.array([3, 31, 35]))
    assert [tuple(group.queries.shape) for group in narrowed.grouped[0]] == [(3, 1)]


def test_long_rows_have_no_mask_each(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = lay_out(PROMPT, np.array([PROMPT, 0]), np.array([40, 40]), torch.device("cpu"))
    index = np.arange(PROMPT + 30, PROMPT + 50)  # the end of one row, the beginning of the other
    assert all(group.columns is not None for group in layout.narrowed(index).grouped[0])
    monkeypatch.setattr("tailtune.train.tail.layout.MAX_MASK", 100)
    assert all(group.columns is None for group in layout.narrowed(index).grouped[0])


def test_a_mask_is_made_once_for_all_layers() -> None:
    group = lay_out(3, np.array([3, 3]), np.array([2, 5]), torch.device("cpu")).grouped[0][-1]
    mask = group.mask(None, 2, torch.float32)
    assert mask is group.mask(None, 2, torch.float32) and mask is not group.mask(4, 2, torch.float32)
    assert mask.shape == (1, 1, 2 * 5, 3 + 5) and mask[0, 0, 5].tolist() == [0.0] * 4 + [float("-inf")] * 4
