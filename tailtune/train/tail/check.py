"""When the tail cannot be trained alone: what is known to break it, and a comparison that finds the rest."""

import numpy as np
import torch
from transformers import PreTrainedModel
from trl import SFTTrainer

from tailtune.train.tail.attention import CannotSplit
from tailtune.train.tail.module import Tail

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest relative difference of logits (root mean square) by precision; 0.05 in half precision.

Right splits differ by 1e-6 in fp32; the errors without a sound that the tests inject give more than 0.1.
"""
NUM_POSITIONS = 32
RANDOM = ("dropout", "pdrop", "layerdrop", "jitter_noise")
"""How settings end that make a row's states differ every time."""
UNKNOWN_ARGUMENTS = ("neftune_noise_alpha", "label_smoothing_factor", "use_liger_kernel", "torch_compile", "deepspeed",
                     "fsdp", "bf16_full_eval", "fp16_full_eval")  # fmt: skip
"""Arguments that change states or loss in ways that the tail does not compute."""


def refuse_model(model: PreTrainedModel) -> None:
    """Raise CannotSplit, with the reason, for a model whose frozen layers do not always compute the same."""
    config = model.config.get_text_config()
    if config.is_encoder_decoder:
        raise CannotSplit("it has an encoder")
    if not getattr(model, "_supports_attention_backend", False):
        raise CannotSplit(f"the attention of {type(model).__name__} cannot be replaced")
    for name, value in config.to_dict().items():
        if value and name.endswith(RANDOM) and not name.startswith("classifier"):
            raise CannotSplit(f"{name} is {value}, so a row's states differ every time")
    if module := next((name for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p), None):
        raise CannotSplit(f"{module} drops states at random")
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if (kind := entry.get("rope_type")) in ("dynamic", "longrope"):
            raise CannotSplit(f"its rotary embedding of type {kind} depends on the length of the whole batch")
    for kind in getattr(config, "layer_types", None) or []:
        if kind not in ("full_attention", "sliding_attention"):
            raise CannotSplit(f"it has layers of type {kind}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise CannotSplit("its layers share keys and values")


def refuse_arguments(plain: SFTTrainer) -> None:
    """Raise CannotSplit for arguments of SFTConfig that change rows, states or loss in a way not computed here."""
    args = plain.args
    if plain.aux_loss_enabled:
        raise CannotSplit("its mixture of experts adds a loss of the frozen layers")
    if args.accelerator_config.dispatch_batches:
        raise CannotSplit("trainer.accelerator_config.dispatch_batches cuts batches where rows have no border")
    if args.packing or args.padding_free:
        raise CannotSplit("trainer.packing or padding_free makes one row of several; the tail packs by itself")
    for name in UNKNOWN_ARGUMENTS:
        if getattr(args, name, None):
            raise CannotSplit(f"trainer.{name} is set")
    if args.loss_type != "nll":
        raise CannotSplit(f"trainer.loss_type is {args.loss_type}")


@torch.no_grad()
def logit_difference(tail: Tail) -> float:
    """Relative root-mean-square difference of tail and whole model in the logits of two to six rows.

    Two rows that begin most alike, the longest and the shortest that share the prompt, and of those
    that do not: so windows, positions, neighbours and all kinds of rows are met.
    """
    prefix, rows, split = tail.prefix, tail.rows, tail.split
    order = np.argsort(rows.lengths, kind="stable")
    sharing, alone = order[rows.shares[order]], order[~rows.shares[order]]
    family = rows.families
    alike = int(rows.inherited(family.tolist()).argmax())
    pair = family[max(alike - 1, 0) : alike + 1]
    chosen = list(dict.fromkeys(map(int, (*pair, *sharing[-1:], *sharing[:1], *alone[-1:], *alone[:1]))))
    layout = prefix.layout(chosen)
    counts = np.minimum(layout.lengths, NUM_POSITIONS)
    ends = layout.offsets + layout.lengths
    places = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)])
    hidden = split.trained(prefix.states(chosen, layout), layout, places)
    squares = [0.0, 0.0]
    for row, states in zip(chosen, hidden.split(counts.tolist()), strict=True):
        ids = torch.from_numpy(rows.ids[row])[None].to(prefix.device)
        whole = (
            split.model(input_ids=ids, use_cache=False, logits_to_keep=len(states)).logits[0, -len(states) :].float()
        )
        logits = split.head(states).float()
        if split.softcap:
            logits = split.softcap * (logits / split.softcap).tanh()
        squares[0] += (logits - whole).square().sum().item()
        squares[1] += whole.square().sum().item()
    return float(np.sqrt(squares[0] / max(squares[1], 1e-30)))


def check_difference(tail: Tail, dtype: torch.dtype) -> None:
    """Raise CannotSplit when the tail does not compute what the whole model does."""
    difference = logit_difference(tail)
    if not difference <= TOLERANCE.get(dtype, 0.05):
        raise CannotSplit(f"its tail and the whole model differ by {difference:.1e} in their logits")
