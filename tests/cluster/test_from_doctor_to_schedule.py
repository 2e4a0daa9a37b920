"""The commands that people type, on a real cluster: from `doctor` to a scheduled run, one after the other.

    pytest --cluster tests/cluster

needs a login (KUBECONFIG) to a project with a pipeline server, and the images of deploy/. How long it takes depends on
the cluster; the runs are tiny and use only the CPU. The pipeline's image has to contain a data set, or
--cluster-parameter data_source= names one that the cluster can reach. Only runs, models and data remain afterwards, all
named clustertest-….
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipeline_server

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "base_model=small", "data_source=embedded", "epochs=1", "num_nodes=2", "ranks_per_node=1",
    "model.small.pretrain_steps=20", "evaluation.num_generated_answers=4", "generation.max_new_tokens=8",
    'gpu=""', 'resources.cpu="2"', "resources.cpu_request=200m", "resources.memory=4Gi",
    "resources.memory_request=1Gi", "gate.0.threshold=9", "gate.1.threshold=9", "gate.2.threshold=0",
)  # fmt: skip
"""Parameters of a run that needs few resources and passes its gate."""
RUN_SECONDS = 3600
"""How long a tiny run may take, from the queue to its report."""
POLL_SECONDS = float(os.environ.get("TAILTUNE_TEST_POLL_SECONDS", "10"))


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in the project's root. Its output is printed, and shown if the test fails."""
    done = subprocess.run(arguments, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                          capture_output=True)  # fmt: skip
    print(f"$ {' '.join(arguments)}\n{done.stdout}{done.stderr}status {done.returncode}")
    return done


def pipeline(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return command(sys.executable, "pipeline.py", *arguments)


def tailtune(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return command(sys.executable, "-c", "from tailtune.cli import main; main()", *arguments)


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    give_up_at = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < give_up_at, f"not within {seconds:.0f} s"
        time.sleep(POLL_SECONDS)
    return result


@pytest.fixture(scope="module")
def name() -> str:
    return f"clustertest-{int(time.time())}"


@pytest.fixture(scope="module")
def parameters(request: pytest.FixtureRequest) -> list[str]:
    given = [*TINY, *request.config.getoption("--cluster-parameter")]
    return [part for parameter in given for part in ("-p", parameter)]


@pytest.fixture(scope="module")
def server() -> pipeline_server.PipelineServer:
    """kfp's client, to find the runs of a schedule."""
    return pipeline_server.PipelineServer(pipeline_server.find_connection(None, None))


def runs_of_schedule(server: pipeline_server.PipelineServer, name: str) -> list[Any]:
    schedule_ids = [schedule.recurring_run_id for schedule in server.schedules() if schedule.display_name == name]
    runs = server.call(server.client.list_runs, page_size=50, sort_by="created_at desc",
                        namespace=server.connection.namespace).runs or []  # fmt: skip
    return [run for run in runs if run.recurring_run_id in schedule_ids]


def test_the_doctor_finds_nothing_that_would_stop_a_run(parameters: list[str]) -> None:
    assert tailtune("doctor", *parameters).returncode == 0


def test_the_cluster_would_accept_the_manifests_in_deploy() -> None:
    client = shutil.which("oc") or shutil.which("kubectl")
    if client is None:
        pytest.skip("neither oc nor kubectl is installed")
    assert command(client, "apply", "-k", "deploy/", "--dry-run=server").returncode == 0


def test_a_run_succeeds(name: str, parameters: list[str]) -> None:
    done = pipeline("--submit", "--watch", "--timeout", str(RUN_SECONDS), "--run-name", name, *parameters)
    assert done.returncode == 0, done.stderr
    run = re.split(r"[/\s]", done.stdout.strip())[-1]  # the run's address ends in its id
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
    assert pipeline("--submit", "--run-name", other, *parameters, "-p", "epochs=500").returncode == 0
    try:
        wait_for(lambda: tailtune("cancel", other, "--dry-run").stdout.strip(), RUN_SECONDS)
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
