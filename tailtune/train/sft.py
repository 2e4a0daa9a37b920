"""Supervised fine-tuning of the last layers with TRL, under torchrun. Read top-down."""

import json
import os
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PrinterCallback, set_seed
from trl import SFTTrainer

from tailtune import provenance
from tailtune.errors import UserError
from tailtune.log import log
from tailtune.manifest import publish, sha256_json, write_json
from tailtune.prompt import encode_row, freeze_chat_template, training_example
from tailtune.recipe import Recipe, Stage
from tailtune.split import split_rows
from tailtune.train import hardware
from tailtune.train.arguments import sft_config
from tailtune.train.callbacks import LogLines, Meter, StopOnSignal, peak_memory_bytes
from tailtune.train.checkpoints import MarkComplete, latest_complete, remove_incomplete, step_of
from tailtune.train.model import export_model, load_model, prepare_tail

STOPPED = 143
"""Exit status of a run that a signal stopped: 128 + SIGTERM, so that a restart policy starts it again."""


class MeteredTrainer(SFTTrainer):
    """SFTTrainer whose log entries carry throughput and memory, so that every reporter has them."""

    meter: Meter | None = None

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "loss" in logs:
            if self.meter is None:  # the first entry of this attempt starts at the resumed count
                self.meter = Meter(time=self.training_started, tokens=self.tokens_at_start)
            logs.update(self.meter.read(self.state.num_input_tokens_seen))
        super().log(logs, start_time)


