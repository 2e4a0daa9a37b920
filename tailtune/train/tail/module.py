"""The module that Trainer trains: the last layers and the head, from row indices to a loss."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tailtune.errors import UserError
from tailtune.train.tail.cache import FrozenLayers, HiddenStateCache
from tailtune.train.tail.layout import to_tensor
from tailtune.train.tail.loss import head_loss
from tailtune.train.tail.savings import ALL_SAVINGS, Savings
from tailtune.train.tail.tokenized_rows import Targets
from tailtune.train.weights import untie_head


class Tail(nn.Module):
    """The trainable end of a decoder. Its forward takes row indices and returns a loss.

    Its state dict holds the trainable parameters only, under their names in the whole model. It can be loaded back, or
    copied into the base model (`graft`).
    """

    accepts_loss_kwargs = True  # Trainer then passes the number of labels in the step

    def __init__(self, frozen_layers: FrozenLayers, savings: Savings = ALL_SAVINGS) -> None:
        super().__init__()
        self.frozen_layers, self.savings = frozen_layers, savings
        self.decoder, self.rows = frozen_layers.decoder, frozen_layers.rows
        self.tail = self.decoder.tail
        self.source: FrozenLayers | HiddenStateCache = frozen_layers
        """Where the hidden states of a batch come from."""

    def forward(
        self, row_indices: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the loss, the number of labels and the number of correct predictions of the rows [n].

        The loss is the mean over the labels, or the sum over the labels divided by `num_items_in_batch`.
        """
        indices, device = row_indices.tolist(), self.frozen_layers.device
        layout = self.frozen_layers.layout(indices, padded=not self.savings.packing)
        hidden = self.source.hidden_states(indices, layout)
        targets = self.rows.targets(indices, layout.offsets)
        num_labels = targets.weight.sum()
        targets = self._with_unlabelled(targets, len(hidden))
        query_index, query_of_target = np.unique(targets.index, return_inverse=True)
        hidden = self.decoder.run_tail(hidden, layout, None if len(query_index) == len(hidden) else query_index)
        if (query_of_target != np.arange(len(query_of_target))).any():
            hidden = hidden.index_select(0, to_tensor(query_of_target, device))
        weights = None if (targets.weight == 1).all() else to_tensor(targets.weight, device)
        tokens = to_tensor(targets.token, device)
        loss, num_correct = head_loss(hidden, self.decoder.head, tokens, weights, self.decoder.softcap)
        divisor = torch.as_tensor(num_labels if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
        return {"loss": loss / divisor.to(loss), "num_correct": num_correct, "num_labels": torch.tensor(num_labels)}

    def _with_unlabelled(self, targets: Targets, num_tokens: int) -> Targets:
        """Add predictions of weight 0 where needed.

        Without the optimisation `answer_head` these are all tokens without a label. With it, a batch without labels
        gets one, so that every parameter gets a gradient: DDP waits for it where other ranks have labels.
        """
        if self.savings.answer_head:
            index = np.arange(int(not len(targets.index)))
        else:
            index = np.setdiff1d(np.arange(num_tokens), targets.index)
        return Targets(
            np.concatenate([targets.index, index]),
            np.concatenate([targets.token, np.zeros_like(index)]),
            np.concatenate([targets.weight, np.zeros(len(index))]),
        )

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by their names in the whole model."""
        return {name: p for name, p in self.decoder.model.named_parameters() if p.requires_grad}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {name: p.detach() for name, p in self.trainable().items()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if missing := self.trainable().keys() - state_dict.keys():
            raise UserError(f"the checkpoint lacks {min(missing)}", "train again from the start")
        graft(self.decoder.model, state_dict)
        return nn.modules.module._IncompatibleKeys([], [])


@torch.no_grad()
def graft(model: PreTrainedModel, trained: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors of a checkpoint into the model's parameters of the same names, in place.

    A head that is tied to the embedding is untied first if the checkpoint has weights for it. Raises UserError when
    there are no tensors, or one does not fit.
    """
    if not trained:
        raise UserError("there are no tensors to put into the model", "load the checkpoint's model.safetensors")
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    if f"{head}.weight" in trained:
        untie_head(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in trained.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise UserError(
                f"{name} {tuple(tensor.shape)} does not fit into {type(model).__name__}",
                "use the base model that the checkpoint was trained from",
            )
        parameters[name].copy_(tensor)
