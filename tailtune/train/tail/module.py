"""What Trainer trains: the last layers and the head, from row numbers to a loss."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tailtune.errors import UserError
from tailtune.recipe.schema import TailSettings
from tailtune.train.tail.cache import Cache, Prefix
from tailtune.train.tail.decoder import Split
from tailtune.train.tail.layout import to_tensor
from tailtune.train.tail.loss import head_loss
from tailtune.train.tail.tokenized_rows import Rows
from tailtune.train.weights import untie_head


class Tail(nn.Module):
    """The trainable end of a decoder. A forward takes row numbers and returns a loss.

    Its state dict holds the trainable parameters alone, under the whole model's names: it loads on its
    own, and it fits into the base model (`graft`).
    """

    accepts_loss_kwargs = True  # Trainer then hands over the number of labels in the step

    def __init__(self, prefix: Prefix, settings: TailSettings) -> None:
        super().__init__()
        self.tail = prefix.split.tail
        self.prefix, self.settings = prefix, settings
        self.split: Split = prefix.split
        self.rows: Rows = prefix.rows
        self.source: Prefix | Cache = prefix
        """Where a batch's states come from: the frozen layers themselves, or the cache."""

    def forward(
        self, row: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        """Mean loss over the labels (or sum over `num_items_in_batch`), labels, and rightly predicted ones."""
        numbers, device = row.tolist(), self.prefix.device
        layout = self.prefix.layout(numbers, padded=not self.settings.packing)
        states = self.source.states(numbers, layout)
        targets = self.rows.targets(numbers, layout.offsets)
        num_labels = targets.weight.sum()
        index, token, weight = targets.index, targets.token, targets.weight
        if not self.settings.answer_head:  # all places, those without a label with a weight of 0
            rest = np.setdiff1d(np.arange(len(states)), index)
        else:  # one place at least, so that every parameter gets a gradient: other ranks may have labels
            rest = np.arange(int(not len(index)))
        index, token = np.concatenate([index, rest]), np.concatenate([token, np.zeros_like(rest)])
        weight = np.concatenate([weight, np.zeros(len(rest))])
        places, place_of_target = np.unique(index, return_inverse=True)
        hidden = self.split.trained(states, layout, None if len(places) == len(states) else places)
        if (place_of_target != np.arange(len(place_of_target))).any():
            hidden = hidden.index_select(0, to_tensor(place_of_target, device))
        weights = None if (weight == 1).all() else to_tensor(weight, device)
        loss, correct = head_loss(hidden, self.split.head, to_tensor(token, device), weights, self.split.softcap)
        divisor = torch.as_tensor(num_labels if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
        return {"loss": loss / divisor.to(loss), "num_correct": correct, "num_labels": torch.tensor(num_labels)}

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by their names in the whole model."""
        return {name: p for name, p in self.split.model.named_parameters() if p.requires_grad}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {name: p.detach() for name, p in self.trainable().items()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if missing := self.trainable().keys() - state_dict.keys():
            raise UserError(f"the checkpoint lacks {min(missing)}; train again from the start")
        graft(self.split.model, state_dict)
        return nn.modules.module._IncompatibleKeys([], [])


@torch.no_grad()
def graft(model: PreTrainedModel, trained: Mapping[str, torch.Tensor]) -> None:
    """Copy a checkpoint's tensors into the parameters of the same names, in place.

    A head that is tied to the embedding gets weights of its own when the checkpoint has some for it. Raises UserError
    when there are no tensors, or one does not fit.
    """
    if not trained:
        raise UserError("there are no tensors to put into the model; load the checkpoint's model.safetensors")
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    if f"{head}.weight" in trained:
        untie_head(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in trained.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise UserError(f"{name} {tuple(tensor.shape)} does not fit into {type(model).__name__}")
        parameters[name].copy_(tensor)
