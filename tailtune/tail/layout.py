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
    places: torch.Tensor
    """[tokens of the group] their places in the packed sequence."""
    fill: torch.Tensor
    """[n * width] places in [tokens of the group], or that number itself at a pad."""


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
    memory: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> Layout:
    """The layout of a batch. `starts` [n] is `prompt_length` for rows that share the prompt, else 0."""
    head = prompt_length if has_prompt else 0
    offsets = head + np.cumsum(lengths) - lengths
    positions = [np.arange(head), *(start + np.arange(n) for start, n in zip(starts, lengths, strict=True))]
    groups, places = [], [np.arange(head)]
    for shares in (True, False):
        rows = np.flatnonzero((starts > 0) == shares)
        if len(rows):
            arrays = _group(offsets[rows], lengths[rows])
            places.append(arrays[2])
            groups.append(Group(shares, *(_tensor(array, device) for array in arrays)))
    order = np.argsort(np.concatenate(places)) if len(groups) > 1 else None
    return Layout(prompt_length, has_prompt, offsets, lengths, _tensor(np.concatenate(positions), device),
                  tuple(groups), None if order is None else _tensor(order, device), memory)  # fmt: skip


def _group(offsets: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    column = np.arange(lengths.max())
    valid = column < lengths[:, None]
    gather = offsets[:, None] + np.minimum(column, lengths[:, None] - 1)
    scatter = np.flatnonzero(valid)
    fill = np.where(valid.ravel(), np.cumsum(valid.ravel()) - 1, len(scatter))
    return gather, scatter, gather[valid], fill


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device, non_blocking=True)


def own_tokens(rows: Sequence[np.ndarray], prompt: np.ndarray, layout: Layout, device: torch.device) -> torch.Tensor:
    """[1, T] token ids of a layout."""
    return _tensor(np.concatenate([prompt if layout.has_prompt else prompt[:0], *rows]), device)[None]