def train(recipe: Recipe, stage: Stage, *, data: Path, model_dir: Path, output_dir: Path, key: dict[str, Any]) -> int:
    """Train one stage and publish `best_model/`, `training_history.json`, `training_summary.json`.

    `data` is the Parquet file of all rows; the split is computed here. `key` identifies the training
    and goes into the manifest of `best_model/`. Returns the exit status: 0, or 143 after a signal.
    Rank 0 alone writes, apart from each rank's random state inside the checkpoints.
    """
    stop = StopOnSignal()
    started_at = datetime.now(UTC)
    state = PartialState()  # joins the process group that torchrun's environment describes
    set_seed(recipe.seed)
    checkpoints = output_dir / "checkpoints"
    if state.is_main_process:
        checkpoints.mkdir(parents=True, exist_ok=True)
        remove_incomplete(checkpoints)
    state.wait_for_everyone()

    # ---- data: rows of the two sides, as prompt and completion
    table = pq.read_table(data)
    train_rows, validation_rows = split_rows(
        table, recipe.data.split_by, recipe.data.validation_share, recipe.seed
    )
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    freeze_chat_template(tokenizer)
    train_set, validation_set = (
        datasets.Dataset.from_list([training_example(recipe.prompt, row) for row in rows.to_pylist()])
        for rows in (train_rows, validation_rows)
    )

    # ---- model and arguments
    trainer_arguments = stage.trainer
    choice = hardware.choose(
        recipe.hardware,
        int(trainer_arguments.get("per_device_train_batch_size", 8)),
        int(trainer_arguments.get("gradient_accumulation_steps", 1)),
    )
    config = sft_config(
        recipe, stage, choice, output_dir=checkpoints, num_train_rows=len(train_set), world_size=state.num_processes
    )
    num_truncated = count_truncated(tokenizer, recipe, [*train_rows.to_pylist()], config.max_length)
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(output_dir / "tensorboard"))
    model = load_model(model_dir, choice)
    num_parameters = model.num_parameters()  # before untying adds the head's own copy
    prepare_tail(model, stage)
    num_trainable = model.num_parameters(only_trainable=True)
    if state.is_main_process:
        log.info("train: %s", choice.describe())
        log.info(
            "train: %s of %s parameters train (%.2f %%), %d ranks, %d rows, %d for validation",
            f"{num_trainable:,}", f"{num_parameters:,}", 100 * num_trainable / num_parameters,
            state.num_processes, len(train_set), len(validation_set),
        )  # fmt: skip
        if num_truncated:
            log.info("train: %d rows are longer than max_length %d and are cut", num_truncated, config.max_length)

    trainer = MeteredTrainer(
        model=model,
        args=config,
        train_dataset=train_set,
        eval_dataset=validation_set,
        processing_class=tokenizer,
        callbacks=[stop, MarkComplete(), LogLines()] if config.disable_tqdm else [stop, MarkComplete()],
    )
    trainer.remove_callback(PrinterCallback)

    # ---- training, from the last complete checkpoint where there is one
    resume = latest_complete(checkpoints)
    if state.is_main_process:
        record_attempt(checkpoints, step_of(resume) if resume else 0)
        if resume:
            log.info("train: resuming from %s, next step is %d", resume.name, step_of(resume) + 1)
    trainer.training_started = time.monotonic()
    trainer.tokens_at_start = json.loads((resume / "trainer_state.json").read_text())["num_input_tokens_seen"] if resume else 0  # fmt: skip
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    train_seconds = time.monotonic() - trainer.training_started
    if stop.stopped_at is not None:
        if state.is_main_process:
            log.info("train: stopped at step %d by a signal; the checkpoint is saved, run again to go on",
                     stop.stopped_at)  # fmt: skip
        return STOPPED

    # ---- results, by rank 0 alone: the best model last, because its manifest means that all is there
    steps_now = trainer.state.global_step - (step_of(resume) if resume else 0)
    if state.is_main_process:
        history = split_history(trainer.state.log_history)
        rows_now = steps_now * config.per_device_train_batch_size * config.gradient_accumulation_steps * state.num_processes  # fmt: skip
        tokens_now = trainer.state.num_input_tokens_seen - trainer.tokens_at_start
        summary = {
            "stage": stage.name,
            "num_parameters": num_parameters,
            "num_trainable_parameters": num_trainable,
            "trainable_share": num_trainable / num_parameters,
            "world_size": state.num_processes,
            "num_train_rows": len(train_set),
            "num_validation_rows": len(validation_set),
            "num_truncated_rows": num_truncated,
            "num_train_epochs": config.num_train_epochs,
            "num_steps": trainer.state.global_step,
            "effective_batch_size": rows_now // max(1, steps_now),
            "learning_rate": config.learning_rate,
            "samples_seen": trainer.state.global_step * rows_now // max(1, steps_now),
            "tokens_seen": trainer.state.num_input_tokens_seen,
            "train_seconds": round(train_seconds, 3),
            "rows_per_second": rows_now / train_seconds,
            "tokens_per_second": tokens_now / train_seconds,
            "best_step": trainer.state.best_global_step,
            "best_eval_loss": trainer.state.best_metric,
            "peak_memory_bytes": peak_memory_bytes(),
            "resumed_from_steps": [step for step in read_attempts(checkpoints) if step],
            "hardware": {**asdict(choice), "attention": model.config._attn_implementation},
            "environment": {name: os.environ[name] for name in ("NCCL_DEBUG",) if name in os.environ},
            "provenance": {
                **provenance.collect(),
                "seed": recipe.seed,
                "recipe_sha256": sha256_json(recipe.model_dump(mode="json")),
                "data_sha256": key.get("data_sha256"),
                "started_at": started_at.isoformat(timespec="seconds"),
                "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            },
            "recipe": recipe.model_dump(mode="json"),
        }
        write_json(output_dir / "training_history.json", history)
        write_json(output_dir / "training_summary.json", summary)
        with publish(output_dir / "best_model", key, {"best_step": trainer.state.best_global_step}) as partial:
            export_model(trainer.model, partial, choice.dtype)
            tokenizer.save_pretrained(partial)
            (partial / "system_prompt.txt").write_text(recipe.prompt.system, encoding="utf-8")
        log.info("train: best eval_loss %.4f at step %s of %d; %.1f rows/s",
                 trainer.state.best_metric, trainer.state.best_global_step, trainer.state.global_step,
                 rows_now / train_seconds)  # fmt: skip
    state.wait_for_everyone()
    return 0


def count_truncated(
    tokenizer: PreTrainedTokenizerBase, recipe: Recipe, rows: list[dict[str, Any]], max_length: int | None
) -> int:
    """Rows that `max_length` cuts. Raises UserError when one loses its whole answer."""
    if max_length is None:
        return 0
    count = 0
    for row in rows:
        question, answer = encode_row(tokenizer, recipe.prompt, row)
        count += len(question) + len(answer) > max_length
        if len(question) >= max_length:
            raise UserError(
                f"a question of {len(question)} tokens leaves no room for its answer in max_length {max_length}; "
                "raise stages.0.trainer.max_length or shorten prompt.system"
            )
    return count


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
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
