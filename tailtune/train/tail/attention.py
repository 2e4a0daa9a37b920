"""Causal attention over a packed layout, in place of a model's own.

Matrix products of the linear layers run on the packed sequence. For attention alone, the wanted queries
of each row are gathered and attend to [prompt | row]: exact, because causal attention never lets the
prompt see a row, nor one row another. Registered as one of Transformers' attention functions, so that
every architecture that uses them is served, with its own scaling, window and grouped heads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from tailtune.train.tail.layout import Group, Layout

NAME = "tailtune"


class KeysKnown(Exception):
    """Ends a layer of a narrowed layout behind its keys and values; it then runs again for the wanted tokens."""


_layout: ContextVar[Layout] = ContextVar("layout")


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

    Returns [1, T, heads, size]. With the layout's `index`, query and result are those of its K tokens.
    Raises CannotSplit for what this function does not compute.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise CannotSplit(f"its attention uses {name}")
    if attention_mask is not None:
        raise CannotSplit("it makes a mask of its own")
    if dropout or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise CannotSplit("its attention is not causal" if not dropout else "its attention has dropout")
    layout = _layout.get()
    if layout.index is not None:
        if not layout.known:
            layout.known.append((key, value))
            raise KeysKnown
        key, value = layout.known[0]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    size = layout.prompt_length
    prompt = key[:, :, :size], value[:, :, :size]
    if layout.memory is not None and size:
        if layout.has_prompt:
            layout.memory[module] = prompt
        prompt = layout.memory[module]
    groups, order = layout.grouped
    outputs = []
    for group in groups:
        q, k, v = (_gather(x, places) for x, places in ((query, group.queries), (key, group.keys), (value, group.keys)))
        if group.start:
            k, v = (torch.cat([p.expand(len(x), -1, -1, -1), x], 2) for p, x in zip(prompt, (k, v), strict=True))
        out = _attend(q, k, v, group, scaling, sliding_window).transpose(1, 2)
        outputs.append(out.flatten(0, 1).index_select(0, group.scatter))
    packed = torch.cat(outputs)
    return (packed if order is None else packed.index_select(0, order))[None], None


def _gather(packed: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, size] → [n, heads, width, size] of `places` [n, width]."""
    return packed[0].transpose(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Group, scaling: float, window: int | None
) -> torch.Tensor:
    """Causal attention of [n, heads, q, size] to [n, key heads, start + width, size].

    Heads that share a key are folded into the query's length, so that keys need not be repeated.
    """
    n, heads, width, size = query.shape
    shared_by = heads // key.shape[1]
    if not group.start and group.columns is None and window is None:  # plain causal attention, no mask in memory
        key, value = (x.repeat_interleave(shared_by, 1) for x in (key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    folded = query.reshape(n, key.shape[1], shared_by * width, size)
    mask = group.mask(window, shared_by, value.dtype)
    return scaled_dot_product_attention(folded, key, value, mask, scale=scaling).reshape(n, heads, width, -1)


AttentionInterface.register(NAME, attend)
