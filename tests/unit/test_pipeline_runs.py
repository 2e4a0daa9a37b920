"""The commands that show, watch and retry runs, with the real clients of the pipeline server and of the cluster."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from dashboard_server import Server, logged_in
from http_server import NAMESPACE
from kubernetes_server import Server as Cluster
from kubernetes_server import StepPod, cluster

import pipeline_cli
import pipeline_runs
import pipeline_server
from tailtune.jobs.job import PIPELINE_RUN_LABEL, job_name
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.objects import JOB_KINDS, find_kind
from tailtune.jobs.train_step import make_job
from tailtune.log import LINE_PREFIX, log
from tailtune.recipe.load import load_recipe, parse_parameters, with_overrides
from tailtune.run import Run

FAILED = {"resolve-recipe": "Succeeded", "train-stage": "Failed", "evaluate-model": "Omitted"}
ERROR = "train: error: rows are too long; set data.max_length"
LAUNCHER = [
    'time="2026-11-22T10:00:00 UTC" level=info msg="capturing logs"',
    "I1122 10:00:00.000000      16 cache.go:116] Connecting to cache endpoint",
]
"""What Argo and KFP write around a step's own lines."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    with logged_in(monkeypatch) as running:
        monkeypatch.setattr(pipeline_runs, "POLL_SECONDS", 0.01)
        monkeypatch.setattr(pipeline_runs, "API_SECONDS", 0.1)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
        yield running


