"""Which weights of a model train, in which precision, and how they are saved."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer
from transformers.utils.logging import set_tqdm_hook

from tailtune.errors import UserError, one_line
from tailtune.progress import track
from tailtune.recipe.schema import TrainWeights
from tailtune.train.faults import is_of_machine
from tailtune.train.hardware import HardwarePlan

OWN_FILES_ONLY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of `from_pretrained`: it downloads nothing, and neither runs nor offers to run a model directory's code."""


@contextmanager
def explain_unreadable(directory: Path) -> Iterator[None]:
    """Raise UserError when a model or tokenizer cannot be loaded in this block: Transformers raises any exception."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_of_machine(error):
            raise
        raise UserError(
            f"no model can be loaded from {directory}: {type(error).__name__}: {one_line(error)}",
            "give the directory of a Transformers model with its tokenizer",
        ) from None


def load_causal_lm(directory: Path, **options: Any) -> PreTrainedModel:
    """Load a causal language model from a directory's safetensors. `options` are those of `from_pretrained`.

    Raises UserError, also for weights that are missing or of another shape, which Transformers would replace by random
    ones.
    """
    options |= OWN_FILES_ONLY | {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with explain_unreadable(directory), _loading(directory):
        model, found = AutoModelForCausalLM.from_pretrained(directory, **options)
    other_shape = [name for name, *_ in found["mismatched_keys"]]
    # buffers may be missing: the model computes them
    missing = set(found["missing_keys"]) & {name for name, _ in model.named_parameters()}
    for names, problem in ((missing, "are missing"), (other_shape, "have another shape than in config.json")):
        if names:
            raise UserError(
                f"{directory}: {len(names)} of the model's weights {problem}, for example {min(names)}",
                "give a complete causal language model",
            )
    return model


def refuse_unknown_tokens(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """Raise UserError for a token id that has no embedding: on a GPU, it would end in a CUDA error."""
    highest, rows = max(ids), len(model.get_input_embeddings().weight)
    if highest >= rows:
        raise UserError(
            f"the tokenizer makes a token {highest}, but the model has embeddings for {rows} tokens only",
            "give a model with the tokenizer that belongs to it",
        )


@contextmanager
def _loading(directory: Path) -> Iterator[None]:
    """Show the progress of a model that Transformers loads in this block."""

    def replace_bar(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") != "Loading weights":
            return factory(*args, **options)
        return track(args[0], f"model: loading {directory.name}, tensor", "tensors")

    previous = set_tqdm_hook(replace_bar)
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def load_model(directory: Path, plan: HardwarePlan, train_weights: TrainWeights) -> PreTrainedModel:
    """Load the base model for training: in the compute precision, or in fp32 when all weights train.

    Raises UserError when the directory holds none.
    """
    dtype = torch.float32 if train_weights == "all" else plan.dtype
    model = load_causal_lm(directory, dtype=dtype, attn_implementation=plan.attention)
    generation = model.generation_config
    if generation is not None and not generation.do_sample:
        # drop sampling settings when do_sample is off: save_pretrained would reject them
        generation.temperature = generation.top_p = generation.top_k = None
    return model


def select_trainable(model: PreTrainedModel, train_weights: TrainWeights) -> None:
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

    With a tied head, autograd walks through every frozen layer to reach the input embedding. Both steps are needed:
    with only the flag, no head is saved; with only the copy, the head is tied again on loading.
    """
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder's list of layers, whatever the architecture calls it."""
    for module in model.base_model.children():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return module
    raise UserError(
        f"{type(model).__name__} does not keep its layers in a module list, so the last ones cannot be found",
        "use train_weights: all",
    )


def whole_state_dict(model: PreTrainedModel, trainer: Trainer) -> dict[str, Any]:
    """Return the model's state dict with every weight in full; with FSDP it is empty on all ranks but 0.

    All ranks have to call it: with FSDP, each rank holds a part of every weight, and gathering them is a collective.
    """
    if not trainer.is_fsdp_enabled:
        return dict(model.state_dict())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(trainer.model_wrapped, options=options)


def save_model(model: PreTrainedModel, state_dict: dict[str, Any], directory: Path, dtype: torch.dtype) -> None:
    """Save an ordinary Transformers model in one precision, loadable by `AutoModelForCausalLM`."""
    converted = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state_dict.items()
    }
    model.config.dtype = dtype
    model.save_pretrained(directory, state_dict=converted)
