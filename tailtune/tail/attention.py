"""Causal attention over a packed layout, in place of a model's own.

Matrix products of the linear layers run on the packed sequence. For attention alone, each row's
queries are gathered and attend to [prompt | row]: exact, because causal attention never lets the
prompt see a row, nor one row another. Registered as one of Transformers' attention functions, so that
every architecture that uses them is served, with its own scaling, window and grouped heads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from tailtune.tail.layout import Group, Layout

NAME = "tailtune"


@dataclass
class Queries:
    """A layer that runs twice: for the keys and values of all tokens, then for some tokens alone."""

    index: torch.Tensor
    """[K] places in the packed sequence of the tokens whose output is wanted."""
    keys: tuple[torch.Tensor, torch.Tensor] | None = None
    """Keys and values of the whole sequence, once they are known."""


class KeysKnown(Exception):
    """Ends the first of the two runs."""


_layout: ContextVar[Layout] = ContextVar("layout")
queries: ContextVar[Queries | None] = ContextVar("queries", default=None)


class CannotSplit(Exception):
    """A model that cannot be trained by its tail alone; the message is the reason."""


@contextmanager
def packed_attention(model: PreTrainedModel, layout: Layout) -> Iterator[None]:
    """Within the block, the model's attention is that of packed rows in this layout."""
    token, before = _layout.set(layout), model.config._attn_implementation
    model.config._attn_implementation = NAME  # read by every layer in every forward
    try:
        yield
    finally:
        model.config._attn_implementation = before
        _layout.reset(token)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed sequence. Query [1, heads, T, size], key and value [1, key heads, T, size].

    Returns [1, T, heads, size]. Raises CannotSplit for what this function does not compute.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise CannotSplit(f"its attention uses {name}")
    if dropout or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise CannotSplit("its attention is not causal" if not dropout else "its attention has dropout")
    layout, some = _layout.get(), queries.get()
    if some is not None:
        if some.keys is None:
            some.keys = key, value
            raise KeysKnown
        key, value = some.keys
        query = query.new_zeros(*query.shape[:2], key.shape[2], query.shape[3]).index_copy(2, some.index, query)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    size = layout.prompt_length
    outputs = []
    if layout.has_prompt and size:
        prompt = key[:, :, :size], value[:, :, :size]
        if layout.memory is not None:
            layout.memory[module] = prompt
        outputs.append(_attend(query[:, :, :size], *prompt, 0, scaling, sliding_window)[0].transpose(0, 1))
    elif size:
        assert layout.memory is not None
        prompt = layout.memory[module]
    for group in layout.groups:
        q, k, v = (_gather(x[0].transpose(0, 1), group).transpose(1, 2) for x in (query, key, value))
        if group.shares:
            k, v = (torch.cat([p.expand(len(x), -1, -1, -1), x], 2) for p, x in zip(prompt, (k, v), strict=True))
        out = _attend(q, k, v, size if group.shares else 0, scaling, sliding_window).transpose(1, 2)
        outputs.append(out.flatten(0, 1).index_select(0, group.scatter))
    packed = torch.cat(outputs)
    if layout.order is not None:
        packed = packed.index_select(0, layout.order)
    return (packed if some is None else packed.index_select(0, some.index))[None], None


def _gather(packed: torch.Tensor, group: Group) -> torch.Tensor:
    """[T, heads, size] → [n, width, heads, size]."""
    return packed.index_select(0, group.gather.flatten()).unflatten(0, group.gather.shape)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offset: int, scaling: float, window: int | None
) -> torch.Tensor:
    """Causal attention of [n, heads, w, size] to [n, key heads, offset + w, size]; query i stands at offset + i.

    Heads that share a key are folded into the query's length, so that keys need not be repeated.
    """
    n, heads, width, size = query.shape
    shared_by = heads // key.shape[1]
    if offset == 0 and window is None:  # plain causal attention, without a mask in memory
        key, value = (x.repeat_interleave(shared_by, 1) for x in (key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    where = offset + torch.arange(width, device=query.device)[:, None]
    distance = where - torch.arange(key.shape[2], device=query.device)
    allowed = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    folded = query.reshape(n, key.shape[1], shared_by * width, size)
    mask = allowed.repeat(shared_by, 1)
    return scaled_dot_product_attention(folded, key, value, mask, scale=scaling).reshape(n, heads, width, -1)


AttentionInterface.register(NAME, attend)
