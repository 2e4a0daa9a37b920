"""The commands that people type, on a real cluster: from `doctor` to a scheduled run, one after the other."""

import shutil

import pytest
from cluster_commands import RUN_SECONDS, command, pipeline, runs_of_schedule, submit, tailtune, wait_for

import pipeline_server

pytestmark = pytest.mark.cluster


def test_the_doctor_finds_nothing_that_would_stop_a_run(parameters: list[str]) -> None:
    assert tailtune("doctor", *parameters).returncode == 0


def test_the_cluster_would_accept_the_manifests_in_deploy() -> None:
    client = shutil.which("oc") or shutil.which("kubectl")
    if client is None:
        pytest.skip("neither oc nor kubectl is installed")
    servers = [f"deploy/components/pipeline-server/{store}/" for store in ("s3", "minio")]
    for folder in ("deploy/", *servers):
        assert command(client, "apply", "-k", folder, "--dry-run=server").returncode == 0


def test_a_run_succeeds(name: str, parameters: list[str]) -> None:
    run = submit(name, "--watch", "--timeout", str(RUN_SECONDS), *parameters)
    status = pipeline("--status", name)
    assert f"id: {run}" in status.stdout and "state: succeeded" in status.stdout
    assert name in pipeline("--runs").stdout
    assert pipeline("--watch", run).returncode == 0
    assert pipeline("--logs", name).returncode == 0
    assert pipeline("--retry", name).returncode == 2, "a run that has succeeded is not tried again"
    exported = pipeline("--export-job", "--run-name", name, *parameters)
    assert exported.returncode == 0 and f"/shared/models/{name}/recipe.json" in exported.stdout


def test_cancelling_another_run_deletes_its_job(name: str, parameters: list[str]) -> None:
    other = f"{name}-cancelled"
    submit(other, *parameters, "-p", "epochs=500")
    try:
        wait_for(lambda: tailtune("cancel", other, "--dry-run").stdout.strip())
    finally:
        done = pipeline("--cancel", other)
    assert done.returncode == 0 and "runs ended: 1" in done.stderr
    wait_for(lambda: not tailtune("cancel", other, "--dry-run").stdout.strip(), 600)
    watched = pipeline("--watch", other, "--timeout", "600")
    assert watched.returncode == 1 and "the run was cancelled" in watched.stderr
    assert pipeline("--retry", other).returncode == 0
    assert "runs ended: 1" in pipeline("--cancel", other).stderr


def test_no_orphaned_job_is_left(name: str) -> None:
    done = tailtune("gc", "--dry-run")
    assert done.returncode == 0 and name not in done.stdout


def test_a_schedule_that_is_created_twice_is_one_schedule_and_starts_runs(
    name: str, parameters: list[str], server: pipeline_server.PipelineServer
) -> None:
    schedule = f"{name}-schedule"
    for when in ("0 2 * * *", "every 1 minute"):
        assert pipeline("--schedule", when, "--schedule-name", schedule, *parameters).returncode == 0
    try:
        listed = [line for line in pipeline("--list-schedules").stdout.splitlines() if line.startswith(schedule)]
        assert len(listed) == 1 and "every 60 s" in listed[0]
        (run,) = wait_for(lambda: runs_of_schedule(server, schedule), 300)
    finally:
        assert pipeline("--unschedule", schedule, "--end-runs").returncode == 0
    assert server.call(server.client.get_run, run.run_id).state in pipeline_server.ENDED
    assert schedule not in pipeline("--list-schedules").stdout
