"""The train step: which failures are retried."""

import time
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_recipe, write_rows

from tailtune.errors import UserError
from tailtune.jobs import follow, kubernetes
from tailtune.jobs.job import Job, JobFailed, PermanentFailure
from tailtune.jobs.train_step import STEP_RETRY_SECONDS, make_job, train_stage
from tailtune.parquet.write import write_parquet
from tailtune.run import Run


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[JobFailed]:
    """The errors with which the next jobs fail; each job takes one from the list."""
    errors: list[JobFailed] = []

    def run_job(job: Job, cluster: Any) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(follow, "run_job", run_job)
    monkeypatch.setattr(kubernetes, "KubernetesClient", object)
    monkeypatch.setattr(kubernetes, "pipeline_run_is_active", lambda run_id: False)
    return errors


def step(folder: Path, pipeline_run: str = "first-id") -> None:
    """Attempt the train step on a cluster."""
    recipe = tiny_recipe(**{"resources.num_nodes": 2})
    directories = {f"{kind}_dir": folder / kind / "mine" for kind in ("data", "models", "workspace")}
    run = Run(name="mine", recipe=recipe, local=False, pipeline_run=pipeline_run, **directories)
    rows = folder / "rows.jsonl"
    write_parquet(rows if rows.is_file() else write_rows(rows), run.parquet_dir, recipe.data)
    (folder / "base").mkdir(exist_ok=True)
    (folder / "base" / "config.json").write_text("{}")
    train_stage(run, run.parquet_dir, folder / "base")


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("given", "expected"), [({}, "INFO"), ({"NCCL_DEBUG": "WARN"}, "WARN")])
def test_nccl_reports_why_it_fails(tmp_path: Path, local: bool, given: dict[str, str], expected: str) -> None:
    recipe = tiny_recipe(**{"resources.environment": given})
    run = Run(name="mine", recipe=recipe, local=local, pipeline_run="", data_dir=tmp_path, models_dir=tmp_path,
              workspace_dir=tmp_path)  # fmt: skip
    assert make_job(run, tmp_path, tmp_path, tmp_path / "recipe.json").environment["NCCL_DEBUG"] == expected


def test_bad_input_is_not_retried_in_the_same_run(tmp_path: Path, attempts: list[JobFailed]) -> None:
    attempts += [
        PermanentFailure("max_length 4 leaves no room", "raise it"),
        PermanentFailure("another run tries again"),
    ]
    for _ in range(3):
        with pytest.raises(PermanentFailure, match="max_length 4 leaves no room; raise it"):
            step(tmp_path)
    assert len(attempts) == 1, "one job for three attempts"
    with pytest.raises(PermanentFailure, match="another run tries again"):
        step(tmp_path, "second-id")


def test_a_permanent_failure_is_tried_again_when_a_person_retries_the_run(
    tmp_path: Path, attempts: list[JobFailed], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts += [PermanentFailure("out of memory"), PermanentFailure("and again")]
    with pytest.raises(PermanentFailure, match="out of memory"):
        step(tmp_path)
    later = time.time() + STEP_RETRY_SECONDS
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(PermanentFailure, match="and again"):
        step(tmp_path)


def test_a_retried_step_leaves_the_directories_to_an_active_run_of_the_same_name(
    tmp_path: Path, attempts: list[JobFailed], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts += [JobFailed("the node was taken away")]
    with pytest.raises(JobFailed):
        step(tmp_path, "second-id")
    recipe_path = tmp_path / "models" / "mine" / "recipe.json"
    recipe_path.write_text("of the second run")
    monkeypatch.setattr(kubernetes, "pipeline_run_is_active", lambda run_id: run_id == "second-id")
    with pytest.raises(UserError, match="run 'mine' is already in progress, as pipeline run second-id"):
        step(tmp_path, "first-id")
    assert recipe_path.read_text() == "of the second run"


def test_other_failures_are_retried(tmp_path: Path, attempts: list[JobFailed]) -> None:
    attempts += [JobFailed("the node was taken away"), JobFailed("taken away once more")]
    for message in ("the node was taken away", "taken away once more"):
        with pytest.raises(JobFailed, match=message):
            step(tmp_path)
    assert not attempts
