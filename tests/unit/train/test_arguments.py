"""Trainer arguments are judged before anything runs."""

import json
from typing import Any

import pytest
from conftest import tiny_recipe

from tailtune.errors import UserError
from tailtune.train.arguments import check_trainer_arguments


def check(**trainer: Any) -> None:
    check_trainer_arguments(tiny_recipe(**{f"stages.0.trainer.{name}": value for name, value in trainer.items()}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"save_only_model": True}, "save_only_model cannot be set"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size cannot be set: set `batch_size`"),
    ({"prediction_loss_only": True}, "prediction_loss_only cannot be set"),
    ({"trust_remote_code": True}, "trust_remote_code cannot be set"),
    ({"local_rank": 3}, "local_rank cannot be set"),
    ({"dataset_kwargs": {"skip_prepare_dataset": True}}, "dataset_kwargs cannot be set"),
    ({"hub_model_id": "a/b"}, "hub_model_id cannot be set: upload best_model/"),
    ({"hub_token": "secret"}, "is no place for secrets"),
    ({"save_strategy": "best"}, "save_strategy is 'best'; use steps or epoch"),
    ({"eval_strategy": "sometimes"}, "eval_strategy is 'sometimes'; use steps or epoch"),
    ({"eval_strategy": "epoch", "save_strategy": "steps"}, "requires the save and eval strategy to match"),
    ({"eval_steps": 10, "save_steps": 15}, "saving steps to be a round multiple"),
    ({"truncation_mode": "middle"}, "truncation_mode is 'middle'; use keep_start or keep_end"),
    ({"optim": "adamw_bnb_8bit"}, "bitsandbytes"),
    ({"optim": "galore_adamw"}, "galore"),
    ({"optim_args": "a=b=c"}, "refuses the trainer arguments: too many values to unpack"),
    ({"adam_beta1": 7.0}, "Invalid beta parameter at index 0: 7.0"),
    ({"lr_scheduler_kwargs": {"a": 1}}, "unexpected keyword argument 'a'"),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
    ({"accelerator_config": {"x": 1}}, "unexpected keyword argument 'x'"),
]


@pytest.mark.parametrize(("trainer", "problem"), REFUSED, ids=lambda value: json.dumps(value)[:50])
def test_arguments_that_training_could_not_use_are_refused(trainer: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as raised:
        check(**trainer)
    assert problem in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    "trainer",
    [{}, {"eval_strategy": "epoch"}, {"save_steps": 7}, {"optim": "sgd", "lr_scheduler_type": "cosine"},
     {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}}, {"optim": "adafactor"},
     {"max_length": None}, {"truncation_mode": "keep_end"}, {"lr_scheduler_type": "reduce_lr_on_plateau"}],
    ids=str,
)  # fmt: skip
def test_other_arguments_are_not(trainer: dict[str, Any]) -> None:
    check(**trainer)
