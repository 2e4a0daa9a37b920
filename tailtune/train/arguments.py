"""From `stages.N.trainer` to a `trl.SFTConfig`: checked before anything runs, completed from the length of the run."""

import dataclasses
import math
import tempfile
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from tailtune.config import Truncation
from tailtune.errors import UserError, did_you_mean, one_line
from tailtune.recipe.schema import Recipe, Stage
from tailtune.train.hardware import HardwarePlan

SET_BY_TAILTUNE = {
    "output_dir": "the run's own directory is used",
    "seed": "set the recipe's `seed`",
    "data_seed": "set the recipe's `seed`",
    "bf16": "set `hardware.precision`",
    "fp16": "set `hardware.precision`",
    "completion_only_loss": "set the stage's `loss: answer` or `loss: all`",
    "assistant_only_loss": "set the stage's `loss: answer` or `loss: all`",
    "max_seq_length": "TRL calls it `max_length`",
    "load_best_model_at_end": "the best model by eval_loss is always kept",
    "metric_for_best_model": "the best model by eval_loss is always kept",
    "greater_is_better": "the best model by eval_loss is always kept",
    "use_cpu": "a GPU is used where there is one; hide it with CUDA_VISIBLE_DEVICES=''",
    "push_to_hub": "upload best_model/ after the run",
    "resume_from_checkpoint": "runs resume from their last complete checkpoint by themselves",
    "model_init_kwargs": "use `hardware.attention` and `hardware.precision`",
    "chat_template_path": "the template is part of the base model, and frozen",
    "eos_token": "the base model's own is used",
    "pad_token": "the base model's own is used",
    "save_only_model": "runs resume from their checkpoints, which takes the optimizer's state",
    "auto_find_batch_size": "set `batch_size`",
    "prediction_loss_only": "the best model is chosen by an evaluation that measures more",
    "trust_remote_code": "code of a model directory is not run",
    "local_rank": "torchrun sets it",
    **dict.fromkeys(("dataset_kwargs", "dataset_text_field"), "the recipe's `prompt` says how rows are read"),
}
POSITIVE = ("learning_rate", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
            "max_length", "per_device_eval_batch_size", "eval_steps", "save_steps", "logging_steps")  # fmt: skip
BEST_MODEL = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
CHOICES = {"truncation_mode": ("keep_start", "keep_end"), "save_strategy": ("steps", "epoch"),
           "eval_strategy": ("steps", "epoch")}  # fmt: skip
"""What TRL or Transformers would accept otherwise, or refuse only in training."""
DDP_TIMEOUT_SECONDS = 3600
"""How long ranks wait for rank 0 to save a large checkpoint."""
MAX_LENGTH = 1024
"""Tokens of a row unless the recipe sets `max_length`."""
NUM_EVALUATIONS = 10
"""Evaluations and checkpoints of a run, whatever its length."""
NUM_CHECKPOINTS = 2
"""Complete checkpoints that are kept unless the recipe sets `save_total_limit`: the best one and the last."""
NUM_LOG_LINES = 20


def check_trainer_values(recipe: Recipe) -> None:
    """Raise UserError for what tailtune itself refuses in a stage's `trainer`. Needs neither torch nor TRL."""
    for index, stage in enumerate(recipe.stages):
        for name, value in stage.trainer.items():
            where = f"stages.{index}.trainer.{name}"
            if name.startswith("hub_"):
                raise UserError(f"{where} cannot be set: {SET_BY_TAILTUNE['push_to_hub']}")
            if name in SET_BY_TAILTUNE:
                raise UserError(f"{where} cannot be set: {SET_BY_TAILTUNE[name]}")
            if name in ("eval_strategy", "save_strategy") and value in (False, "no"):
                raise UserError(f"{where} is 'no'", "leave it out: the best checkpoint by eval_loss becomes the model")
            if name in CHOICES and value not in CHOICES[name]:
                raise UserError(f"{where} is {value!r}", f"use {' or '.join(CHOICES[name])}")
            if not isinstance(value, int | float):
                continue
            if name == "max_steps" and value != -1 and value < 1:
                raise UserError(
                    f"{where} is {value}", "give a number above 0, or leave it out to train for whole epochs"
                )
            if name == "save_total_limit" and value < 2:
                raise UserError(f"{where} is {value}", "keep at least 2, the best checkpoint and the last")
            if math.isnan(value) or (name in POSITIVE and not 0 < value < math.inf):
                remedy = "give a finite number above 0" if name in POSITIVE else "give a finite number"
                raise UserError(f"{where} is {value}", remedy)


def check_trainer_arguments(recipe: Recipe) -> None:
    """Raise UserError when a stage's `trainer` would not be accepted by SFTConfig. Needs torch and TRL."""
    check_trainer_values(recipe)
    for index, stage in enumerate(recipe.stages):
        _check_names_and_types(stage.trainer, f"stages.{index}.trainer")
        _check_reporters(stage.trainer, f"stages.{index}.trainer")
        with tempfile.TemporaryDirectory() as folder:
            fixed = {"output_dir": folder, "bf16": False, "use_cpu": True, "report_to": []}
            config = _construct(stage, {**_evaluated_every(1), **_paired(stage.trainer), **fixed, **BEST_MODEL})
            with _refused(stage):
                _try_optimizer(config)


