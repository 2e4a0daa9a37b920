"""Supervised fine-tuning on conversations with TRL: tail training where it is exact, else the whole model."""

from collections.abc import Sequence
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from tailtune.config import Truncation
from tailtune.kinds.chat.inference import load_tokenizer
from tailtune.kinds.chat.prompt import Encoded, encode_messages, row_messages, spells_special_tokens
from tailtune.log import log
from tailtune.parquet.split import read_split
from tailtune.progress import Progress, track
from tailtune.train.arguments import sft_config, truncation
from tailtune.train.callbacks import Metered
from tailtune.train.hardware import HardwarePlan
from tailtune.train.run import Context, Prepared
from tailtune.train.tail.tokenized_rows import IGNORED
from tailtune.train.tail.trainer import TailLoop, attach
from tailtune.train.weights import load_model, refuse_unknown_tokens, select_trainable


def make_trainer(context: Context) -> Prepared:
    """Return the trainer of a chat stage. Raises UserError for rows or arguments that cannot be trained on."""
    recipe, stage, plan = context.recipe, context.stage, context.plan
    tokenizer = load_tokenizer(context.paths.base_model)
    conversations = [
        [row_messages(recipe.prompt, row) for row in rows.to_pylist()]
        for rows in read_split(recipe, context.paths.data)
    ]
    train_rows, validation_rows = (
        [encode_messages(tokenizer, each) for each in track(rows, "train: tokenizing row", "rows")]
        for rows in conversations
    )
    config = sft_config(
        recipe,
        stage,
        plan,
        output_dir=context.paths.checkpoints,
        num_train_rows=len(train_rows),
        world_size=context.world_size,
    )
    num_truncated = sum(count_truncated(rows, truncation(stage)) for rows in (train_rows, validation_rows))
    model = load_model(context.paths.base_model, plan, stage.train_weights)
    refuse_unknown_tokens(model, (token for rows in (train_rows, validation_rows) for row in rows for token in row.ids))
    num_parameters = model.num_parameters()  # before untying adds the head's own copy
    select_trainable(model, stage.train_weights)
    num_trainable = model.num_parameters(only_trainable=True)
    full = FullModelTrainer(
        model=model,
        args=config,
        train_dataset=tokenized(train_rows, stage.loss),
        eval_dataset=tokenized(validation_rows, stage.loss),
        processing_class=tokenizer,
        callbacks=list(context.callbacks),
    )
    facts: dict[str, Any] = {
        "num_train_rows": len(train_rows),
        "num_validation_rows": len(validation_rows),
        "learning_rate": config.learning_rate,
        "num_train_epochs": config.num_train_epochs,
        "effective_batch_size": config.per_device_train_batch_size
        * config.gradient_accumulation_steps
        * context.world_size,
        "num_parameters": num_parameters,
        "num_trainable_parameters": num_trainable,
        "trainable_share": num_trainable / num_parameters,
        "num_truncated_rows": num_truncated,
        "num_rows_with_special_tokens": sum(
            spells_special_tokens(tokenizer, each) for rows in conversations for each in rows
        ),
    }
    if context.is_main_process:
        log_plan(plan, facts, context.world_size, config.max_length, scaled=stage.scale_learning_rate)
    tail = attach(
        full,
        stage.tail,
        dtype=plan.dtype,
        cache_dir=context.paths.hidden_state_cache,
        base_model_sha256=context.base_model_sha256,
        callbacks=list(context.callbacks),
        trainer_class=TailTrainer,
    )
    trainer: FullModelTrainer | TailTrainer = tail or full
    facts["tail_training"] = tail.facts if tail else None
    facts["hardware"] = {"attention": model.config._attn_implementation} | {
        name: getattr(trainer.args, name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    }

    def save_companions(directory: Any) -> None:
        tokenizer.save_pretrained(directory)
        if recipe.prompt.system:
            (directory / "system_prompt.txt").write_text(recipe.prompt.system, encoding="utf-8")

    return Prepared(trainer, model, save_companions, facts, tail.facts["fill_seconds"] if tail else 0.0)


class TailTrainer(Metered, TailLoop):
    """Trains the last layers on hidden states that were computed once."""


class FullModelTrainer(Metered, SFTTrainer):
    """Runs the whole model in every step. Its evaluation loss is per label, like that of tail training.

    Trainer's own loss is a mean over batches, and with several ranks some rows count twice to fill the last batches.
    By that loss, a different checkpoint could be the best.
    """

    def get_eval_dataloader(self, eval_dataset: datasets.Dataset | None = None) -> DataLoader[Any]:
        """Return a data loader with full batches on every rank, padded with rows without labels, which do not count."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if missing := -len(rows) % (self.args.eval_batch_size * self.args.world_size):
            row = rows[0] | {"labels": [IGNORED] * len(rows[0]["labels"])}
            filler = datasets.Dataset.from_list([row] * missing, features=rows.features)
            rows = datasets.concatenate_datasets([rows, filler])
        return super().get_eval_dataloader(rows)

    def evaluation_loop(
        self, dataloader: DataLoader[Any], *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        self._evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # loss sum, number of labels
        with Progress("train: evaluating batch", len(dataloader), "batches") as self._evaluating:
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        loss_sum, num_labels = self.accelerator.reduce(self._evaluated).tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = loss_sum / max(num_labels, 1)
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        num_labels = (inputs["labels"][:, 1:] != IGNORED).sum()
        loss_sum = torch.where(num_labels > 0, loss.double() * num_labels, 0.0)  # the mean over no labels may be NaN
        self._evaluated += torch.stack([loss_sum, num_labels])
        self._evaluating.update()
        return loss, logits, labels

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no model card: TRL's names neither the base model nor the data, but the report does."""


def tokenized(rows: Sequence[Encoded], loss: str) -> datasets.Dataset:
    """Return the rows with their labels, those of the answers or of all tokens; TRL only truncates such rows."""
    labels = [row.labels if loss == "answer" else row.ids for row in rows]
    return datasets.Dataset.from_dict({"input_ids": [row.ids for row in rows], "labels": labels})


def count_truncated(rows: Sequence[Encoded], truncation: Truncation) -> int:
    """Count the rows that are cut. Raises UserError when a row would lose its whole answer."""
    return sum(len(row.cut(truncation).ids) < len(row.ids) for row in rows)


def log_plan(
    plan: HardwarePlan, facts: dict[str, Any], world_size: int, max_length: int | None, *, scaled: bool
) -> None:
    """Log what is about to run, in two to four lines."""
    log.info("train: %s", plan.describe())
    log.info(
        "train: %s of %s parameters are trainable (%.2f %%), %d ranks, %d training rows, %d validation rows",
        f"{facts['num_trainable_parameters']:,}", f"{facts['num_parameters']:,}", 100 * facts["trainable_share"],
        world_size, facts["num_train_rows"], facts["num_validation_rows"],
    )  # fmt: skip
    learning_rate = facts["learning_rate"]
    if scaled and world_size > 1:
        log.info("train: learning rate %g = %g x %d ranks", learning_rate, learning_rate / world_size, world_size)
    if facts["num_truncated_rows"]:
        log.info(
            "train: %d rows are longer than max_length %d and are truncated", facts["num_truncated_rows"], max_length
        )
    if facts["num_rows_with_special_tokens"]:
        log.info(
            "train: %d rows spell special tokens of the model, such as <|im_end|>; they are trained on as text",
            facts["num_rows_with_special_tokens"],
        )
