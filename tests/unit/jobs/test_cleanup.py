"""Ending and deleting jobs with and without the rights of deploy/cluster-admin."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes_server import EDIT_ROLE, EVERYBODY, RUNNER_ROLE, Server, cluster

from components.stop_jobs import stop_jobs
from tailtune.errors import UserError
from tailtune.jobs.cleanup import ASK_CLUSTER_ADMIN, NotAllowedToListError, cancel, collect_garbage
from tailtune.jobs.job import Job
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.objects import JOB_KINDS, Jobs, choose_kind
from tailtune.jobs.train_step import make_job
from tailtune.log import log
from tailtune.run import Run


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with cluster(tmp_path / "server") as running:
        running.faults.pending.set()  # no pod of a job starts
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@pytest.fixture
def job(make_run: Callable[..., Run]) -> Job:
    run = make_run("mine").model_copy(update={"local": False})
    return make_job(run, run.parquet_dir, run.base_model_dir, run.models_dir / "recipe.json")


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_deploy_cluster_admin_grants_the_runner_a_jobs_whole_life(server: Server, job: Job, kind: str) -> None:
    if kind == "trainjob":
        server.install_trainer(only=True)
    server.allowed = [*EVERYBODY, *RUNNER_ROLE]
    with pytest.raises(UserError, match="this account is not allowed to create"):
        choose_kind(KubernetesClient(), kind)
    server.apply_cluster_admin()
    jobs, _ = choose_kind(KubernetesClient(), kind)
    jobs.create(job)
    jobs.adopt(job.name)
    jobs.write_progress(job.name, "{}")
    assert jobs.get(job.name) and jobs.find()
    jobs.pods(job.name)
    assert jobs.delete(job.name)


def test_people_with_the_role_edit_may_delete_jobs_but_not_create_them(server: Server, job: Job) -> None:
    Jobs(KubernetesClient(), JOB_KINDS["pytorchjob"]).create(job)
    server.log_in(*EDIT_ROLE)
    for refused in (lambda: cancel(KubernetesClient(), run="mine"), lambda: collect_garbage(KubernetesClient())):
        with pytest.raises(NotAllowedToListError) as error:
            refused()
        assert 'User "alice" cannot list resource "pytorchjobs"' in error.value.problem
        assert error.value.remedy == ASK_CLUSTER_ADMIN
    server.apply_cluster_admin()
    with pytest.raises(UserError, match="this account is not allowed to create PyTorchJob"):
        choose_kind(KubernetesClient(), "auto")
    assert collect_garbage(KubernetesClient()) == []
    assert cancel(KubernetesClient(), run="mine") == [job.name]


def test_the_last_step_does_not_fail_over_a_right_that_no_job_needed(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    caplog.set_level("INFO", "tailtune")
    server.allowed = [*EVERYBODY, *RUNNER_ROLE]
    stop_jobs.python_func(job_id="one")
    assert "stop: there is no job to delete: this account is not allowed to list training jobs" in caplog.text
    server.token = "another"
    with pytest.raises(SystemExit):  # any other failure is one
        stop_jobs.python_func(job_id="one")
