"""What every kind of training shares: process group, checkpoints, resume, stop, summary, best_model/. Read top-down.

A kind adds one function, `make_trainer(context) -> Prepared` in `kinds/KIND/train.py`, which returns a
Hugging Face Trainer that is ready to train.
"""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar

from tailtune import progress, provenance
from tailtune.errors import UserError
from tailtune.files import sha256_json, write_json
from tailtune.log import log
from tailtune.manifest import publish
from tailtune.progress import Progress
from tailtune.recipe.schema import Recipe, Stage
from tailtune.signals import STOPPED
from tailtune.train.arguments import DDP_TIMEOUT_SECONDS, NUM_CHECKPOINTS
from tailtune.train.callbacks import LogLines, SaveByTime, WriteProgress, peak_memory_bytes
from tailtune.train.checkpoints import (
    MarkComplete,
    latest_complete,
    refuse_other_weights,
    remove_incomplete,
    seconds_at,
    step_of,
)
from tailtune.train.faults import stop_repeated_faults
from tailtune.train.hardware import HardwarePlan, keep_freed_memory, plan_hardware
from tailtune.train.weights import save_model, whole_state_dict
from tailtune.training_key import refuse_other_checkpoints, training_key


@dataclass(frozen=True)
class Paths:
    data: Path
    """Parquet file with all rows, which are split into train and validation when it is read."""
    base_model: Path
    output: Path
    """Directory for `best_model/`, `checkpoints/` and the summaries."""
    hidden_state_cache: Path
    """Directory for the hidden states of frozen layers, shared by this run and others."""

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"


@dataclass(frozen=True)
class Context:
    """What a kind needs to make its trainer."""

    recipe: Recipe
    stage: Stage
    paths: Paths
    plan: HardwarePlan
    world_size: int
    is_main_process: bool
    base_model_sha256: str
    callbacks: tuple[TrainerCallback, ...]
    """The kind must pass these to its trainer."""


@dataclass
class Prepared:
    """A trainer that is ready to train, and what to publish after training."""

    trainer: Trainer
    """With the mixin `callbacks.Metered`."""
    model: PreTrainedModel
    """The whole model, whose weights the trainer changes; saved as `best_model/`."""
    save_companions: Callable[[Path], None]
    """Writes what belongs next to the weights: tokenizer, system prompt."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For `training_summary.json`. `num_train_rows` and `effective_batch_size` are required."""
    setup_seconds: float = 0.0
    """Setup time that counts as training time, such as filling the hidden-state cache."""


