"""A decoder cut at its first trainable layer.

The model keeps its configuration, its layers and their indices; nothing is taken out of it. To run the
frozen part, the forward is stopped behind the last frozen layer. To run the tail, every frozen layer
answers with the given states. So it works for every architecture that keeps its layers in a list, and
the model with trained weights is an ordinary one at any time.
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

from tailtune.train.tail.attention import CannotSplit, KeysKnown, packed_attention
from tailtune.train.tail.layout import Layout, to_tensor
from tailtune.train.weights import decoder_layers


class _Reached(Exception):
    """The forward has come to the cut; carries the states."""


class Split:
    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = decoder_layers(model)
        self.head = model.get_output_embeddings()
        self.first = next(
            (i for i, layer in enumerate(self.layers) if any(p.requires_grad for p in layer.parameters())),
            len(self.layers),
        )
        """Index of the first trainable layer."""
        if self.first == 0:
            raise CannotSplit("all of its layers train")
        self.tail = nn.ModuleDict({"layers": nn.ModuleList(self.layers[self.first :]), "head": self.head})
        """Holds every trainable parameter; the modules are the model's own."""
        inside = {id(p) for p in self.tail.parameters()}
        outside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
        if outside:
            raise CannotSplit(f"{outside[0]} trains outside the last layers and the head")
        self.softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        """Bound of the logits, which the model's own forward applies behind the head."""
        self.hidden_size: int = model.config.get_text_config().hidden_size
        self._returns_tuple = False

    def frozen(self, ids: torch.Tensor, layout: Layout) -> torch.Tensor:
        """States [T, H] that enter the first trainable layer, of packed token ids [1, T]."""
        handle = self.layers[self.first - 1].register_forward_hook(self._stop)
        try:
            with packed_attention(self.model, layout):
                self.model.base_model(input_ids=ids, position_ids=layout.positions[None], use_cache=False)
        except _Reached as reached:
            return reached.args[0][0]
        finally:
            handle.remove()
        raise CannotSplit("its forward does not go through its list of layers")

    def trained(self, states: torch.Tensor, layout: Layout, index: np.ndarray | None = None) -> torch.Tensor:
        """States that enter the head, of the states [T, H] that enter the first trainable layer.

        Of all tokens [T, H], or of those at `index` [K], no place twice, alone [K, H]: the last layer then
        computes keys and values for all, everything else for these.
        """
        positions, last = layout.positions, self.layers[-1]
        if index is not None and self.first == len(self.layers):  # no layer left to look at other tokens
            places = to_tensor(index, states.device)
            states, positions, index = states.index_select(0, places), positions.index_select(0, places), None
        answer = (states[None],) if self._returns_tuple else states[None]
        narrow = None if index is None else partial(self._narrow, last.forward, layout.narrowed(index))
        with (
            packed_attention(self.model, layout),
            _computing(self.layers[: self.first], lambda *args, **kwargs: answer),
            _computing([last] if narrow else [], narrow),
        ):
            output = self.model.base_model(inputs_embeds=states[None], position_ids=positions[None], use_cache=False)
        return output.last_hidden_state[0]

    def _stop(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._returns_tuple = isinstance(output, tuple)
        raise _Reached(output[0] if self._returns_tuple else output)

    def _narrow(
        self, whole: Callable[..., Any], layout: Layout, hidden: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """What a layer returns for the layout's wanted tokens alone.

        The layer runs twice: for all tokens up to its attention, which keeps keys and values and raises KeysKnown
        (`attention.attend`), then as a whole for the wanted ones.
        """
        assert layout.index is not None
        index = to_tensor(layout.index, hidden.device)

        def pick(value: Any) -> Any:
            has_tokens = isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == hidden.shape[1]
            return value.index_select(1, index) if has_tokens else value

        with packed_attention(self.model, layout):
            with suppress(KeysKnown):
                whole(hidden, *args, **kwargs)
            some = tree_map(pick, ((hidden, *args), kwargs))
            return whole(*some[0], **some[1])


@contextmanager
def _computing(layers: Iterable[nn.Module], forward: Any) -> Iterator[None]:
    """Within the block, these layers compute `forward` instead of their own."""
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
