"""Supervised fine-tuning of the last layers with TRL, under torchrun. Read top-down."""

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PrinterCallback, TrainerState, set_seed
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils.logging import disable_progress_bar
from trl import SFTTrainer

from tailtune import provenance
from tailtune.errors import UserError
from tailtune.kinds.chat.prompt import encode_row, freeze_chat_template, training_example
from tailtune.log import log
from tailtune.manifest import publish, sha256_json, write_json
from tailtune.parquet.split import split_rows
from tailtune.recipe.schema import Recipe, Stage
from tailtune.signals import STOPPED
from tailtune.train import hardware
from tailtune.train.arguments import DDP_TIMEOUT_SECONDS, sft_config
from tailtune.train.callbacks import LogLines, Meter, Metered, StopOnSignal, peak_memory_bytes
from tailtune.train.checkpoints import MarkComplete, latest_complete, remove_incomplete, seconds_at, step_of
from tailtune.train.tail.tokenized_rows import IGNORED
from tailtune.train.tail.trainer import TailLoop, attach
from tailtune.train.weights import export_model, load_model, select_trainable
from tailtune.training_key import claim_checkpoints, training_key


@dataclass(frozen=True)
class Paths:
    data: Path
    """The Parquet file of all rows; the split is computed here."""
    base_model: Path
    output: Path
    """Where `best_model/`, `checkpoints/` and the summaries go."""
    hidden_state_cache: Path
    """Where the states of frozen layers are kept, for this run and others."""

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"


class FullModelTrainer(Metered, SFTTrainer):
    """The whole model in every step. Its evaluation loss is per label, as the tail's is.

    Trainer's own is a mean over batches, in which several ranks count some rows twice to fill up the last ones: by it,
    another checkpoint could be the best.
    """

    def get_eval_dataloader(self, eval_dataset: datasets.Dataset | None = None) -> DataLoader[Any]:
        """Of whole batches on every rank: filled up with rows without labels, which weigh nothing."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if missing := -len(rows) % (self.args.eval_batch_size * self.args.world_size):
            row = rows[0] | {"labels": [IGNORED] * len(rows[0]["labels"])}
            filler = datasets.Dataset.from_list([row] * missing, features=rows.features)
            rows = datasets.concatenate_datasets([rows, filler])
        return super().get_eval_dataloader(rows)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        self._evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        loss, num_labels = self.accelerator.reduce(self._evaluated).tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = loss / max(num_labels, 1)
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        num_labels = (inputs["labels"][:, 1:] != IGNORED).sum()
        loss_sum = torch.where(num_labels > 0, loss.double() * num_labels, 0.0)  # a mean over none may be NaN
        self._evaluated += torch.stack([loss_sum, num_labels])
        return loss, logits, labels

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's card knows neither the base model nor the data; the report does."""


class TailTrainer(Metered, TailLoop):
    """Trains the last layers only, on hidden states that were computed once."""


