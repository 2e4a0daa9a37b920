"""Tail training under torchrun: two ranks, a run killed while it fills the cache, and a second run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_recipe
from safetensors.torch import load_file
from tail_runs import furthest, relative

from tailtune.fetch.model import provide_base_model
from tailtune.jobs.train_step import train_stage
from tailtune.parquet.write import write_parquet
from tailtune.run import Run

SHORT_RUN = {
    "stages.0.trainer.max_steps": 8,
    "stages.0.trainer.logging_steps": 1,
    "stages.0.trainer.adam_epsilon": 1e-6,
    "stages.0.scale_learning_rate": False,
}


ONE_RANK = {"ranks_per_node": 1, "batch_size": 4}


def make(root: Path, name: str, **overrides: Any) -> Run:
    return Run(name=name, recipe=tiny_recipe(**{**SHORT_RUN, **overrides}), local=True, data_dir=root / name / "data",
               models_dir=root / name / "models", workspace_dir=root / name / "workspace")  # fmt: skip


def losses(run: Run, kind: str = "train") -> list[float]:
    history = json.loads((run.models_dir / "training_history.json").read_text())
    return [entry["loss" if kind == "train" else "eval_loss"] for entry in history[kind]]


@pytest.mark.slow
def test_two_ranks_and_micro_batches_over_the_end_of_an_epoch(prepared: Path, tmp_path: Path) -> None:
    """With larger batches, other rows fill up the last step of an epoch; no rows fill up an evaluation."""
    steps = {"stages.0.trainer.max_steps": 14, "stages.0.trainer.gradient_accumulation_steps": 2}
    settings = {**steps, "stages.0.loss": "all"}
    runs = [make(tmp_path, "tail", **settings), make(tmp_path, "whole", **settings, **{"stages.0.tail.mode": "off"})]
    for run in runs:
        train_stage(run, prepared / "data", prepared / "base")
    tail, whole = (load_file(run.best_model_dir / "model.safetensors") for run in runs)
    for kind in ("train", "eval"):
        assert relative(losses(runs[1], kind), losses(runs[0], kind)) <= 1e-5
    assert furthest(whole, tail) <= 1e-5


def test_two_ranks_train_the_same_as_the_whole_model_on_one(prepared: Path, tmp_path: Path) -> None:
    tail, whole = make(tmp_path, "tail"), make(tmp_path, "whole", **ONE_RANK, **{"stages.0.tail.mode": "off"})
    train_and_compare(prepared, [tail, whole])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["answer", "all"])
def test_two_ranks_train_the_same_as_one_rank_and_as_the_whole_model(loss: str, prepared: Path, tmp_path: Path) -> None:
    settings = {"stages.0.loss": loss}
    tail, one = make(tmp_path, "tail", **settings), make(tmp_path, "one", **settings, **ONE_RANK)
    whole = make(tmp_path, "whole", **settings, **{"stages.0.tail.mode": "off"})
    train_and_compare(prepared, [tail, whole, one])


MESSAGES = {
    "data.columns": {"turns": "{turns}"}, "data.split_by": "turns",
    "prompt.user": None, "prompt.assistant": None, "prompt.messages": "turns",
}  # fmt: skip


@pytest.mark.slow
def test_conversations_train_the_same_as_the_whole_model(tmp_path: Path) -> None:
    """From the rows to the weights, with conversations of up to three answers, some of them cut."""
    turns = [
        [{"role": role, "content": f"{role} {i} in turn {turn}: {i * turn % 7}"}
         for turn in range(i % 3 + 1) for role in ("user", "assistant")]
        for i in range(40)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns))
    settings = {**MESSAGES, "stages.0.trainer.max_length": 70, "stages.0.trainer.max_steps": 3, **ONE_RANK}
    tail, whole = make(tmp_path, "tail", **settings), make(tmp_path, "w", **settings, **{"stages.0.tail.mode": "off"})
    recipe = tail.recipe
    write_parquet(tmp_path / "rows.jsonl", tmp_path / "data", recipe.data, recipe.prompt)
    provide_base_model(recipe, tmp_path / "data", tmp_path / "base")
    train_and_compare(tmp_path, [tail, whole])
    assert json.loads((tail.models_dir / "training_summary.json").read_text())["num_truncated_rows"] > 0


def train_and_compare(prepared: Path, runs: list[Run]) -> None:
    """Train all runs, and expect the losses and weights of the first one from the others."""
    for run in runs:
        train_stage(run, prepared / "data", prepared / "base")
    first, *others = (load_file(run.best_model_dir / "model.safetensors") for run in runs)
    for run, weights in zip(runs[1:], others, strict=True):
        assert relative(losses(run), losses(runs[0])) <= 1e-5
        assert furthest(weights, first) <= 1e-5
    summaries = [json.loads((run.models_dir / "training_summary.json").read_text()) for run in runs]
    assert [bool(s["tail_training"]) for s in summaries] == [r.recipe.stages[0].tail.mode != "off" for r in runs]
    assert len({s["tokens_seen"] for s in summaries}) == 1


@pytest.mark.slow
def test_a_run_killed_while_it_fills_the_cache_resumes_where_it_stopped(prepared: Path, tmp_path: Path) -> None:
    """Hidden states that are in the cache already are not computed again; a second run computes none."""
    command = [sys.executable, "-c", FILL, str(prepared), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env={**environment, "SLOW": "0.5"}, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("cache/*/*.states"))) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_written = len(list(tmp_path.glob("cache/*/*.states")))
    second, third = (
        json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(2)
    )
    assert 3 <= num_written < second["num_shards"]
    assert second["computed_shards"] == second["num_shards"] - num_written
    assert third["computed_shards"] == 0


FILL = """
import itertools, json, os, sys, time
from pathlib import Path
from tail_runs import dataset, new_model, new_rows
from tailtune.train.tail import cache
from tailtune.train.tail.decoder import SplitDecoder
from tailtune.train.tail.tokenized_rows import TokenizedRows
from tailtune.recipe.schema import LastLayers
from tailtune.train.weights import select_trainable

cache.SHARD_TOKENS = {"cpu": 20}
model = new_model("llama")
select_trainable(model, LastLayers(last_layers=2))
data = dataset(new_rows(60))
rows = TokenizedRows(data["input_ids"][:], data["labels"][:])
frozen_layers = cache.FrozenLayers(SplitDecoder(model), rows)
own_hidden_states, calls = frozen_layers.own_hidden_states, itertools.count()
def slow(row_indices):
    next(calls)
    time.sleep(float(os.environ.get("SLOW", "0")))
    return own_hidden_states(row_indices)
frozen_layers.own_hidden_states = slow
filled = cache.HiddenStateCache(Path(sys.argv[2]) / "cache", {}, frozen_layers, model.dtype)
filled.fill()
print(json.dumps({"num_shards": len(filled.shards), "computed_shards": next(calls)}))
"""
