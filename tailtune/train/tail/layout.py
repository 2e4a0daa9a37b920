"""How rows lie in one packed sequence: the shared prompt first, then each row's own tokens, no pads.

    prompt of P tokens | own tokens of row 0 | own tokens of row 1 | …

A token has the position that it has in its whole row, so rotary embeddings do not notice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
MAX_GROUPS = 4
"""Groups of rows on the same prompt where rows inherit tokens, because then few or many of a row's tokens ask.

With gradient, more than one gains nothing: every group is a forward and backward of its own (BENCHMARKS.md).
"""
MAX_MASK = 1 << 23
"""Numbers in a group's mask when every row has its own; a larger one gives way to one for all rows (`_group`)."""


@dataclass(frozen=True)
class Group:
    """Rows that attend alike, padded for attention alone: on top of the prompt or not."""

    start: int
    """Tokens of the prompt before each row, 0 or P."""
    keys: torch.Tensor
    """[n, width] places of the rows' own tokens in the packed sequence; the last one again where a row is shorter."""
    queries: torch.Tensor
    """[n, q] numbers of the tokens that ask, among those whose output is wanted; any number where one is not wanted."""
    columns: torch.Tensor | None
    """[n or 1, q] which of the row's own tokens ask; None when all do, in order."""
    scatter: torch.Tensor
    """[wanted tokens of the group] places in [n * q] of their outputs."""
    masks: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False)

    def mask(self, window: int | None, times: int, dtype: torch.dtype) -> torch.Tensor:
        """[n or 1, 1, times * q, start + width] to add to the scores, 0 or minus infinity; kept for other layers."""
        if (kept := self.masks.get((window, times, dtype))) is not None:
            return kept
        device = self.keys.device
        asks = torch.arange(self.queries.shape[1], device=device)[None] if self.columns is None else self.columns
        query = self.start + asks[..., None]
        key = torch.arange(self.start + self.keys.shape[1], device=device)
        hidden = (key > query) if window is None else (key > query) | (key <= query - window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        return self.masks.setdefault((window, times, dtype), mask.repeat(1, times, 1)[:, None])


@dataclass(frozen=True)
class Layout:
    prompt_length: int
    """Tokens of the shared prompt, P."""
    has_prompt: bool
    """Whether the prompt's tokens stand at the head of the sequence; else its keys come from `memory`."""
    starts: np.ndarray
    """[n] P for rows that share the prompt, else 0."""
    offsets: np.ndarray
    """[n] place of each row's first own token."""
    lengths: np.ndarray
    """[n] own tokens of each row."""
    inherited: np.ndarray
    """[n] own tokens that stand in the row before."""
    tokens: tuple[np.ndarray, ...]
    """Of each row, the places of its own tokens."""
    positions: torch.Tensor
    """[T] position of each token in its row."""
    memory: dict[torch.nn.Module, KeysAndValues] | None = field(default=None, repr=False)
    """Keys and values of the prompt per attention module: written by a layout of the prompt alone, then read.

    While the frozen layers are computed (`cache.Prefix`); in the steps the prompt is part of the sequence.
    """
    index: np.ndarray | None = None
    """[K] places of the tokens that ask, whose output alone is wanted; None for all. In the last layer (`split`)."""
    known: list[KeysAndValues] = field(default_factory=list, repr=False)
    """With an `index`: keys and values of the whole sequence, once they are known."""

    def narrowed(self, index: np.ndarray) -> "Layout":
        """The same rows, but only the tokens at `index` [K], no place twice, ask and have an output."""
        return replace(self, index=index, known=[])

    @cached_property
    def grouped(self) -> tuple[tuple[Group, ...], torch.Tensor | None]:
        """The groups, and where each wanted token stands when they follow one another; None when in its place."""
        device = self.positions.device
        index = np.arange(len(self.positions)) if self.index is None else self.index
        number = np.full(len(self.positions), -1)  # of each token among those that ask; -1 where it does not
        number[index] = np.arange(len(index))
        asks = [number[places[old:]] >= 0 for places, old in zip(self.tokens, self.inherited, strict=True)]
        counts = np.array([np.count_nonzero(row) for row in asks], np.int64)
        at_most = MAX_GROUPS if self.inherited.any() else 1
        bucket = -(-counts * at_most // max(1, counts.max(initial=0)))  # 0 when nobody asks, then by how many do
        head = np.arange(self.prompt_length if self.has_prompt else 0)
        members = [(0, [head], np.zeros(1, np.int64))] if (number[head] >= 0).any() else []
        for start, number_of in sorted(set(zip(self.starts.tolist(), bucket.tolist(), strict=True))):
            rows = np.flatnonzero((self.starts == start) & (bucket == number_of))
            if number_of:
                members.append((start, [self.tokens[row] for row in rows], self.inherited[rows]))
        made = [_group(*rows, number, device) for rows in members]
        order = np.argsort(np.concatenate([np.empty(0, np.int64), *(numbers for _, numbers in made)]))
        in_place = (order == np.arange(len(order))).all()
        return tuple(group for group, _ in made), None if in_place else to_tensor(order, device)


def lay_out(
    prompt_length: int,
    starts: np.ndarray,
    lengths: np.ndarray,
    device: torch.device,
    *,
    has_prompt: bool = True,
    inherited: np.ndarray | None = None,
    memory: dict[torch.nn.Module, KeysAndValues] | None = None,
) -> Layout:
    """The layout of a batch. `starts` [n] is `prompt_length` for rows that share the prompt, else 0.

    `inherited` [n] own tokens of each row are those of the row before it and stand only once in the
    sequence.
    """
    head = prompt_length if has_prompt else 0
    inherited = np.zeros_like(lengths) if inherited is None else inherited
    new = lengths - inherited
    offsets = head + np.cumsum(new) - new
    positions = [np.arange(head)]
    tokens: list[np.ndarray] = []
    for start, offset, count, old in zip(starts, offsets, new, inherited, strict=True):
        positions.append(start + old + np.arange(count))
        tokens.append(np.concatenate([tokens[-1][:old] if old else offsets[:0], offset + np.arange(count)]))
    position = to_tensor(np.concatenate(positions), device)
    return Layout(prompt_length, has_prompt, starts, offsets, lengths, inherited, tuple(tokens), position, memory)


def _group(
    start: int, tokens: Sequence[np.ndarray], inherited: np.ndarray, number: np.ndarray, device: torch.device
) -> tuple[Group, np.ndarray]:
    """A group, and the numbers of the tokens that ask, in the order of its outputs.

    Each row has columns for its own tokens. Those that ask are
    - all, in order, without a prompt where more than half would ask, and where few would need masks above MAX_MASK: one
      mask for all rows, or none where there is neither prompt nor window;
    - few, and the same in each row: one mask for all rows;
    - few, others in each row: a mask for each row.
    """
    lengths = np.array([len(row) for row in tokens])
    column = np.arange(lengths.max())
    keys = np.stack([row[np.minimum(column, len(row) - 1)] for row in tokens])
    wanted = (column >= inherited[:, None]) & (column < lengths[:, None]) & (number[keys] >= 0)
    most = wanted.sum(1).max()
    few = np.argsort(~wanted, axis=1, kind="stable")[:, :most]
    # without a prompt, plain causal attention of all tokens needs no mask
    fewer = (start or 2 * most <= len(column)) and few.size * (start + len(column)) <= MAX_MASK
    columns = few if fewer else np.broadcast_to(column, keys.shape)
    queries = number[np.take_along_axis(keys, columns, 1)]
    scatter = np.flatnonzero(np.take_along_axis(wanted, columns, 1))
    alike = (columns == columns[0]).all()
    whole = alike and columns.shape == keys.shape
    asks = None if whole else to_tensor(columns[:1] if alike else columns, device)
    group = Group(start, to_tensor(keys, device), to_tensor(queries.clip(0), device), asks, to_tensor(scatter, device))
    return group, queries.ravel()[scatter]


def to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