def sft_config(
    recipe: Recipe, stage: Stage, plan: HardwarePlan, *, output_dir: Path, num_train_rows: int, world_size: int
) -> Any:
    """Return the complete `SFTConfig` of a stage.

    Intervals for evaluation, checkpoints and log lines follow from the number of steps unless the recipe sets them.
    The learning rate is multiplied by the world size unless the stage has `scale_learning_rate: false`.
    """
    trainer = _paired(stage.trainer)
    steps = num_steps(trainer, plan, num_train_rows, world_size)
    interval = max(1, math.ceil(steps / NUM_EVALUATIONS))
    learning_rate = float(trainer.pop("learning_rate", 5e-5))
    fixed = {
        "learning_rate": learning_rate * (world_size if stage.scale_learning_rate else 1),
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "output_dir": str(output_dir),
        "seed": recipe.seed,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "use_cpu": plan.device == "cpu",
        "completion_only_loss": stage.loss == "answer",
        **BEST_MODEL,
        "save_total_limit": None,  # checkpoints.MarkComplete deletes them, once the new one is complete
    }
    defaults = {
        "max_length": MAX_LENGTH,
        "gradient_checkpointing": False,  # with it, the backward pass would go through the frozen layers too
        **_evaluated_every(interval),
        "logging_steps": max(1, steps // NUM_LOG_LINES),
        "report_to": ["tensorboard"],
        "include_num_input_tokens_seen": "non_padding",
        "ddp_timeout": DDP_TIMEOUT_SECONDS,
        "dataloader_pin_memory": plan.device != "cpu",
    }
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        trainer.pop(name, None)  # the hardware plan has taken both into account
    return _construct(stage, {**defaults, **trainer, **fixed})


def truncation(stage: Stage) -> Truncation:
    """How a stage cuts its rows; the defaults are those of SFTConfig. Imports no TRL."""
    return Truncation(stage.trainer.get("max_length", MAX_LENGTH), stage.trainer.get("truncation_mode") == "keep_end")


def num_steps(trainer: dict[str, Any], plan: HardwarePlan, num_train_rows: int, world_size: int) -> int:
    """Return the number of optimizer steps of a run, as Trainer counts them."""
    if int(trainer.get("max_steps", -1)) > 0:
        return int(trainer["max_steps"])
    batches = math.ceil(num_train_rows / (plan.per_device_train_batch_size * world_size))
    per_epoch = math.ceil(batches / plan.gradient_accumulation_steps)
    return math.ceil(float(trainer.get("num_train_epochs", 3)) * per_epoch)


def _evaluated_every(num_steps: int) -> dict[str, Any]:
    return {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": num_steps, "save_steps": num_steps}


def _paired(trainer: dict[str, Any]) -> dict[str, Any]:
    """The arguments with those of evaluations and checkpoints alike, as Trainer requires, where only one is given."""
    pairs = (("eval_steps", "save_steps"), ("eval_strategy", "save_strategy"))
    both = {
        missing: trainer[given]
        for pair in pairs
        for given, missing in (pair, pair[::-1])
        if given in trainer and missing not in trainer
    }
    return trainer | both


def _construct(stage: Stage, arguments: dict[str, Any]) -> Any:
    from trl import SFTConfig

    with _refused(stage), warnings.catch_warnings():
        # TRL's own default uses an old name of Transformers: nothing that a user could change
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
        return SFTConfig(**arguments)


def _try_optimizer(config: Any) -> None:
    """Make the optimizer, where it is one of torch's, and the schedule. Raises whatever they raise."""
    import torch
    from transformers import Trainer, get_scheduler

    optimizer, options = Trainer.get_optimizer_cls_and_kwargs(config)
    if not optimizer.__module__.startswith("torch."):
        return  # it may need a GPU, or the model
    made = optimizer([torch.nn.Parameter(torch.zeros(1))], **options)
    get_scheduler(config.lr_scheduler_type, made, 1, 10, scheduler_specific_kwargs=config.lr_scheduler_kwargs)


@contextmanager
def _refused(stage: Stage) -> Iterator[None]:
    """Raise UserError for any exception of Transformers and TRL in this block, apart from a lack of memory."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(
            f"stage '{stage.name}': trl.SFTConfig refuses the trainer arguments: {one_line(error, 400)}",
            "see the arguments of trl.SFTConfig",
        ) from None


def _check_names_and_types(trainer: dict[str, Any], where: str) -> None:
    from trl import SFTConfig

    hints = typing.get_type_hints(SFTConfig)
    known = [field.name for field in dataclasses.fields(SFTConfig)]
    for name, value in trainer.items():
        if name not in known:
            hint = did_you_mean(name, known, cutoff=0.6)
            remedy = "" if hint else "see the arguments of trl.SFTConfig"
            raise UserError(f"{where}.{name} is not an argument of trl.SFTConfig{hint}", remedy)
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=not isinstance(value, int))
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise UserError(f"{where}.{name} is {value!r}: {problem}", "use a value of that type") from None
        except (PydanticSchemaGenerationError, PydanticUserError):
            continue  # a type that pydantic cannot describe: SFTConfig itself judges the value


def _check_reporters(trainer: dict[str, Any], where: str) -> None:
    """Raise UserError for a `report_to` that Transformers does not know, or whose package is missing."""
    from transformers.integrations import integration_utils

    value = trainer.get("report_to") or []
    available = {*integration_utils.get_available_reporting_integrations()}
    available |= {"azure_ml"} if "mlflow" in available else set()  # the same package, of which Transformers lists one
    available |= {"flyte"} if integration_utils.is_flytekit_available() else set()  # Transformers does not list it
    known = sorted({*integration_utils.INTEGRATION_TO_CALLBACK, "none", "all"})
    for name in [value] if isinstance(value, str) else value:
        if name not in known:
            remedy = f"use one of {', '.join(known)}"
            raise UserError(f"{where}.report_to: '{name}' is not known{did_you_mean(name, known)}", remedy)
        if name not in ("none", "all", *available):
            raise UserError(
                f"{where}.report_to: the package of '{name}' is not installed",
                f"install it, also in the images, or use one of {', '.join(sorted(available))}",
            )
