"""The train step: which failures are retried."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_recipe, write_rows
from kubernetes_server import Server, StepPod

from tailtune.errors import UserError
from tailtune.jobs import follow
from tailtune.jobs.job import Job, JobFailed, PermanentFailure
from tailtune.jobs.pods import pod_template
from tailtune.jobs.train_step import make_job, train_stage
from tailtune.parquet.write import write_parquet
from tailtune.run import Run


@pytest.fixture
def attempts(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[JobFailed]:
    """The errors with which the next jobs fail; each job takes one from the list."""
    errors: list[JobFailed] = []

    def run_job(job: Job, cluster: Any) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(follow, "run_job", run_job)
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


@pytest.fixture
def start_pod(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes this process the pod of an attempt at the train step."""

    def start(attempt: int, pipeline_run: str = "first-id") -> None:
        pod = StepPod(pipeline_run, "train-stage", attempt, [], phase="Running")
        server.pods_of_steps.append(pod)
        monkeypatch.setenv("KFP_POD_NAME", pod.name)

    return start


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("given", "expected"), [({}, "INFO"), ({"NCCL_DEBUG": "WARN"}, "WARN")])
def test_nccl_reports_why_it_fails(tmp_path: Path, local: bool, given: dict[str, str], expected: str) -> None:
    recipe = tiny_recipe(**{"resources.environment": given})
    run = Run(name="mine", recipe=recipe, local=local, pipeline_run="", data_dir=tmp_path, models_dir=tmp_path,
              workspace_dir=tmp_path)  # fmt: skip
    assert make_job(run, tmp_path, tmp_path, tmp_path / "recipe.json").environment["NCCL_DEBUG"] == expected


def test_a_job_has_the_resources_of_its_stage(tmp_path: Path) -> None:
    own = {"num_nodes": 3, "ranks_per_node": 2, "gpu": "", "memory": "80Gi", "queue": "large", "deadline_seconds": 60,
           "environment": {"OMP_NUM_THREADS": 4}, "node_selector": {"pool": "b"}}  # fmt: skip
    recipe = tiny_recipe(**{"resources.cpu": 5, "resources.memory": "40Gi", "stages.0.resources": own})
    run = Run(name="mine", recipe=recipe, local=False, data_dir=tmp_path, models_dir=tmp_path, workspace_dir=tmp_path)
    job = make_job(run, tmp_path, tmp_path, tmp_path / "recipe.json")
    assert (job.num_nodes, job.ranks_per_node, job.deadline_seconds) == (3, 2, 60)
    assert job.environment["OMP_NUM_THREADS"] == "4" and job.pod is not None
    assert (job.pod.gpu, job.pod.memory, job.pod.queue, job.pod.node_selector) == ("", "80Gi", "large", {"pool": "b"})
    assert job.pod.cpu == "5", "the recipe's"


def test_every_node_of_a_cluster_writes_its_log_to_the_workspace(tmp_path: Path) -> None:
    directories = {f"{kind}_dir": tmp_path / kind for kind in ("data", "models", "workspace")}
    run = Run(name="mine", recipe=tiny_recipe(), local=False, **directories)
    job = make_job(run, tmp_path, tmp_path, tmp_path / "recipe.json")
    (container,) = pod_template(job, "main")["spec"]["containers"]
    assert f"--log-dir={tmp_path / 'workspace' / 'logs'}" in container["command"]


def test_other_checkpoints_are_refused_before_a_job_is_created(tmp_path: Path, attempts: list[JobFailed]) -> None:
    checkpoint = tmp_path / "models" / "mine" / "checkpoints" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").write_text("{}")
    (checkpoint / "key.json").write_text('{"version": 0}')
    with pytest.raises(UserError, match=r"were made with other settings \(.*version"):
        step(tmp_path)
    (checkpoint / "key.json").unlink()
    with pytest.raises(UserError, match="were made by an earlier version of tailtune"):
        step(tmp_path)


def test_bad_input_is_not_retried_in_the_same_run(
    tmp_path: Path, attempts: list[JobFailed], start_pod: Callable[..., None]
) -> None:
    attempts += [
        PermanentFailure("max_length 4 leaves no room", "raise it"),
        PermanentFailure("another run tries again"),
    ]
    for attempt in (1, 2, 3):
        start_pod(attempt)
        with pytest.raises(PermanentFailure, match="max_length 4 leaves no room; raise it"):
            step(tmp_path)
    assert len(attempts) == 1, "one job for three attempts"
    with pytest.raises(PermanentFailure, match=r"raise it; .* again only by python pipeline\.py --retry first-id"):
        step(tmp_path)
    start_pod(2, "second-id")
    with pytest.raises(PermanentFailure, match="another run tries again"):
        step(tmp_path, "second-id")


def test_a_permanent_failure_is_tried_again_when_a_person_retries_the_run(
    tmp_path: Path, attempts: list[JobFailed], start_pod: Callable[..., None]
) -> None:
    """At once, and not only by the first attempt of the retry, if that one fails for another reason."""
    attempts += [PermanentFailure("out of memory"), JobFailed("a node was lost"), PermanentFailure("and again")]
    for attempt, message in ((1, "out of memory"), (2, "out of memory"), (1, "a node was lost"), (2, "and again")):
        start_pod(attempt)
        with pytest.raises(JobFailed, match=message):
            step(tmp_path)
    assert not attempts


def test_other_failures_are_retried(tmp_path: Path, attempts: list[JobFailed], start_pod: Callable[..., None]) -> None:
    attempts += [JobFailed("the node was taken away"), JobFailed("taken away once more")]
    for attempt, message in ((1, "the node was taken away"), (2, "taken away once more")):
        start_pod(attempt)
        with pytest.raises(JobFailed, match=message):
            step(tmp_path)
    assert not attempts
