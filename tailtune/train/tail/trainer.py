"""How the tail attaches: TRL prepares rows and arguments, a plain Trainer runs its loop over row numbers."""

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

from tailtune.log import log
from tailtune.manifest import RESULTS_VERSION
from tailtune.recipe.schema import TailSettings
from tailtune.train.tail.attention import CannotSplit
from tailtune.train.tail.cache import Cache, Prefix, most_rows, tokens_at_once
from tailtune.train.tail.check import check_difference, refuse_arguments, refuse_model
from tailtune.train.tail.decoder import Split
from tailtune.train.tail.module import Tail
from tailtune.train.tail.placement import PLACEMENTS, place
from tailtune.train.tail.tokenized_rows import Rows

MAX_STEP_TOKENS = 16_384
"""Tokens up to which the micro-batches of a step become one, so that the prompt is computed once."""


class RowNumbers(Dataset[dict[str, Any]]):
    """Row numbers `first` to `last` with their ids and labels, which Trainer counts."""

    def __init__(self, rows: Rows, first: int, last: int) -> None:
        self.rows, self.first, self.last = rows, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.first + index
        return {"row": row, "input_ids": self.rows.ids[row], "labels": self.rows.labels[row]}


def collate(features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """`row` [n]; all tokens and labels of the rows in one line, for Trainer's counts of tokens and labels."""
    ids = torch.cat([torch.from_numpy(f["input_ids"]) for f in features])
    labels = torch.cat([torch.from_numpy(f["labels"][1:]) for f in features])
    return {"row": torch.tensor([f["row"] for f in features]), "input_ids": ids, "labels": labels,
            "attention_mask": torch.ones_like(ids)}  # fmt: skip


class TailTrainer(Trainer):
    """Trainer of a `Tail`. Its log entries carry `mean_token_accuracy` as TRL's do."""

    facts: dict[str, Any]
    """For the run's summary: what is frozen and shared, where the states are, seconds to compute them."""

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
        """Loss and accuracy per label of the evaluation rows, on the cached states.

        Trainer's own loss is a mean over batches, which depends on their size; this one does not, so
        batches are as large as the cache's shards. Each row is evaluated by one rank.
        """
        start, args = time.monotonic(), self.args
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        mine = range(dataset.first + args.process_index, dataset.last, args.world_size)
        longest = int(dataset.rows.lengths[dataset.first : dataset.last].max())
        limit = tokens_at_once(args.device)
        size = max(1, min(limit // longest, most_rows(dataset.rows, longest, limit)))
        sums = torch.zeros(3, dtype=torch.float64, device=args.device)
        self.model.eval()
        with autocast(args):
            for first in range(0, len(mine), size):
                row = torch.tensor(mine[first : first + size])
                outputs = self.model(row=row, num_items_in_batch=1)
                counts = (outputs[name].to(sums) for name in ("loss", "num_correct", "num_labels"))
                sums += torch.stack(list(counts))
        loss, correct, labels = self.accelerator.reduce(sums).tolist()
        metrics = {
            f"{metric_key_prefix}_loss": loss / max(labels, 1),
            f"{metric_key_prefix}_mean_token_accuracy": correct / max(labels, 1),
            f"{metric_key_prefix}_runtime": time.monotonic() - start,
        }
        if isinstance(self.model.source, Cache):
            self.model.source.touch()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(args, self.state, self.control, metrics)  # type: ignore[has-type]
        return metrics


AnyTailTrainer = TypeVar("AnyTailTrainer", bound=TailTrainer)


def attach(
    plain: SFTTrainer,
    settings: TailSettings,
    *,
    dtype: torch.dtype,
    cache_dir: Path,
    base_model_sha256: str,
    callbacks: Sequence[Any],
    trainer_class: type[AnyTailTrainer],
) -> AnyTailTrainer | None:
    """A trainer of the tail for what `plain` has prepared, or None when the plain one has to run.

    Fills the cache. All ranks decide alike; the reason of a refusal is logged as a warning.
    """
    rank = plain.args.process_index
    say = log.info if rank == 0 else log.debug
    if settings.mode == "off":
        say("tail: off, as the recipe says; the whole model runs in every step")
        return None
    tail, reason = _split(plain, settings, dtype)
    reason = next(filter(None, gather_object([reason])), None)  # one rank's reason is every rank's
    if reason or tail is None:
        if rank == 0:
            log.warning("tail: the whole model runs in every step, because %s", reason)
        return None
    if not settings.stop_backward:
        plain.model.enable_input_require_grads()
    prefix, rows, split = tail.prefix, tail.rows, tail.split
    num_train = len(plain.train_dataset)
    say(
        "tail: %d of %d layers are frozen; %d rows of %.0f tokens, %d of them a prompt shared by %.0f %%",
        split.first, len(split.layers), len(rows), sum(map(len, rows.ids)) / len(rows), len(rows.prompt),
        100 * rows.shares.mean(),
    )  # fmt: skip

    args = _arguments(plain.args, rows, num_train)
    with autocast(plain.args):
        states_dtype = prefix.own_states([0]).dtype
    key = _cache_key(rows, split, f"{dtype} {states_dtype}", base_model_sha256)
    cache = Cache(cache_dir, key, prefix, states_dtype)
    choice = place(
        settings.cache,
        cache.num_bytes(),
        uses_of_a_row(args, num_train, len(rows) - num_train),
        missing_bytes=cache.num_bytes(missing=True),
        directory=cache_dir,
        checkpoints=Path(args.output_dir),
        num_trainable=plain.model.num_parameters(only_trainable=True),
        ranks_on_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # as torchrun tells every rank
        device=prefix.device,
    )
    kind, why = max(gather_object([choice]), key=lambda c: PLACEMENTS.index(c[0]))  # ranks may see other free memory
    if kind == "none":
        say("tail: the frozen layers run in every step without gradient: %s", why)
    else:
        done = _fill(cache, plain.args, kind)
        say("tail: the frozen layers' states %s; kept on %s: %s", done, kind, why)
        tail.source = cache
    trainer = trainer_class(
        model=tail,
        args=args,
        data_collator=collate,
        train_dataset=RowNumbers(rows, 0, num_train),
        eval_dataset=RowNumbers(rows, num_train, len(rows)),
        callbacks=list(callbacks),
    )
    trainer.facts = {
        "num_frozen_layers": split.first,
        "num_layers": len(split.layers),
        "prompt_tokens": len(rows.prompt),
        "prompt_shared_by": float(rows.shares.mean()),
        "states": kind,
        "fill_seconds": cache.fill_seconds,
    }
    return trainer


def _split(plain: SFTTrainer, settings: TailSettings, dtype: torch.dtype) -> tuple[Tail | None, str | None]:
    """The tail of the plain trainer's model and rows, or the reason why there is none."""
    try:
        refuse_model(plain.model)
        refuse_arguments(plain)
        columns = ["input_ids", "labels"]
        parts = [data.with_format("numpy", columns)[:] for data in (plain.train_dataset, plain.eval_dataset)]
        ids, labels = ([row for part in parts for row in part[name]] for name in columns)
        rows = Rows(ids, labels, share_prompt=settings.shared_prompt)
        tail = Tail(Prefix(Split(plain.model), rows, stop_backward=settings.stop_backward), settings)
        with autocast(plain.args):
            check_difference(tail, dtype)
    except CannotSplit as error:
        return None, str(error)
    except torch.OutOfMemoryError:
        raise  # the whole model needs more
    except Exception as error:  # an architecture that nobody has tried; the whole model may still train
        return None, f"its split fails with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return tail, None


def uses_of_a_row(args: Any, num_train: int, num_eval: int) -> float:
    """How often an average row enters the tail, in training and in the evaluations."""
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * num_train / per_step)
    evaluations = {"no": 0, "epoch": math.ceil(args.num_train_epochs)}.get(args.eval_strategy.value)
    if evaluations is None:
        evaluations = steps // (args.eval_steps if args.eval_steps >= 1 else max(1, int(args.eval_steps * steps)))
    return (steps * per_step + evaluations * num_eval) / (num_train + num_eval)


def _arguments(args: Any, rows: Rows, num_train: int) -> Any:
    """The plain trainer's arguments with what the tail needs otherwise."""
    args = copy.copy(args)
    args.remove_unused_columns = False
    args.gradient_checkpointing = args.activation_checkpointing = False  # the backward meets a few layers only
    if args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = False
    together = args.per_device_train_batch_size * args.gradient_accumulation_steps
    # what the profile allows the whole model is more than enough for the tail
    limit = min(MAX_STEP_TOKENS, args.per_device_train_batch_size * (args.max_length or MAX_STEP_TOKENS))
    fits = len(rows.prompt) + together * rows.lengths[:num_train].max() <= limit
    # with several ranks, an epoch's last step is filled up to whole batches: others, when batches are larger
    same = args.world_size == 1 or num_train % (together * args.world_size) == 0
    if fits and same and not args.dataloader_drop_last:
        args.per_device_train_batch_size, args.gradient_accumulation_steps = together, 1
    return args


def _cache_key(rows: Rows, split: Split, precision: str, base_model_sha256: str) -> dict[str, Any]:
    """Everything that the states depend on. The token ids stand for tokenizer, template, data and truncation."""
    ids = hashlib.sha256()
    for row in rows.ids:
        ids.update(len(row).to_bytes(8, "little") + row.tobytes())
    return {
        "base_model": base_model_sha256,
        "token_ids": ids.hexdigest(),
        "prompt_length": len(rows.prompt),
        "first_layer": split.first,
        "precision": precision,
        "device": split.head.weight.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "version": RESULTS_VERSION,
    }


def _fill(cache: Cache, args: Any, kind: str) -> str:
    """Fill and open the cache; says what was done."""
    start = time.monotonic()
    with autocast(args):
        num_rows = cache.fill(args.process_index, args.world_size)
        cache.load(kind)
    computed = sum(gather_object([num_rows]))
    return f"computed for {computed} rows in {time.monotonic() - start:.1f} s" if computed else "were there already"


def autocast(args: Any) -> Any:
    """What Trainer computes a step in."""
    precision = torch.bfloat16 if args.bf16 else torch.float16
    return torch.autocast(args.device.type, precision, enabled=args.bf16 or args.fp16)
