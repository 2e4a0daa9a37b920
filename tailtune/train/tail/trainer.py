"""Attaches the tail to TRL: SFTTrainer prepares rows and arguments, a plain Trainer runs its loop over row indices."""

import copy
import hashlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from accelerate.utils import gather_object
from torch.utils.data import Dataset
from transformers import Trainer
from trl import SFTTrainer

from tailtune.errors import one_line
from tailtune.log import log
from tailtune.manifest import RESULTS_VERSION
from tailtune.progress import Progress
from tailtune.recipe.schema import TailSettings
from tailtune.train.tail.attention import CannotSplit
from tailtune.train.tail.cache import FrozenLayers, HiddenStateCache, max_rows, tokens_at_once
from tailtune.train.tail.check import check_difference, refuse_arguments, refuse_model
from tailtune.train.tail.decoder import SplitDecoder
from tailtune.train.tail.module import Tail
from tailtune.train.tail.placement import PLACEMENTS, choose_placement
from tailtune.train.tail.savings import ALL_SAVINGS, Savings
from tailtune.train.tail.tokenized_rows import TokenizedRows

PLACES = {"gpu": "in GPU memory", "host": "in host memory", "disk": "on disk"}
"""Where the hidden states are kept, as the log says it."""
MAX_STEP_TOKENS = 16_384
"""Merge the micro-batches of a step into one up to this many tokens, so that the shared prefix is computed once."""


class RowIndices(Dataset[dict[str, Any]]):
    """The row indices from `first` to `end`, with the ids and labels that Trainer counts."""

    def __init__(self, rows: TokenizedRows, first: int, end: int) -> None:
        self.rows, self.first, self.end = rows, first, end

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.first + index
        return {"row_index": row, "input_ids": self.rows.ids[row], "labels": self.rows.labels[row]}


