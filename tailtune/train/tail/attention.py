"""Causal attention over a packed layout, which replaces the model's own attention function.

Linear layers run on the packed sequence. For attention, the queries of each row are gathered and attend to
[shared prefix | own tokens]. The result is exact, because causal attention never lets the shared prefix see a row, and
rows are separate sequences. The function is registered with Transformers' `AttentionInterface`. It therefore works for
every architecture that uses the interface, with that architecture's scaling, sliding window and grouped heads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from tailtune.train.tail.layout import Group, KeysAndValues, Layout

NAME = "tailtune"
"""Name of the attention function in Transformers' registry."""
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")


class KeysReady(Exception):
    """Stops a layer once its keys and values are computed; it then runs again for the selected queries only."""


_layout: ContextVar[Layout] = ContextVar("layout")


class CannotSplit(Exception):
    """The model's tail cannot be trained separately; the message is the reason."""


@contextmanager
def packed_attention(model: PreTrainedModel, layout: Layout) -> Iterator[None]:
    """Replace the model's attention by attention over `layout` within the block."""
    token, implementation = _layout.set(layout), model.config._attn_implementation
    model.config._attn_implementation = NAME  # read by every layer in every forward
    try:
        yield
    finally:
        model.config._attn_implementation = implementation
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
    """Compute the attention of a packed sequence, with the signature that Transformers expects.

    `query` is [1, heads, T, size], `key` and `value` are [1, key heads, T, size], the result is [1, T, heads, size].
    In a layout with a `query_index`, `query` and the result have its K tokens instead of T. Raises CannotSplit for
    features that are not implemented here.
    """
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise CannotSplit(f"its attention uses {name}")
    if attention_mask is not None:
        raise CannotSplit("it builds an attention mask of its own")
    if dropout:
        raise CannotSplit("its attention has dropout")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise CannotSplit("its attention is not causal")
    layout = _layout.get()
    if layout.query_index is not None:
        if not layout.all_keys_and_values:
            layout.all_keys_and_values.append((key, value))
            raise KeysReady
        key, value = layout.all_keys_and_values[0]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    prefix = _prefix_keys_and_values(layout, module, key, value)
    groups, order = layout.grouped
    outputs = []
    for group in groups:
        q = _gather(query, group.queries)
        k, v = _gather(key, group.keys), _gather(value, group.keys)
        if group.prefix_length:
            k, v = (torch.cat([p.expand(len(x), -1, -1, -1), x], 2) for p, x in zip(prefix, (k, v), strict=True))
        output = _attend(q, k, v, group, scaling, sliding_window).transpose(1, 2)
        outputs.append(output.flatten(0, 1).index_select(0, group.slots))
    packed = torch.cat(outputs)
    return (packed if order is None else packed.index_select(0, order))[None], None


def _prefix_keys_and_values(
    layout: Layout, module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor
) -> KeysAndValues:
    """Keys and values of the shared prefix, each [1, key heads, P, size]: from the sequence or from the memory."""
    size = layout.prefix_length
    prefix = key[:, :, :size], value[:, :, :size]
    if layout.prefix_memory is None or size == 0:
        return prefix
    if layout.includes_prefix:
        layout.prefix_memory[module] = prefix
    return layout.prefix_memory[module]


def _gather(packed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select the tokens at `index` [n, width] from [1, heads, T, size]. Returns [n, heads, width, size]."""
    return packed[0].transpose(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Group, scaling: float, window: int | None
) -> torch.Tensor:
    """Compute causal attention of queries [n, heads, q, size] to keys [n, key heads, prefix_length + width, size].

    Heads that share a key are folded into the length of the query, so that keys are not repeated in memory.
    """
    n, heads, width, size = query.shape
    heads_per_key = heads // key.shape[1]
    if not group.prefix_length and group.columns is None and window is None:  # plain causal attention needs no mask
        key, value = (x.repeat_interleave(heads_per_key, 1) for x in (key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    folded = query.reshape(n, key.shape[1], heads_per_key * width, size)
    mask = group.mask(window, heads_per_key, value.dtype)
    return scaled_dot_product_attention(folded, key, value, mask, scale=scaling).reshape(n, heads, width, -1)


AttentionInterface.register(NAME, attend)
