"""A decoder split at its first trainable layer.

The model keeps its configuration, its layers and their indices. To run the frozen layers, a forward pass is stopped
after the last one of them. To run the tail, every frozen layer returns the given hidden states instead of computing its
own. This works for every architecture that keeps its layers in a list, and the trained model remains an ordinary model.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from tailtune.train.tail.attention import CannotSplit, KeysReady, packed_attention
from tailtune.train.tail.layout import Layout, to_tensor
from tailtune.train.weights import decoder_layers


class _Reached(Exception):
    """Stops the forward pass after the last frozen layer; carries its hidden states."""


class SplitDecoder:
    """Runs the frozen layers or the tail of a model.

    Raises CannotSplit when no layer is frozen, or when parameters outside the last layers and the head train.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = decoder_layers(model)
        self.head = model.get_output_embeddings()
        self.num_frozen = next(
            (i for i, layer in enumerate(self.layers) if any(p.requires_grad for p in layer.parameters())),
            len(self.layers),
        )
        """Number of frozen layers, which is the index of the first trainable one."""
        if self.num_frozen == 0:
            raise CannotSplit("all of its layers train")
        self.tail = nn.ModuleDict({"layers": nn.ModuleList(self.layers[self.num_frozen :]), "head": self.head})
        """Holds all trainable parameters; the modules are the model's own."""
        inside = {id(p) for p in self.tail.parameters()}
        outside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
        if outside:
            raise CannotSplit(f"{outside[0]} trains outside the last layers and the head")
        self.softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        """Bound of the logits, which the model's own forward applies after the head."""
        self.hidden_size: int = model.config.get_text_config().hidden_size
        self._returns_tuple = False

    def run_frozen(self, ids: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return the hidden states [T, H] that enter the first trainable layer, for packed token ids [1, T]."""
        handle = self.layers[self.num_frozen - 1].register_forward_hook(self._stop)
        try:
            with packed_attention(self.model, layout):
                self.model.base_model(input_ids=ids, position_ids=layout.positions[None], use_cache=False)
        except _Reached as reached:
            return reached.args[0][0]
        finally:
            handle.remove()
        raise CannotSplit("its forward does not go through its list of layers")

    def run_tail(self, hidden: torch.Tensor, layout: Layout, query_index: np.ndarray | None = None) -> torch.Tensor:
        """Return the hidden states that enter the head, for those [T, H] that enter the first trainable layer.

        The result is [T, H], or [K, H] for the unique token indices `query_index` [K]. The last layer still computes
        keys and values for every token, but everything else for these K tokens only.
        """
        positions, last = layout.positions, self.layers[-1]
        if query_index is not None and self.num_frozen == len(self.layers):  # no layer needs the other tokens
            index = to_tensor(query_index, hidden.device)
            hidden, positions, query_index = hidden.index_select(0, index), positions.index_select(0, index), None
        frozen_output = (hidden[None],) if self._returns_tuple else hidden[None]
        selective = None if query_index is None else partial(self._run_for_queries, last.forward, layout, query_index)
        with (
            packed_attention(self.model, layout),
            _replaced_forward(self.layers[: self.num_frozen], lambda *args, **kwargs: frozen_output),
            _replaced_forward([last] if selective else [], selective),
        ):
            output = self.model.base_model(inputs_embeds=hidden[None], position_ids=positions[None], use_cache=False)
        return output.last_hidden_state[0]

    def _stop(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._returns_tuple = isinstance(output, tuple)
        raise _Reached(output[0] if self._returns_tuple else output)

    def _run_for_queries(
        self,
        forward: Callable[..., Any],
        layout: Layout,
        query_index: np.ndarray,
        hidden: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the `forward` of a layer so that it returns the hidden states of the queries only.

        The layer runs twice: for all tokens up to its attention function, which keeps keys and values and raises
        KeysReady (`attention.attend`), then to its end for the queries.
        """
        index = to_tensor(query_index, hidden.device)

        def select(argument: Any) -> Any:
            is_per_token = (
                isinstance(argument, torch.Tensor) and argument.ndim > 1 and argument.shape[1] == hidden.shape[1]
            )
            return argument.index_select(1, index) if is_per_token else argument

        with packed_attention(self.model, layout.select_queries(query_index)):
            with suppress(KeysReady):
                forward(hidden, *args, **kwargs)
            selected_args, selected_kwargs = tree_map(select, ((hidden, *args), kwargs))
            return forward(*selected_args, **selected_kwargs)


@contextmanager
def _replaced_forward(layers: Iterable[nn.Module], forward: Any) -> Iterator[None]:
    """Let the layers compute `forward` instead of their own forward within the block."""
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
