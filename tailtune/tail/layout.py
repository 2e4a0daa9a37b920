"""How rows lie in one packed sequence: the shared prompt first, then each row's own tokens, no pads.

    prompt of P tokens | own tokens of row 0 | own tokens of row 1 | …

A token has the position that it has in its whole row, so rotary embeddings do not notice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True)
class Group:
    """Rows that attend alike: their own tokens, padded for attention alone, on top of the prompt or not."""

    shares: bool
    gather: torch.Tensor
    """[n, width] places in the packed sequence; the row's last token again where the row is shorter."""
    scatter: torch.Tensor
    """[tokens of the group] places in [n * width] of the group's tokens."""


@dataclass(frozen=True)
class Layout:
    prompt_length: int
    """Tokens of the shared prompt, P."""
    has_prompt: bool
    """Whether the prompt's tokens stand at the head of the sequence; else its keys come from `memory`."""
    offsets: np.ndarray
    """[n] place of each row's first own token."""
    lengths: np.ndarray
    """[n] own tokens of each row."""
    tokens: torch.Tensor | None
    """[own tokens] the places of all rows' own tokens, where rows inherit some; else they follow one another."""
    positions: torch.Tensor
    """[T] position of each token in its row."""
    groups: tuple[Group, ...]
    order: torch.Tensor | None
    """[T] where each token stands when prompt and groups follow one another; None when it is there already."""
    memory: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] | None = field(default=None, repr=False)
    """Keys and values of the prompt per attention module: written by a layout of the prompt alone, then read."""


def lay_out(
    prompt_length: int,
    starts: np.ndarray,
    lengths: np.ndarray,
    device: torch.device,
    *,
    has_prompt: bool = True,
    inherited: np.ndarray | None = None,
    memory: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] | None = None,
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
    tokens: list[np.ndarray] = []  # of each row, the places of its own tokens
    for start, offset, count, old in zip(starts, offsets, new, inherited, strict=True):
        positions.append(start + old + np.arange(count))
        tokens.append(np.concatenate([tokens[-1][:old] if old else offsets[:0], offset + np.arange(count)]))
    groups, places = [], [np.arange(head)]
    for shares in (True, False):
        rows = np.flatnonzero((starts > 0) == shares)
        if len(rows):
            gather, scatter = _group([tokens[row] for row in rows], inherited[rows])
            places.append(gather.ravel()[scatter])
            groups.append(Group(shares, _tensor(gather, device), _tensor(scatter, device)))
    order = np.argsort(np.concatenate(places)) if len(groups) > 1 else None
    return Layout(
        prompt_length=prompt_length,
        has_prompt=has_prompt,
        offsets=offsets,
        lengths=lengths,
        tokens=_tensor(np.concatenate(tokens), device) if inherited.any() else None,
        positions=_tensor(np.concatenate(positions), device),
        groups=tuple(groups),
        order=None if order is None else _tensor(order, device),
        memory=memory,
    )


def _group(tokens: list[np.ndarray], inherited: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in tokens])
    column = np.arange(lengths.max())
    gather = np.stack([row[np.minimum(column, len(row) - 1)] for row in tokens])
    new = (column >= inherited[:, None]) & (column < lengths[:, None])
    return gather, np.flatnonzero(new)


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device, non_blocking=True)


def own_tokens(rows: Sequence[np.ndarray], prompt: np.ndarray, layout: Layout, device: torch.device) -> torch.Tensor:
    """[1, T] token ids of a layout."""
    return _tensor(np.concatenate([prompt if layout.has_prompt else prompt[:0], *rows]), device)[None]
