"""The model as it trains: head untied, everything below the last layers frozen, master weights in fp32."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailtune.errors import UserError, one_line
from tailtune.recipe.schema import LastLayers
from tailtune.train.hardware import HardwarePlan


@contextmanager
def explain_unreadable(directory: Path) -> Iterator[None]:
    """Raise UserError when a model or tokenizer that is loaded in this block is not in `directory`."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"no model can be loaded from {directory}: {one_line(error)}",
            "give the directory of a Transformers model with its tokenizer",
        ) from None


def load_causal_lm(directory: Path, **options: Any) -> PreTrainedModel:
    """A causal language model from a local directory, with `from_pretrained`'s options. Raises UserError."""
    with explain_unreadable(directory):
        return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, **options)


def load_model(directory: Path, choice: HardwarePlan) -> PreTrainedModel:
    """The base model in the compute precision. Raises UserError when the directory holds none."""
    model = load_causal_lm(directory, dtype=choice.dtype, attn_implementation=choice.attention)
    generation = model.generation_config
    if generation is not None and not generation.do_sample:
        # settings of sampling without sampling: saving a checkpoint would refuse them
        generation.temperature = generation.top_p = generation.top_k = None
    return model


def select_trainable(model: PreTrainedModel, train_weights: LastLayers | Literal["all"]) -> None:
    """Make the chosen weights trainable and freeze the others, in place.

    Trainable parameters become fp32: in bf16 an update below 1/256 of a weight is lost. Frozen ones keep the compute
    precision. `all` includes embeddings and norms, and leaves a tied head tied. Raises UserError when the model has
    fewer layers than `last_layers`.
    """
    if train_weights == "all":
        model.requires_grad_(True)
    else:
        layers, wanted = decoder_layers(model), train_weights.last_layers
        if wanted > len(layers):
            raise UserError(
                f"train_weights.last_layers is {wanted}, but the model has {len(layers)} layers", "lower it"
            )
        model.requires_grad_(False)
        if train_weights.head:
            untie_head(model)
            model.get_output_embeddings().requires_grad_(True)
        for layer in layers[len(layers) - wanted :]:
            layer.requires_grad_(True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def untie_head(model: PreTrainedModel) -> None:
    """Give the output head weights of its own.

    With a tied head, autograd walks through every frozen layer to reach the input embedding. Both
    halves are needed: the flag alone saves no head, the copy alone is tied again on loading.
    """
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of layers, whatever the architecture calls it."""
    for module in model.base_model.children():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return module
    raise UserError(f"{type(model).__name__} keeps its layers in no module list; tailtune cannot find the last ones")


def export_model(model: PreTrainedModel, directory: Path, dtype: torch.dtype) -> None:
    """Save an ordinary Transformers model in one precision, loadable by `AutoModelForCausalLM`."""
    state = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()
    }
    model.config.dtype = dtype
    model.save_pretrained(directory, state_dict=state)
