"""The train step's own part: what it does not try again."""

from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_recipe, write_rows

from tailtune.jobs import follow, kubernetes
from tailtune.jobs.job import BadInput, Job, JobFailed
from tailtune.jobs.train_step import train_stage
from tailtune.parquet.write import write_parquet
from tailtune.run import Run


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[JobFailed]:
    """What the next jobs fail with; jobs that were made are taken from it."""
    errors: list[JobFailed] = []

    def run_job(job: Job, there: Any) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(follow, "run_job", run_job)
    monkeypatch.setattr(kubernetes, "KubernetesClient", object)
    return errors


def step(folder: Path, pipeline_run: str = "first-id") -> None:
    """An attempt of a cluster's train step."""
    recipe = tiny_recipe(**{"resources.num_nodes": 2})
    places = {f"{kind}_dir": folder / kind / "mine" for kind in ("data", "models", "workspace")}
    run = Run(name="mine", recipe=recipe, local=False, pipeline_run=pipeline_run, **places)
    rows = folder / "rows.jsonl"
    write_parquet(rows if rows.is_file() else write_rows(rows), run.parquet_dir, recipe.data)
    (folder / "base").mkdir(exist_ok=True)
    (folder / "base" / "config.json").write_text("{}")
    train_stage(run, run.parquet_dir, folder / "base", "registry/trainer:1")


def test_bad_input_makes_no_second_job_in_the_same_run(tmp_path: Path, attempts: list[JobFailed]) -> None:
    attempts += [BadInput("max_length 4 leaves no room; raise it"), BadInput("another run looks again")]
    for _ in range(3):
        with pytest.raises(BadInput, match="max_length 4 leaves no room; raise it"):
            step(tmp_path)
    assert len(attempts) == 1, "one job for three attempts"
    with pytest.raises(BadInput, match="another run looks again"):
        step(tmp_path, "second-id")


def test_other_failures_are_tried_again(tmp_path: Path, attempts: list[JobFailed]) -> None:
    attempts += [JobFailed("the node was taken away"), JobFailed("and once more")]
    for words in ("taken away", "once more"):
        with pytest.raises(JobFailed, match=words):
            step(tmp_path)
    assert not attempts