def train(recipe: Recipe, stage: Stage, paths: Paths) -> int:
    """Train one stage and publish `best_model/`, `training_history.json`, `training_summary.json`.

    Resumes from the last complete checkpoint of the same settings, data and base model; others are
    refused with UserError. Rank 0 alone writes, apart from each rank's random state inside the
    checkpoints. Returns the exit status: 0, or 143 after a signal.
    """
    stop = StopOnSignal()
    started_at = datetime.now(UTC)
    # joins the process group that torchrun's environment describes; without `cpu` it would stay alone there
    timeout = timedelta(seconds=int(stage.trainer.get("ddp_timeout", DDP_TIMEOUT_SECONDS)))
    ranks = PartialState(cpu=not torch.cuda.is_available(), timeout=timeout)
    assert ranks.num_processes == int(os.environ.get("WORLD_SIZE", "1"))
    set_seed(recipe.seed)
    if not torch.cuda.is_available():
        hardware.keep_freed_memory()
    key = training_key(recipe, paths.data.parent, paths.base_model)
    found: list[Path | None] = [None]
    if ranks.is_main_process:
        paths.checkpoints.mkdir(parents=True, exist_ok=True)
        claim_checkpoints(paths.checkpoints, key)
        remove_incomplete(paths.checkpoints)
        found = [latest_complete(paths.checkpoints)]
    broadcast_object_list(found)  # rank 0 decides: a network file system may still show others an older list
    resume = found[0]
    if not (sys.stderr.isatty() and ranks.is_main_process):
        datasets.disable_progress_bars()
        disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(paths.base_model, local_files_only=True)
    freeze_chat_template(tokenizer)
    train_rows, validation_rows = split_rows(
        pq.read_table(paths.data), recipe.data.split_by, recipe.data.validation_share, recipe.seed
    )
    choice = hardware.plan_hardware(
        recipe.hardware,
        int(stage.trainer["per_device_train_batch_size"]),
        int(stage.trainer.get("gradient_accumulation_steps", 1)),
    )
    config = sft_config(
        recipe,
        stage,
        choice,
        output_dir=paths.checkpoints,
        num_train_rows=train_rows.num_rows,
        world_size=ranks.num_processes,
    )
    facts: dict[str, Any] = {
        "stage": stage.name,
        "world_size": ranks.num_processes,
        "num_train_rows": train_rows.num_rows,
        "num_validation_rows": validation_rows.num_rows,
        "learning_rate": config.learning_rate,
        "num_train_epochs": config.num_train_epochs,
        "effective_batch_size": config.per_device_train_batch_size
        * config.gradient_accumulation_steps
        * ranks.num_processes,
    }
    model = load_model(paths.base_model, choice)
    facts["num_parameters"] = model.num_parameters()  # before untying adds the head's own copy
    select_trainable(model, stage.train_weights)
    facts["num_trainable_parameters"] = model.num_parameters(only_trainable=True)
    facts["trainable_share"] = facts["num_trainable_parameters"] / facts["num_parameters"]
    facts["hardware"] = {**asdict(choice), "attention": model.config._attn_implementation}

    saver = MarkComplete(seconds_before=seconds_at(resume))
    callbacks = [stop, saver, *([LogLines()] if config.disable_tqdm else [])]
    whole = FullModelTrainer(
        model=model,
        args=config,
        train_dataset=conversations(recipe, train_rows),
        eval_dataset=conversations(recipe, validation_rows),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    facts["num_truncated_rows"] = count_truncated(
        tokenizer, recipe, train_rows, whole.train_dataset["input_ids"], config.max_length
    )
    if ranks.is_main_process:
        describe(choice, facts, config.max_length, scaled=stage.scale_learning_rate)
    tail = attach(
        whole,
        stage.tail,
        dtype=choice.dtype,
        cache_dir=paths.hidden_state_cache,
        base_model_sha256=key["base_model_sha256"],
        callbacks=callbacks,
        trainer_class=TailTrainer,
    )
    trainer: FullModelTrainer | TailTrainer = tail or whole
    facts["tail_training"] = tail.facts if tail else None
    facts["hardware"] |= {
        name: getattr(trainer.args, name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    }
    saver.seconds_before += tail.facts["fill_seconds"] if tail else 0.0
    trainer.remove_callback(PrinterCallback)

    first_step = step_of(resume) if resume else 0
    first_token = json.loads((resume / "trainer_state.json").read_text())["num_input_tokens_seen"] if resume else 0
    if ranks.is_main_process:
        record_attempt(paths.checkpoints, first_step)
        if resume:
            log.info("train: resuming from %s, next step is %d", resume.name, first_step + 1)
    start = time.monotonic()
    trainer.meter = Meter(start, first_token)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    state = trainer.state

    if stop.stopped_at is not None:
        if ranks.is_main_process:
            log.info("train: stopped at step %d by a signal, checkpoint saved; run again to go on", stop.stopped_at)
        return STOPPED
    if ranks.is_main_process:
        seconds = saver.seconds()  # of all attempts, as far as their checkpoints count
        rows_per_second = state.global_step * facts["effective_batch_size"] / seconds
        refuse_no_best(state, paths.checkpoints)
        facts |= {
            "num_steps": state.global_step,
            "samples_seen": state.global_step * facts["effective_batch_size"],
            "tokens_seen": state.num_input_tokens_seen,
            "train_seconds": seconds,
            "rows_per_second": rows_per_second,
            "tokens_per_second": state.num_input_tokens_seen / seconds,
            "best_step": state.best_global_step,
            "best_eval_loss": state.best_metric,
            "peak_memory_bytes": peak_memory_bytes(),
            "resumed_from_steps": [step for step in read_attempts(paths.checkpoints) if step],
            "provenance": {
                **provenance.collect(),
                "seed": recipe.seed,
                "recipe_sha256": sha256_json(recipe.model_dump(mode="json")),
                "data_sha256": key["data_sha256"],
                "started_at": started_at.isoformat(timespec="seconds"),
                "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            },
            "recipe": recipe.public_dump(),
        }
        write_json(paths.output / "training_history.json", split_history(state.log_history))
        write_json(paths.output / "training_summary.json", facts)
        # last, because the manifest of best_model/ means that the training is complete
        with publish(paths.output / "best_model", key, {"best_step": state.best_global_step}) as partial:
            export_model(model, partial, choice.dtype)
            tokenizer.save_pretrained(partial)
            (partial / "system_prompt.txt").write_text(recipe.prompt.system, encoding="utf-8")
        log.info(
            "train: best eval_loss %.4f at step %s of %d; %.1f rows/s",
            state.best_metric, state.best_global_step, state.global_step, rows_per_second,
        )  # fmt: skip
    ranks.wait_for_everyone()
    return 0


def refuse_no_best(state: TrainerState, checkpoints: Path) -> None:
    """Raise UserError when the weights in memory are not those of the best evaluation.

    Trainer itself goes on with the last weights when the best checkpoint is gone or no loss was a number.
    """
    if state.best_metric is None or not math.isfinite(state.best_metric):
        raise UserError(f"the best eval_loss is {state.best_metric}; lower stages.0.trainer.learning_rate and look at "
                        "the losses above")  # fmt: skip
    if not (checkpoints / f"checkpoint-{state.best_global_step}").is_dir():
        raise UserError(f"checkpoint-{state.best_global_step} with the best eval_loss is gone from {checkpoints}; "
                        "delete the checkpoints and train again")  # fmt: skip


def conversations(recipe: Recipe, rows: pa.Table) -> datasets.Dataset:
    """The rows as prompt and completion messages, which TRL tokenises."""
    return datasets.Dataset.from_list([training_example(recipe.prompt, row) for row in rows.to_pylist()])


def count_truncated(
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    rows: pa.Table,
    prepared: Sequence[Sequence[int]],
    max_length: int | None,
) -> int:
    """Rows that `max_length` cuts; `prepared` are their tokens as TRL has cut them.

    Raises UserError when a row would lose its whole answer.
    """
    if max_length is None:
        return 0
    if len(prepared) == rows.num_rows:  # else TRL has dropped what has no answer left
        rows = rows.filter(pa.array([len(ids) == max_length for ids in prepared], pa.bool_()))
    count = 0
    for row in rows.to_pylist():
        question, answer = encode_row(tokenizer, recipe.prompt, row)
        count += len(question) + len(answer) > max_length
        if len(question) >= max_length:
            raise UserError(
                f"a question of {len(question)} tokens leaves no room for its answer in max_length {max_length}; "
                "raise stages.0.trainer.max_length or shorten prompt.system"
            )
    return count


def describe(choice: hardware.HardwarePlan, facts: dict[str, Any], max_length: int | None, *, scaled: bool) -> None:
    """What is about to run, in two or three lines."""
    log.info("train: %s", choice.describe())
    log.info(
        "train: %s of %s parameters train (%.2f %%), %d ranks, %d rows, %d for validation",
        f"{facts['num_trainable_parameters']:,}", f"{facts['num_parameters']:,}", 100 * facts["trainable_share"],
        facts["world_size"], facts["num_train_rows"], facts["num_validation_rows"],
    )  # fmt: skip
    learning_rate = facts["learning_rate"]
    if scaled and facts["world_size"] > 1:
        base = learning_rate / facts["world_size"]
        log.info("train: learning rate %g = %g x %d ranks", learning_rate, base, facts["world_size"])
    if facts["num_truncated_rows"]:
        log.info("train: %d rows are longer than max_length %d and are cut", facts["num_truncated_rows"], max_length)


def split_history(log_history: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Trainer's log entries as the two lists of `training_history.json`."""
    columns = {
        "train": ("step", "epoch", "loss", "learning_rate", "grad_norm", "mean_token_accuracy", "tokens_per_second",
                  "peak_memory_bytes", "gpu_utilisation_percent"),
        "eval": ("step", "epoch", "eval_loss", "eval_mean_token_accuracy"),
    }  # fmt: skip
    marks = {"train": "loss", "eval": "eval_loss"}
    return {
        side: [{name: entry[name] for name in names if name in entry} for entry in log_history if marks[side] in entry]
        for side, names in columns.items()
    }


def record_attempt(checkpoints: Path, from_step: int) -> None:
    """Note the step from which this attempt starts."""
    with (checkpoints / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"from_step": from_step, "at": datetime.now(UTC).isoformat()}) + "\n")


def read_attempts(checkpoints: Path) -> list[int]:
    """The first step of every attempt, 0 for a fresh start."""
    return [json.loads(line)["from_step"] for line in (checkpoints / "attempts.jsonl").read_text().splitlines()]


def leave_process_group() -> None:
    """Close the process group, so that torchrun sees a clean exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
