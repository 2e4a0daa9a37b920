"""A run is in progress while somebody starts another one of its name, or changes its schedule."""

import pytest
from cluster_commands import (
    LONGER,
    RUN_SECONDS,
    assert_succeeds,
    pipeline,
    runs_of_schedule,
    submit,
    training_job,
    wait_for,
)

from pipeline_server import PipelineServer
from tailtune.jobs.kubernetes import KubernetesClient

pytestmark = pytest.mark.cluster


def test_a_second_run_of_the_same_name_is_refused_and_leaves_the_first_alone(
    name: str, parameters: list[str], server: PipelineServer, cluster: KubernetesClient
) -> None:
    run_name = f"{name}-twice"
    first = submit(run_name, *parameters, *LONGER)
    job = wait_for(lambda: training_job(cluster, first))
    in_progress = f"error: run '{run_name}' is already in progress, as pipeline run {first};"
    refused = pipeline("--submit", "--run-name", run_name, *parameters, *LONGER)
    assert refused.returncode == 2 and refused.stderr.splitlines()[-1].startswith(in_progress)

    second = start_again(server, first, learning_rate=1e-3)
    wait_for(lambda: in_progress in pipeline("--logs", second).stdout, min(600, RUN_SECONDS))
    assert pipeline("--cancel", second).returncode == 0, "else its step is tried again after the first run's end"
    assert job.is_the_same()
    assert_succeeds(server, first)

    again = submit(run_name, *parameters, *LONGER)
    assert_succeeds(server, again)
    assert "train: best_model/ is already complete, nothing to train" in pipeline("--logs", again).stdout
    assert job.is_the_same(), "the model is that of the first run's settings, and of its only job"


def test_a_run_goes_on_while_its_schedule_is_changed_and_removed(
    name: str, parameters: list[str], server: PipelineServer
) -> None:
    schedule = f"{name}-changed"
    assert pipeline("--schedule", "every 1 minute", "--schedule-name", schedule, *parameters, *LONGER).returncode == 0
    try:
        (run,) = wait_for(lambda: runs_of_schedule(server, schedule), 300)
        changed = pipeline("--schedule", "0 2 * * *", "--schedule-name", schedule, *parameters, *LONGER)
        assert changed.returncode == 0 and f"run {run.run_id} continues" in changed.stderr
        removed = pipeline("--unschedule", schedule)
        assert removed.returncode == 0 and f"run {run.run_id} continues" in removed.stderr
        assert_succeeds(server, run.run_id)
    finally:
        assert pipeline("--unschedule", schedule, "--end-runs").returncode == 0
    assert schedule not in pipeline("--list-schedules").stdout


def start_again(server: PipelineServer, run_id: str, **changes: object) -> str:
    """Start another run with a run's version and parameters, past the checks of pipeline.py; return its id."""
    run = server.get_run(run_id)
    version = run.pipeline_version_reference
    return server.start(version.pipeline_id, version.pipeline_version_id, experiment="tailtune",
                        run_name=run.display_name, parameters={**run.runtime_config.parameters, **changes})  # fmt: skip