def collate(features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return `row_indices` [n], and the concatenated tokens and labels of the rows, which Trainer counts."""
    ids = torch.cat([torch.from_numpy(f["input_ids"]) for f in features])
    labels = torch.cat([torch.from_numpy(f["labels"][1:]) for f in features])
    return {
        "row_indices": torch.tensor([f["row_index"] for f in features]),
        "input_ids": ids,
        "labels": labels,
        "attention_mask": torch.ones_like(ids),
    }


class TailLoop(Trainer):
    """Trainer of a `Tail`. Its log entries have a `mean_token_accuracy`, as those of TRL do."""

    facts: dict[str, Any]
    """For the run's summary: frozen layers, shared prefix, placement of the hidden states, seconds to compute them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counts = torch.zeros(2, device=self.args.device, dtype=torch.float64)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self._counts += torch.stack([outputs["num_correct"], outputs["num_labels"].to(loss)]).to(self._counts)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            correct, labels = self.accelerator.reduce(self._counts).tolist()
            logs["mean_token_accuracy"] = correct / max(labels, 1.0)
            self._counts.zero_()
        super().log(logs, start_time)

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return loss and accuracy per label of the evaluation rows, computed on the cached hidden states.

        Trainer's own loss is a mean over batches and depends on their size. This one does not, so batches are as large
        as the shards of the cache. Each row is evaluated by exactly one rank.
        """
        start, args = time.monotonic(), self.args
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        rows_of_rank = range(dataset.first + args.process_index, dataset.end, args.world_size)
        longest = int(dataset.rows.lengths[dataset.first : dataset.end].max())
        max_tokens = tokens_at_once(args.device)
        batch_size = max(1, min(max_tokens // longest, max_rows(dataset.rows, longest, max_tokens)))
        sums = torch.zeros(3, dtype=torch.float64, device=args.device)
        self.model.eval()
        with autocast(args), Progress("train: evaluating row", len(rows_of_rank), "rows") as progress:
            for first in range(0, len(rows_of_rank), batch_size):
                row_indices = torch.tensor(rows_of_rank[first : first + batch_size])
                outputs = self.model(row_indices=row_indices, num_items_in_batch=1)
                counts = (outputs[name].to(sums) for name in ("loss", "num_correct", "num_labels"))
                sums += torch.stack(list(counts))
                progress.update(len(row_indices))
        loss, correct, labels = self.accelerator.reduce(sums).tolist()
        metrics = {
            f"{metric_key_prefix}_loss": loss / max(labels, 1),
            f"{metric_key_prefix}_mean_token_accuracy": correct / max(labels, 1),
            f"{metric_key_prefix}_runtime": time.monotonic() - start,
        }
        if isinstance(self.model.source, HiddenStateCache):
            self.model.source.touch()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(args, self.state, self.control, metrics)  # type: ignore[has-type]
        return metrics


AnyTailLoop = TypeVar("AnyTailLoop", bound=TailLoop)


def attach(
    plain: SFTTrainer,
    settings: TailSettings,
    *,
    dtype: torch.dtype,
    cache_dir: Path,
    base_model_sha256: str,
    callbacks: Sequence[Any],
    trainer_class: type[AnyTailLoop],
    savings: Savings = ALL_SAVINGS,
) -> AnyTailLoop | None:
    """Return a trainer of the tail for the rows that `plain` has prepared, or None when `plain` itself has to run.

    Fills the cache. All ranks make the same decision; the reason for a refusal is logged as a warning.

    Args:
        plain: TRL's trainer of the whole model, whose last layers and head train.
        settings: The stage's `tail`.
        dtype: Precision of the frozen layers.
        cache_dir: Directory of all caches of hidden states.
        base_model_sha256: Identifies the frozen weights in the key of the cache.
        callbacks: Callbacks of the returned trainer.
        trainer_class: Class of the returned trainer.
        savings: For benchmarks and tests, which switch single optimisations off.
    """
    rank = plain.args.process_index
    log_info = log.info if rank == 0 else log.debug
    if settings.mode == "off":
        log_info("tail: off, as the recipe says; the whole model runs in every step")
        return None
    if not savings.stop_backward and settings.cache != "none":
        raise ValueError("stop_backward is false, so hidden states need their gradient; set cache to 'none' as well")
    tail, reason = _build_tail(plain, savings, dtype)
    reason = next(filter(None, gather_object([reason])), None)  # a reason on one rank applies to all of them
    if reason or tail is None:
        if rank == 0:
            log.warning("tail: the whole model runs in every step, because %s", reason)
        return None
    if not savings.stop_backward:
        plain.model.enable_input_require_grads()
    frozen_layers, rows, decoder = tail.frozen_layers, tail.rows, tail.decoder
    num_train = len(plain.train_dataset)
    log_info(
        "tail: %d of %d layers are frozen; %d rows of %.0f tokens on average, %.0f %% of them with a shared prefix of "
        "%d tokens",
        decoder.num_frozen, len(decoder.layers), len(rows), sum(map(len, rows.ids)) / len(rows),
        100 * rows.has_prefix.mean(), len(rows.shared_prefix),
    )  # fmt: skip

    args = _arguments(plain.args, rows, num_train)
    with autocast(plain.args):
        hidden_dtype = frozen_layers.own_hidden_states([0]).dtype
    key = _cache_key(rows, decoder, f"{dtype} {hidden_dtype}", base_model_sha256)
    cache = HiddenStateCache(cache_dir, key, frozen_layers, hidden_dtype)
    choice = choose_placement(
        settings.cache,
        cache.num_bytes(),
        uses_per_row(args, num_train, len(rows) - num_train),
        missing_bytes=cache.num_bytes(missing=True),
        directory=cache_dir,
        checkpoints=Path(args.output_dir),
        num_trainable=plain.model.num_parameters(only_trainable=True),
        ranks_on_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # set by torchrun
        device=frozen_layers.device,
    )
    # ranks may see different amounts of free memory
    placement, why = max(gather_object([choice]), key=lambda choice: PLACEMENTS.index(choice[0]))
    if placement == "none":
        log_info("tail: the frozen layers run in every step without gradient: %s", why)
    else:
        outcome = _fill(cache, plain.args, placement)
        log_info("tail: hidden states %s; kept %s: %s", outcome, PLACES[placement], why)
        tail.source = cache
    trainer = trainer_class(
        model=tail,
        args=args,
        data_collator=collate,
        train_dataset=RowIndices(rows, 0, num_train),
        eval_dataset=RowIndices(rows, num_train, len(rows)),
        callbacks=list(callbacks),
    )
    trainer.facts = {
        "num_frozen_layers": decoder.num_frozen,
        "num_layers": len(decoder.layers),
        "prompt_tokens": len(rows.shared_prefix),
        "prompt_shared_by": float(rows.has_prefix.mean()),
        "states": placement,
        "fill_seconds": cache.fill_seconds,
    }
    return trainer


def _build_tail(plain: SFTTrainer, savings: Savings, dtype: torch.dtype) -> tuple[Tail | None, str | None]:
    """Return the tail of the plain trainer's model and rows, or the reason why there is none."""
    try:
        refuse_model(plain.model)
        refuse_arguments(plain)
        columns = ["input_ids", "labels"]
        parts = [data.with_format("numpy", columns)[:] for data in (plain.train_dataset, plain.eval_dataset)]
        ids, labels = ([row for part in parts for row in part[name]] for name in columns)
        rows = TokenizedRows(ids, labels, share_prefix=savings.shared_prefix)
        frozen_layers = FrozenLayers(SplitDecoder(plain.model), rows, stop_backward=savings.stop_backward)
        tail = Tail(frozen_layers, savings)
        with autocast(plain.args):
            check_difference(tail, dtype)
    except CannotSplit as error:
        return None, str(error)
    except torch.OutOfMemoryError:
        raise  # the whole model needs even more memory
    except Exception as error:  # an untested architecture; its whole model may still train
        return None, f"splitting it fails with {type(error).__name__}: {one_line(error)}"
    return tail, None


def uses_per_row(args: Any, num_train: int, num_eval: int) -> float:
    """Return how often an average row enters the tail, in training and in evaluations."""
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * num_train / per_step)
    evaluations = {"no": 0, "epoch": math.ceil(args.num_train_epochs)}.get(args.eval_strategy.value)
    if evaluations is None:
        evaluations = steps // (args.eval_steps if args.eval_steps >= 1 else max(1, int(args.eval_steps * steps)))
    return (steps * per_step + evaluations * num_eval) / (num_train + num_eval)


