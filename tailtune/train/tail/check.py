"""Checks whether the tail can be trained separately: known obstacles, then a comparison with the whole model."""

import numpy as np
import torch
from transformers import PreTrainedModel
from trl import SFTTrainer

from tailtune.train.tail.attention import CannotSplit
from tailtune.train.tail.module import Tail

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest relative difference of the logits (root mean square) by precision; 0.05 in half precision.

A correct split differs by 1e-6 in fp32. The silent errors that the tests inject differ by more than 0.1.
"""
NUM_POSITIONS = 32
"""Positions at the end of each row that are compared."""
RANDOM_SUFFIXES = ("dropout", "pdrop", "layerdrop", "jitter_noise")
"""Endings of the settings that make hidden states random."""
UNSUPPORTED_ARGUMENTS = ("neftune_noise_alpha", "label_smoothing_factor", "use_liger_kernel", "torch_compile",
                         "deepspeed", "fsdp", "bf16_full_eval", "fp16_full_eval")  # fmt: skip
"""Arguments that change the hidden states or the loss in ways that the tail does not implement."""


def refuse_model(model: PreTrainedModel) -> None:
    """Raise CannotSplit, with the reason, for a model whose frozen layers do not always compute the same."""
    config = model.config.get_text_config()
    if config.is_encoder_decoder:
        raise CannotSplit("it has an encoder")
    if not getattr(model, "_supports_attention_backend", False):
        raise CannotSplit(f"the attention of {type(model).__name__} cannot be replaced")
    for name, value in config.to_dict().items():
        if value and name.endswith(RANDOM_SUFFIXES) and not name.startswith("classifier"):
            raise CannotSplit(f"{name} is {value}, so a row's hidden states differ every time")
    if module := next((name for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p), None):
        raise CannotSplit(f"{module} drops hidden states at random")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if (rope_type := parameters.get("rope_type")) in ("dynamic", "longrope"):
            raise CannotSplit(f"its rotary embedding of type {rope_type} depends on the length of the whole batch")
    for layer_type in getattr(config, "layer_types", None) or []:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise CannotSplit(f"it has layers of type {layer_type}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise CannotSplit("its layers share keys and values")


def refuse_arguments(plain: SFTTrainer) -> None:
    """Raise CannotSplit for arguments of SFTConfig whose effect on rows, hidden states or loss is not implemented."""
    args = plain.args
    if plain.aux_loss_enabled:
        raise CannotSplit("its mixture of experts adds a loss of the frozen layers")
    if args.accelerator_config.dispatch_batches:
        raise CannotSplit("trainer.accelerator_config.dispatch_batches splits batches in the middle of rows")
    if args.packing or args.padding_free:
        raise CannotSplit(
            "trainer.packing or padding_free joins several rows into one; tail training packs rows itself"
        )
    for name in UNSUPPORTED_ARGUMENTS:
        if getattr(args, name, None):
            raise CannotSplit(f"trainer.{name} is set")
    if args.loss_type != "nll":
        raise CannotSplit(f"trainer.loss_type is {args.loss_type}")


@torch.no_grad()
def logit_difference(tail: Tail) -> float:
    """Return the relative root-mean-square difference between the logits of the tail and those of the whole model.

    It is computed on two to six rows (`_rows_to_compare`), at up to NUM_POSITIONS positions each.
    """
    frozen_layers, rows, decoder = tail.frozen_layers, tail.rows, tail.decoder
    row_indices = _rows_to_compare(tail)
    layout = frozen_layers.layout(row_indices)
    counts = np.minimum(layout.lengths, NUM_POSITIONS)
    ends = layout.offsets + layout.lengths
    query_index = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    hidden = decoder.run_tail(frozen_layers.hidden_states(row_indices, layout), layout, query_index)
    squared_difference = squared_norm = 0.0
    for row, row_hidden in zip(row_indices, hidden.split(counts.tolist()), strict=True):
        count = len(row_hidden)
        ids = torch.from_numpy(rows.ids[row])[None].to(frozen_layers.device)
        expected = decoder.model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0, -count:].float()
        logits = decoder.head(row_hidden).float()
        if decoder.softcap:
            logits = decoder.softcap * (logits / decoder.softcap).tanh()
        squared_difference += (logits - expected).square().sum().item()
        squared_norm += expected.square().sum().item()
    return float(np.sqrt(squared_difference / max(squared_norm, 1e-30)))


def _rows_to_compare(tail: Tail) -> list[int]:
    """Return the indices of two to six rows that use every feature of the layout.

    These are the two rows with the longest common beginning, and the longest and the shortest row with and without the
    shared prefix. They cover sliding windows, positions, neighbouring rows and both kinds of rows.
    """
    rows = tail.rows
    by_length = np.argsort(rows.lengths, kind="stable")
    with_prefix, without_prefix = by_length[rows.has_prefix[by_length]], by_length[~rows.has_prefix[by_length]]
    second = int(rows.count_inherited(rows.fill_order.tolist()).argmax())
    alike = rows.fill_order[max(second - 1, 0) : second + 1]
    chosen = (*alike, *with_prefix[-1:], *with_prefix[:1], *without_prefix[-1:], *without_prefix[:1])
    return list(dict.fromkeys(map(int, chosen)))


def check_difference(tail: Tail, dtype: torch.dtype) -> None:
    """Raise CannotSplit when the tail does not compute the same as the whole model."""
    difference = logit_difference(tail)
    if not difference <= TOLERANCE.get(dtype, 0.05):
        raise CannotSplit(f"its tail and the whole model differ by {difference:.1e} in their logits")