@pytest.fixture
def kubernetes(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster of the pipeline server, with a login."""
    with cluster(tmp_path / "cluster") as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged, while the test goes on."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    monkeypatch.setattr(log, "handlers", [Collect()])
    monkeypatch.setattr(log, "propagate", False)
    log.setLevel("INFO")
    return messages


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(pipeline_cli.main, list(arguments))


def submit(server: Server, name: str = "mine", **content: object) -> str:
    """Start a run and return its id; `content` is what the server then says of it."""
    assert invoke("--submit", "--run-name", name).exit_code == 0
    run = list(server.runs)[-1]
    server.runs[run] |= content
    return run


def failed_run(server: Server, kubernetes: Cluster, *pods: StepPod) -> str:
    run = submit(server, state="FAILED")
    server.steps[run] = FAILED
    for pod in pods:
        pod.manifest["metadata"]["labels"]["pipeline/runid"] = run
    kubernetes.pods_of_steps += pods
    return run


def last_words(result: Result) -> list[str]:
    """The output of --status after the table of the steps."""
    assert result.exit_code == 0, result.stderr
    printed = result.stdout.splitlines()
    return printed[max(i for i, line in enumerate(printed) if line.startswith("  ") and "  " in line.strip()) + 1 :]


# ---- --runs and --status ----


def test_runs_are_listed_newest_first_with_their_step(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_runs, "NUM_RECENT", 2)
    submit(server, "forgotten", state="SUCCEEDED")
    active = submit(server, "first", state="RUNNING", created_at=(datetime.now(UTC) - timedelta(days=5)).isoformat())
    failed = submit(server, "second", state="FAILED")
    assert invoke("--schedule", "every 6 hours", "--schedule-name", "nightly").exit_code == 0
    scheduled = list(server.runs)[-1]
    result = invoke("--runs")
    assert result.exit_code == 0, result.stderr
    assert [re.sub(r" \d+ s ", " A s ", line).split() for line in result.stdout.splitlines()] == [
        ["NAME", "RECIPE", "STATE", "STEP", "AGE", "SCHEDULE", "ID"],
        ["nightlytrpbr-1-1482128149", "survival", "running", "train-stage", "A", "s", "nightly", scheduled],
        ["second", "survival", "failed", "train-stage", "A", "s", failed],
        ["first", "survival", "running", "train-stage", "5", "d", active],
    ]


def test_the_status_lists_the_steps_in_the_order_of_their_start(server: Server, kubernetes: Cluster) -> None:
    run = submit(server, state="RUNNING")
    server.steps[run] = {"resolve-recipe": "Succeeded", "fetch-model": "Succeeded", "fetch-dataset": "Running"}
    result = invoke("--status", "mine")
    assert re.sub(r" \d+ s ago", " A s ago", result.stdout).splitlines() == [
        "run: mine", f"id: {run}", "state: running, started A s ago", "  resolve-recipe  succeeded  12 s",
        "  fetch-model     succeeded  12 s", "  fetch-dataset   running    3 min",
    ]  # fmt: skip
    assert f"id: {run}" in invoke("--status", run).stdout
    unknown = invoke("--status", "other")
    assert unknown.exit_code == 2
    assert unknown.stderr == f"error: there is no run 'other' in {NAMESPACE}; see python pipeline.py --runs\n"


def test_of_several_runs_the_newest_is_shown_and_named(server: Server) -> None:
    submit(server, state="SUCCEEDED")
    newest = submit(server, state="SUCCEEDED")
    result = invoke("--status", "mine")
    assert result.stderr == f"2 runs belong to 'mine'; the newest is {newest}\n" and f"id: {newest}" in result.stdout
    assert invoke("--schedule", "every 6 hours", "--schedule-name", "a-schedule-with-a-long-name").exit_code == 0
    assert f"id: {list(server.runs)[-1]}\n" in invoke("--status", "a-schedule-with-a-long-name").stdout


def test_a_failed_run_ends_with_the_step_the_attempt_and_its_error(server: Server, kubernetes: Cluster) -> None:
    log_lines = [*LAUNCHER, f"{LINE_PREFIX}train: something else", f"{LINE_PREFIX}{ERROR}", "[KFP] frames", *LAUNCHER]
    run = failed_run(
        server,
        kubernetes,
        StepPod("", "train-stage", 1, ["train: error: earlier"]),
        StepPod("", "train-stage", 2, log_lines),
        StepPod("", "resolve-recipe", 1, [], phase="Succeeded"),
    )
    expected = "train-stage failed, attempt 2: rows are too long; set data.max_length"
    result = invoke("--status", "mine")
    assert last_words(result) == [expected]
    assert "  train-stage     failed     12 s\n  evaluate-model  not run\n" in result.stdout
    watched = invoke("--watch", run)
    assert watched.exit_code == 1 and watched.stderr == f"the run failed\n{expected}\n"


def test_without_an_error_line_the_end_of_the_log_is_shown(server: Server, kubernetes: Cluster) -> None:
    traceback = [f"line {i}" for i in range(9)] + ["KeyError: 'answer'", *LAUNCHER]
    failed_run(server, kubernetes, StepPod("", "train-stage", 1, traceback))
    assert invoke("--status", "mine").stdout.splitlines()[-6:] == [
        "train-stage failed, attempt 1: exit code 1",
        "  line 5", "  line 6", "  line 7", "  line 8", "  KeyError: 'answer'",
    ]  # fmt: skip


def test_a_step_that_was_killed_by_its_limit_is_named_as_such(server: Server, kubernetes: Cluster) -> None:
    end = {"exitCode": 137, "reason": "OOMKilled"}
    failed_run(server, kubernetes, StepPod("", "train-stage", 3, ["model: fetching"], end=end))
    assert last_words(invoke("--status", "mine")) == [
        "train-stage failed, attempt 3: it used more memory than its limit of 512Mi (OOMKilled); raise "
        "resources.step_memory, or resources.memory for a step that loads models"
    ]


def test_an_evicted_step_and_a_failed_driver_are_named(server: Server, kubernetes: Cluster) -> None:
    node = "survival-x7k2p.root.run.train-stage-driver"
    run = failed_run(
        server, kubernetes, StepPod("", "train-stage", 1, [], reason="Evicted", message="The node was low on memory.")
    )
    assert last_words(invoke("--status", run)) == [
        "train-stage failed, attempt 1: Evicted: The node was low on memory."
    ]
    server.steps[run] = {"resolve-recipe": "Succeeded", "train-stage-driver": "Failed"}
    kubernetes.pods_of_steps[:] = [StepPod(run, "", 1, ["F1122 main.go:79] rpc error"], node=node)]
    assert last_words(invoke("--status", run)) == ["train-stage-driver failed, attempt 1: exit code 1"]


def test_what_cannot_be_read_is_said(server: Server, kubernetes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    run = failed_run(server, kubernetes)
    assert last_words(invoke("--status", run)) == [
        "train-stage failed: it has no pod, which was deleted or never created; "
        f"oc describe workflow -l pipeline/runid={run}"
    ]
    kubernetes.pods_of_steps.append(StepPod(run, "train-stage", 1, [ERROR]))
    kubernetes.allowed = [rule for rule in kubernetes.allowed if rule[2] != "pods/log"]
    assert last_words(invoke("--status", run)) == [
        f"train-stage failed, attempt 1: its log cannot be read (this account is not allowed to read logs in "
        f"{NAMESPACE}); exit code 1"
    ]
    logs = invoke("--logs", run)
    assert logs.exit_code == 2 and f"this account is not allowed to read logs in {NAMESPACE}; ask" in logs.stderr
    kubernetes.allowed = [rule for rule in kubernetes.allowed if rule[2] != "pods"]
    assert last_words(invoke("--status", run))[0].startswith(
        f"train-stage failed; why cannot be read: this account is not allowed to list pods in {NAMESPACE}; ask an admin"
    )
    monkeypatch.setenv("KUBECONFIG", os.devnull)
    assert last_words(invoke("--status", run))[0].startswith("train-stage failed; why cannot be read: no cluster")


# ---- --watch ----


@pytest.mark.parametrize(
    ("states", "status", "words"),
    [(["RUNNING", "SUCCEEDED"], 0, "succeeded"), (["RUNNING", "FAILED"], 1, "failed"),
     (["CANCELED"], 1, "was cancelled")],
)  # fmt: skip
def test_watching_ends_with_the_run(server: Server, states: list[str], status: int, words: str) -> None:
    server.states = states
    result = invoke("--submit", "--watch", "--timeout", "30")
    assert result.exit_code == status, result.stderr
    assert f"the run {words}\n" in result.stderr


def test_watching_prints_each_step_once_per_state(server: Server, lines: list[str]) -> None:
    server.states = ["RUNNING", "RUNNING", "RUNNING", "SUCCEEDED"]
    assert invoke("--submit", "--watch").exit_code == 0
    assert lines == ["run: resolve-recipe succeeded", "run: train-stage running", "run: train-stage succeeded"]


def test_steps_that_the_workflow_left_out_have_no_line(server: Server, kubernetes: Cluster, lines: list[str]) -> None:
    run = failed_run(server, kubernetes)
    assert invoke("--watch", run).exit_code == 1
    assert lines == ["run: resolve-recipe succeeded", "run: train-stage failed"]


def test_a_terminated_run_was_cancelled_although_the_server_calls_it_failed(server: Server) -> None:
    run = submit(server)
    client = pipeline_server.PipelineServer(pipeline_server.find_connection(None, None))
    client.terminate(client.active_runs("mine"))
    result = invoke("--watch", run)
    assert result.exit_code == 1 and result.stderr == "the run was cancelled\n"
    assert server.runs[run]["state"] == "FAILED"
    assert invoke("--retry", run).exit_code == 0
    server.runs[run]["state"] = "FAILED"
    assert "state: failed" in invoke("--status", run).stdout, "only the time since the retry counts"


def test_an_outage_is_one_line_when_it_begins_and_one_when_it_ends(server: Server, lines: list[str]) -> None:
    run = submit(server, state="RUNNING")
    del lines[:]

    def fail_for_a_while() -> None:
        wait_until_it_is_watched(server, run)
        server.statuses.extend([503, 500, 503])
        wait_for(lambda: not server.statuses)
        server.runs[run]["state"] = "SUCCEEDED"

    outage = threading.Thread(target=fail_for_a_while)
    outage.start()
    assert invoke("--watch", run).exit_code == 0
    outage.join()
    about_the_server = [line for line in lines if "server" in line]
    assert len(about_the_server) == 2
    assert (
        about_the_server[0]
        == "run: the pipeline server does not answer (503 Service Unavailable), trying again for 600 s"
    )
    assert about_the_server[1].startswith("run: the pipeline server answers again, after ")


def test_watching_goes_on_after_another_login(server: Server, kubernetes: Cluster, lines: list[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.delenv("TAILTUNE_TOKEN")
    server.token = kubernetes.token
    run = submit(server, state="RUNNING")

    def log_in_again() -> None:
        wait_until_it_is_watched(server, run)
        server.token = "second-token"
        wait_for(lambda: any("the login has expired" in line for line in lines))
        kubernetes.token = server.token
        kubernetes.write_kubeconfig()
        server.runs[run]["state"] = "SUCCEEDED"

    person = threading.Thread(target=log_in_again)
    person.start()
    result = invoke("--watch", run)
    person.join()
    assert result.exit_code == 0, result.stderr
    about_the_server = [line for line in lines if "log" in line or "server" in line]
    assert (
        about_the_server[0]
        == "run: the login has expired; log in again with oc login within 12 hours, and watching continues"
    )
    assert len(about_the_server) == 2 and "answers again" in about_the_server[1]


def wait_until_it_is_watched(server: Server, run: str) -> None:
    wait_for(lambda: server.requests.count(f"GET /apis/v2beta1/runs/{run}") >= 3)


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def test_the_timeout_says_how_to_continue(server: Server) -> None:
    run = submit(server, state="RUNNING")
    result = invoke("--watch", run, "--timeout", "0")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: the run has not ended after 0 s; continue with python pipeline.py --watch {run}\n"
    )


def test_a_step_that_waits_for_a_node_is_said_once(
    server: Server, kubernetes: Cluster, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_runs, "PODS_SECONDS", 0.0)
    run = submit(server)
    message = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    unscheduled = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
    long_ago = (datetime.now(UTC) - timedelta(minutes=5)).isoformat()
    for step, created in (("evaluate-model", long_ago), ("write-report", None)):
        kubernetes.pods_of_steps.append(StepPod(run, step, 1, [], phase="Pending", created=created,
                                                containerStatuses=[], conditions=unscheduled))  # fmt: skip
    server.states = ["RUNNING", "RUNNING", "RUNNING", "SUCCEEDED"]
    assert invoke("--watch", run).exit_code == 0
    waits = [line for line in lines if "waiting" in line]
    assert waits == [f"run: evaluate-model has been waiting for 5 min: {message}"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--watch"], "--watch needs a RUN, --submit or --retry"), (["--follow"], "--follow needs --logs"),
     (["--submit", "--watch", "mine"], "give one of"), (["--status", "a", "--logs", "b"], "give one of"),
     (["--export-job"], "--export-job needs --run-name"), (["--end-runs"], "--end-runs needs --unschedule")],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(server: Server, arguments: list[str], words: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2 and words in result.stderr and not server.runs


# ---- --logs ----


def test_the_logs_of_the_steps_are_printed_in_order(server: Server, kubernetes: Cluster, lines: list[str]) -> None:
    run = failed_run(server, kubernetes, StepPod("", "train-stage", 1, ["a", "b"]),
                     StepPod("", "train-stage", 2, ["c"]),
                     StepPod("", "", 1, ["driver"], node="survival-x7k2p.root.run.train-stage-driver"))  # fmt: skip
    kubernetes.pods_of_steps.append(StepPod("another-run", "train-stage", 1, ["of another run"]))
    result = invoke("--logs", run)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "a\nb\nc\n"
    assert [line.rpartition(", pod")[0] for line in lines[:2]] == [
        "run: log of train-stage, attempt 1", "run: log of train-stage, attempt 2"
    ]  # fmt: skip
    assert lines[2:] == ["run: the pod of resolve-recipe is gone, and its log with it"]


def test_logs_are_followed_to_the_runs_end(
    server: Server, kubernetes: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submit(server, state="RUNNING")
    pod = StepPod(run, "train-stage", 1, ["begins"], phase="Running")
    kubernetes.pods_of_steps.append(pod)

    def go_on() -> None:
        time.sleep(0.5)
        with pod.changed:
            pod.lines[0].append(f"{datetime.now(UTC).isoformat().replace('+00:00', 'Z')} goes on")
            pod.changed.notify_all()
        kubernetes.pods_of_steps.append(StepPod(run, "evaluate-model", 1, ["judges"], phase="Succeeded"))
        time.sleep(0.5)
        pod.manifest["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
        pod.manifest["status"]["phase"] = "Succeeded"
        server.runs[run]["state"] = "SUCCEEDED"

    thread = threading.Thread(target=go_on)
    thread.start()
    pipeline_cli.main(["--logs", run, "--follow"], standalone_mode=False)  # click's runner is not made for threads
    thread.join()
    assert capsys.readouterr().out == "begins\ngoes on\njudges\n"
    pipeline_cli.main(["--logs", run], standalone_mode=False)
    assert capsys.readouterr().out == "begins\ngoes on\njudges\n"


# ---- --retry ----


def test_a_failed_run_is_retried_and_watched(server: Server, kubernetes: Cluster) -> None:
    run = failed_run(server, kubernetes, StepPod("", "train-stage", 1, [ERROR]))
    server.on_retry = lambda run: server.runs[run].update(state="SUCCEEDED")
    result = invoke("--retry", "mine", "--watch")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == (
        f"run {run} is tried again from its failed step on; training resumes from its checkpoint\nthe run succeeded\n"
    )


@pytest.mark.parametrize(
    ("state", "words"), [("SUCCEEDED", "has succeeded, so there is nothing to retry"), ("RUNNING", "has not ended")]
)
def test_only_a_failed_run_is_retried(server: Server, state: str, words: str) -> None:
    run = submit(server, state=state)
    result = invoke("--retry", "mine")
    assert result.exit_code == 2 and result.stderr.startswith(f"error: run {run} {words}; ")
    assert server.runs[run]["state"] == state and not any(path.endswith(":retry") for path in server.requests)


def test_a_run_is_not_retried_while_another_of_its_name_is_active(server: Server) -> None:
    first = submit(server, state="FAILED")
    second = submit(server, state="RUNNING")
    result = invoke("--retry", first)
    assert result.exit_code == 2
    assert f"run 'mine' is already in progress, as pipeline run {second}; wait for it" in result.stderr


# ---- addresses, experiments, schedules ----


def test_a_server_of_openshift_ai_has_no_pages(server: Server, kubernetes: Cluster,
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.delenv("TAILTUNE_ENDPOINT")
    kubernetes.allowed.append(("list", "datasciencepipelinesapplications.opendatahub.io", "*"))
    monkeypatch.setattr(pipeline_server, "_route", lambda cluster: server.url)
    result = invoke("--submit", "--run-name", "mine")
    (run,) = server.runs
    assert result.stdout == f"{run}\n" and "in the dashboard: Develop & train, Pipelines, Runs" in result.stderr
    monkeypatch.setenv("TAILTUNE_DASHBOARD", "https://example.com")
    server.runs[run]["state"] = "SUCCEEDED"
    assert invoke("--submit", "--run-name", "mine").stdout.startswith("https://example.com/develop-train/pipelines/")


def test_an_archived_experiment_is_said(server: Server, lines: list[str]) -> None:
    submit(server, state="SUCCEEDED")
    assert not lines
    (experiment,) = server.experiments.values()
    experiment["storage_state"] = "ARCHIVED"
    assert invoke("--submit").exit_code == 0 and len(server.runs) == 2
    assert lines == ["run: experiment 'tailtune' is archived, so the dashboard hides its runs; restore it there, or "
                     "give another --experiment"]  # fmt: skip


def test_the_runs_are_listed_once_when_schedules_are_removed(server: Server) -> None:
    client = pipeline_server.PipelineServer(pipeline_server.find_connection(None, None))
    assert invoke("--schedule", "0 2 * * *", "--schedule-name", "nightly").exit_code == 0
    (schedule,) = server.recurring.values()
    server.recurring["another"] = {**schedule, "recurring_run_id": "another"}
    server.requests.clear()
    assert client.unschedule("nightly") == [] and not server.recurring
    assert server.requests.count("GET /apis/v2beta1/runs") == 1


# ---- --export-job ----


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_the_exported_job_is_the_one_that_the_launcher_creates(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["-p", f"resources.job_kind={kind}", "-p", "resources.memory=70Gi", "-p", "queue=team",
               "-p", "stages.0.resources.num_nodes=2"]  # fmt: skip
    with cluster(tmp_path / "cluster") as kubernetes:
        kubernetes.install_trainer()
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
        result = invoke("--export-job", "--run-name", "mine", *options)
        assert result.exit_code == 0, result.stderr
        recipe = with_overrides(load_recipe("survival"), parse_parameters(tuple(options[1::2])))
        directories = {f"{name}_dir": Path("/shared", name, "mine") for name in ("data", "models", "workspace")}
        run = Run(name="mine", recipe=recipe, local=False, **directories)
        job = make_job(run, run.parquet_dir, run.base_model_dir, run.models_dir / "recipe.json")
        jobs = find_kind(KubernetesClient(), JOB_KINDS[kind])
        assert jobs is not None
        launched = jobs.cluster.core.api_client.sanitize_for_serialization(jobs.build(job, {"annotation": "value"}))
    exported = yaml.safe_load(result.stdout)
    assert exported == without_pipeline_run(launched) and "annotations" not in exported["metadata"]
    assert exported["kind"].lower() == kind and exported["metadata"]["name"] == job_name("mine", "sft")
    head = [line for line in result.stdout.splitlines() if line.startswith("#")]
    assert "#   /shared/models/mine/recipe.json on claim trained-models-pvc: the recipe that is trained" in head


def without_pipeline_run(manifest: Any) -> Any:
    """The manifest without the label of the pipeline run and without the job's annotations."""
    if isinstance(manifest, list):
        return [without_pipeline_run(element) for element in manifest]
    if not isinstance(manifest, dict):
        return manifest
    left_out = (PIPELINE_RUN_LABEL, "annotations")
    return {key: without_pipeline_run(value) for key, value in manifest.items() if key not in left_out}


def test_a_pytorchjob_is_exported_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = invoke("--export-job", "--run-name", "mine", "-p", "base_model=/shared/models/llama")
    assert result.exit_code == 0 and result.stderr == ""
    assert yaml.safe_load(result.stdout)["kind"] == "PyTorchJob"
    assert "--model-dir\n" in result.stdout and "- /shared/models/llama\n" in result.stdout
    trainjob = invoke("--export-job", "--run-name", "mine", "-p", "resources.job_kind=trainjob")
    assert trainjob.exit_code == 2 and "log in with oc login" in trainjob.stderr, "its fields depend on the cluster"