def _arguments(args: Any, rows: TokenizedRows, num_train: int) -> Any:
    """Return the plain trainer's arguments with the changes that the tail needs."""
    args = copy.copy(args)
    args.remove_unused_columns = False
    args.gradient_checkpointing = args.activation_checkpointing = False  # the backward only crosses a few layers
    if args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = False
    merged_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    # the number of tokens that the hardware profile allows for the whole model is enough for the tail
    max_tokens = min(MAX_STEP_TOKENS, args.per_device_train_batch_size * (args.max_length or MAX_STEP_TOKENS))
    fits = len(rows.shared_prefix) + merged_size * rows.lengths[:num_train].max() <= max_tokens
    # with several ranks, an epoch's last step is filled up to whole batches, with other rows when batches are larger
    same_rows = args.world_size == 1 or num_train % (merged_size * args.world_size) == 0
    if fits and same_rows and not args.dataloader_drop_last:
        args.per_device_train_batch_size, args.gradient_accumulation_steps = merged_size, 1
    return args


def _cache_key(rows: TokenizedRows, decoder: SplitDecoder, precision: str, base_model_sha256: str) -> dict[str, Any]:
    """Return everything that the hidden states depend on.

    The token ids represent tokenizer, template, data and truncation.
    """
    ids = hashlib.sha256()
    for row in rows.ids:
        ids.update(len(row).to_bytes(8, "little") + row.tobytes())
    return {
        "base_model": base_model_sha256,
        "token_ids": ids.hexdigest(),
        "prefix_length": len(rows.shared_prefix),
        "first_layer": decoder.num_frozen,
        "precision": precision,
        "device": decoder.head.weight.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "version": RESULTS_VERSION,
    }


def _fill(cache: HiddenStateCache, args: Any, placement: str) -> str:
    """Fill and open the cache. Returns the outcome as words for the log."""
    start = time.monotonic()
    with autocast(args):
        num_rows = cache.fill(args.process_index, args.world_size)
        cache.load(placement)
    num_computed = sum(gather_object([num_rows]))
    if num_computed == 0:
        return "found in the cache"
    return f"computed for {num_computed} rows in {time.monotonic() - start:.1f} s"


def autocast(args: Any) -> Any:
    """Return the autocast context in which Trainer computes a step."""
    precision = torch.bfloat16 if args.bf16 else torch.float16
    return torch.autocast(args.device.type, precision, enabled=args.bf16 or args.fp16)