def train(
    recipe: Recipe,
    stage: Stage,
    paths: Paths,
    make_trainer: Callable[[Context], Prepared],
    refuse_if_taken_over: Callable[[], None],
) -> int:
    """Train one stage and publish `best_model/`, `training_history.json` and `training_summary.json`.

    Resumes from the last complete checkpoint with the same settings, data and base model. Raises UserError if the
    existing checkpoints were made with different ones. Only rank 0 writes to `paths.output`, apart from each rank's
    random state inside the checkpoints and its last error; before it saves or publishes, it calls
    `refuse_if_taken_over`, which raises UserError when the output directory now belongs to another run. Returns the
    exit status: 0, or 143 after a signal.
    """
    started_at = datetime.now(UTC)
    ranks = join_process_group(stage)
    set_seed(recipe.seed)
    if not torch.cuda.is_available():
        keep_freed_memory()
    datasets.disable_progress_bars()  # tailtune shows its own progress
    disable_progress_bar()
    if not ranks.is_main_process:
        progress.silence()
    key = training_key(recipe, stage, paths.data.parent, paths.base_model)
    resume = find_checkpoint(paths.checkpoints, key, ranks, refuse_if_taken_over)

    stop, saver = (
        SaveByTime(recipe.resources_of(stage).checkpoint_seconds),
        MarkComplete(
            key,
            refuse_if_taken_over,
            seconds_before=seconds_at(resume),
            limit=stage.trainer.get("save_total_limit", NUM_CHECKPOINTS),
        ),
    )
    plan = plan_hardware(
        recipe.hardware,
        int(stage.trainer["per_device_train_batch_size"]),
        int(stage.trainer.get("gradient_accumulation_steps", 1)),
    )
    with stop_repeated_faults(paths.output, ranks.process_index, lambda: stop.step):
        with Progress("train: preparing model and rows"):
            prepared = make_trainer(
                Context(
                    recipe,
                    stage,
                    paths,
                    plan,
                    world_size=ranks.num_processes,
                    is_main_process=ranks.is_main_process,
                    base_model_sha256=key["base_model_sha256"],
                    callbacks=(stop, saver, WriteProgress(paths.output / "progress.json")),
                )
            )
        trainer, facts = prepared.trainer, prepared.facts
        saver.seconds_before += prepared.setup_seconds
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        if ranks.is_main_process:
            record_attempt(paths.checkpoints, step_of(resume) if resume else 0)
            if resume:
                log.info("train: resuming from %s, next step is %d", resume.name, step_of(resume) + 1)

        with Progress("train: step", unit="steps") as steps:
            trainer.add_callback(LogLines(steps))
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)

    state = trainer.state
    if stop.stopped_at is not None:
        if ranks.is_main_process:
            log.info("train: stopped at step %d by a signal, checkpoint saved; run again to resume", stop.stopped_at)
        return STOPPED
    refuse_no_best(state, paths.checkpoints)
    state_dict = whole_state_dict(prepared.model, trainer)  # a collective: every rank takes part
    if ranks.is_main_process:
        refuse_if_taken_over()
        refuse_other_weights(state_dict, paths.checkpoints / f"checkpoint-{state.best_global_step}")
        seconds = saver.seconds()  # of all attempts, without the work that an interruption lost
        facts |= training_facts(state, facts, seconds)
        facts |= {
            "stage": stage.name,
            "world_size": ranks.num_processes,
            "hardware": {**asdict(plan), **facts.get("hardware", {})},
            "resumed_from_steps": [step for step in read_attempts(paths.checkpoints) if step],
            "provenance": {
                **provenance.collect(),
                "seed": recipe.seed,
                "recipe_sha256": sha256_json(recipe.model_dump(mode="json")),
                "data_sha256": key["data_sha256"],
                "started_at": started_at.isoformat(timespec="seconds"),
                "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            },
            "recipe": recipe.model_dump(mode="json"),
        }
        write_json(paths.output / "training_history.json", split_history(state.log_history))
        write_json(paths.output / "training_summary.json", facts)
        # last, because the manifest of best_model/ means that the training is complete
        with publish(paths.output / "best_model", key, {"best_step": state.best_global_step}) as partial:
            with Progress("train: saving the model"):
                save_model(prepared.model, state_dict, partial, plan.dtype)
            prepared.save_companions(partial)
        log.info(
            "train: best eval_loss %.4f at step %s of %d; %.1f rows/s",
            state.best_metric, state.best_global_step, state.global_step, facts["rows_per_second"],
        )  # fmt: skip
    ranks.wait_for_everyone()
    return 0


def join_process_group(stage: Stage) -> PartialState:
    """Join the process group that torchrun's environment describes."""
    timeout = timedelta(seconds=int(stage.trainer.get("ddp_timeout", DDP_TIMEOUT_SECONDS)))
    # without `cpu`, a rank on a machine without GPUs would not join any group
    ranks = PartialState(cpu=not torch.cuda.is_available(), timeout=timeout)
    assert ranks.num_processes == int(os.environ.get("WORLD_SIZE", "1"))
    return ranks


def find_checkpoint(
    checkpoints: Path, key: dict[str, Any], ranks: PartialState, refuse_if_taken_over: Callable[[], None]
) -> Path | None:
    """Return the last complete checkpoint.

    Rank 0 decides for all ranks, because on a network file system the others may still see an older listing. Raises
    UserError when the checkpoints belong to another training run.
    """
    choice: list[Path | None] = [None]
    if ranks.is_main_process:
        refuse_if_taken_over()
        checkpoints.mkdir(parents=True, exist_ok=True)
        refuse_other_checkpoints(checkpoints, key)
        remove_incomplete(checkpoints)
        choice = [latest_complete(checkpoints)]
    broadcast_object_list(choice)
    return choice[0]


def refuse_no_best(state: TrainerState, checkpoints: Path) -> None:
    """Raise UserError when the weights in memory are not those of the best evaluation.

    Trainer itself keeps the last weights when the best checkpoint is gone or every `eval_loss` was NaN.
    """
    if state.best_metric is None or not math.isfinite(state.best_metric):
        raise UserError(
            f"the best eval_loss is {state.best_metric}",
            "lower stages.0.trainer.learning_rate and look at the losses above",
        )
    if not (checkpoints / f"checkpoint-{state.best_global_step}").is_dir():
        raise UserError(
            f"checkpoint-{state.best_global_step} with the best eval_loss is gone from {checkpoints}",
            "delete the checkpoints and train again",
        )


def training_facts(state: TrainerState, facts: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the steps, rows and tokens of all attempts, and their rates over `seconds` of training."""
    rows = state.global_step * facts["effective_batch_size"]
    return {
        "num_steps": state.global_step,
        "samples_seen": rows,
        "tokens_seen": state.num_input_tokens_seen,
        "train_seconds": seconds,
        "rows_per_second": rows / seconds,
        "tokens_per_second": state.num_input_tokens_seen / seconds,
        "best_step": state.best_global_step,
        "best_eval_loss": state.best_metric,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def split_history(log_history: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return Trainer's log entries as the two lists of `training_history.json`."""
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
    """Append the step from which this attempt starts to `attempts.jsonl`."""
    with (checkpoints / "attempts.jsonl").open("a") as file:
        line = json.dumps({"from_step": from_step, "at": datetime.now(UTC).isoformat()})
        file.write(f"\n{line}\n")  # on a line of its own, whatever a full disk has left


def read_attempts(checkpoints: Path) -> list[int]:
    """Return the step from which every attempt started, 0 for a fresh start. Half lines are passed over."""
    steps: list[int] = []
    for line in (checkpoints / "attempts.jsonl").read_text(errors="replace").splitlines():
        with suppress(ValueError):
            steps.append(json.loads(line)["from_step"])
    return steps


def leave_process_group() -> None:
    """Close the process group, so that torchrun sees a clean exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
