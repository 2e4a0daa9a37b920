"""Runs on the pipeline server, for people: list them, show one and why it failed, watch it, read its logs, retry it."""

import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, TextIO

import click

from pipeline_server import ENDED, WATCH_RETRY_SECONDS, PipelineServer, run_name
from tailtune.errors import UserError
from tailtune.jobs.kubernetes import WORKFLOW_RUN_LABEL, KubernetesClient
from tailtune.jobs.logs import PodLog
from tailtune.jobs.step_pods import CONTAINER, StepPod, find_step_pods, why_failed
from tailtune.log import log
from tailtune.owner import in_progress

NUM_RECENT = 20
"""How many runs --runs shows, and any older ones that have not ended."""
POLL_SECONDS = 5.0
PODS_SECONDS = 60.0
"""How often --watch looks at the pods."""
WAITING_SECONDS = 120.0
"""A pod that has waited for longer is worth a line."""
_print_lock = threading.Lock()
API_SECONDS = 20.0
"""How long to keep trying to reach the cluster's API, which is only needed for pods and their logs."""


@dataclass(frozen=True)
class Step:
    """A step of a run, as the server tells it."""

    name: str
    state: str
    """In lower case; `not run` for a step that the workflow has left out."""
    start: datetime
    end: datetime | None

    @property
    def seconds(self) -> float:
        return ((self.end or datetime.now(UTC)) - self.start).total_seconds()


def step_names(spec: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the steps in a compiled pipeline: of tasks that run a container, not of conditions."""
    graphs = [spec["root"]["dag"], *(c["dag"] for c in spec["components"].values() if "dag" in c)]
    tasks = [task for graph in graphs for task in graph["tasks"].items()]
    return frozenset(name for name, task in tasks if "dag" not in spec["components"][task["componentRef"]["name"]])


def steps_of(server: PipelineServer, run: Any) -> frozenset[str]:
    """Return the names of the run's steps."""
    if spec := server.pipeline_spec(run):
        return step_names(spec)
    names = {task.display_name for task in _tasks(run)}  # also those of conditions: each task has a driver
    return frozenset(name for name in names if f"{name}-driver" in names)


def _tasks(run: Any) -> list[Any]:
    """Return all nodes of the run's workflow: drivers, `root`, and for each step its pods, `executor`.

    Source: kubeflow/pipelines, backend/src/apiserver/server/api_converter.go.
    """
    return (run.run_details.task_details or []) if run.run_details else []


def _steps(run: Any, names: Collection[str]) -> list[Step]:
    """Return the run's steps that have begun or were left out, in the order of their start."""
    steps = [
        Step(
            name=task.display_name,
            # the server knows no state for Argo's Omitted
            state="not run" if task.state == "RUNTIME_STATE_UNSPECIFIED" else task.state.lower(),
            start=task.start_time,
            end=task.end_time if task.end_time and task.end_time >= task.start_time else None,  # year 1: not ended
        )
        for task in _tasks(run)
        if task.display_name in names and task.state
    ]
    return sorted(steps, key=lambda step: (step.start, step.state == "not run", step.name))


def state_of(run: Any) -> str:
    """Return the run's state in lower case. For the server, a run that was terminated ends as FAILED.

    Only the time since the last retry counts.
    """
    states = [status.state for status in run.state_history or []]
    while states and states[-1] in ENDED:
        states.pop()
    for state in reversed(states):
        if state in ENDED:
            break
        if state == "CANCELING" and run.state == "FAILED":
            return "cancelled"
    return {"CANCELED": "cancelled", "CANCELING": "being cancelled"}.get(run.state, str(run.state).lower())


def duration(seconds: float) -> str:
    """`12 s`, `3 min`, `2 h 5 min` or `4 d`."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d"


def _since(run: Any) -> str:
    return duration((datetime.now(UTC) - run.created_at).total_seconds())


def find_run(name: str, server: PipelineServer) -> Any:
    """Return the newest run with this name or id, or of the schedule with this name. Raises UserError."""
    found = server.find_runs(name)
    if not found:
        raise UserError(f"there is no run '{name}' in {server.connection.namespace}", "see python pipeline.py --runs")
    if len(found) > 1:
        click.echo(f"{len(found)} runs belong to '{name}'; the newest is {found[0].run_id}", err=True)
    return server.get_run(found[0].run_id)


# ---- --runs and --status ----


def list_runs(server: PipelineServer) -> Iterator[str]:
    """Yield the lines of a table: the newest runs, and older ones that have not ended."""
    pipelines = server.pipeline_names()
    schedules = {schedule.recurring_run_id: schedule.display_name for schedule in server.schedules()}
    rows = [("NAME", "RECIPE", "STATE", "STEP", "AGE", "SCHEDULE", "ID")]
    names: dict[str, frozenset[str]] = {}
    for number, run in enumerate(server.runs()):
        if number >= NUM_RECENT and run.state in ENDED:
            continue
        reference, shown = run.pipeline_version_reference, ""
        if run.state != "SUCCEEDED":
            details, version = server.get_run(run.run_id), reference.pipeline_version_id if reference else run.run_id
            if version not in names:
                names[version] = steps_of(server, details)
            state = "failed" if run.state in ENDED else "running"
            shown = ", ".join(step.name for step in _steps(details, names[version]) if step.state == state)
        rows.append((run.display_name, pipelines.get(reference.pipeline_id, "") if reference else "", state_of(run),
                     shown, _since(run), schedules.get(run.recurring_run_id, ""), run.run_id))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def show_status(name: str, server: PipelineServer) -> Iterator[str]:
    """Yield what is known of a run, and why it failed."""
    run = find_run(name, server)
    names = steps_of(server, run)
    yield f"run: {run.display_name}"
    yield f"id: {run.run_id}"
    yield f"state: {state_of(run)}, started {_since(run)} ago"
    steps = _steps(run, names)
    width = max((len(step.name) for step in steps), default=0)
    for step in steps:
        took = "" if step.state in ("not run", "skipped") else duration(step.seconds)
        yield f"  {step.name:{width}}  {step.state:9}  {took}".rstrip()
    yield from why_run_failed(server, run, names)


def why_run_failed(server: PipelineServer, run: Any, names: Collection[str]) -> Iterator[str]:
    """Yield for each failed step: its name, attempt, cause and remedy, or the last lines of its log."""
    if state_of(run) != "failed":
        return
    drivers = {f"{name}-driver" for name in names}
    failed = [step for step in _steps(run, {*names, *drivers}) if step.state == "failed"]
    if not failed:
        yield f"no step has failed; oc describe workflow -l {WORKFLOW_RUN_LABEL}={run.run_id}"
        return
    try:
        cluster = _cluster(server)
        pods = find_step_pods(cluster, run.run_id)
    except UserError as error:
        for step in failed:
            yield f"{step.name} failed; why cannot be read: {error}"
        return
    for step in failed:
        cause, lines = why_failed(cluster, pods, step.name, run.run_id)
        yield cause
        yield from (f"  {line}" for line in lines)


def _cluster(server: PipelineServer, seconds: float = API_SECONDS) -> KubernetesClient:
    return KubernetesClient(server.connection.namespace, api_seconds=seconds)


# ---- --watch ----


def watch(run_id: str, server: PipelineServer, timeout_seconds: float | None, names: Collection[str] = ()) -> bool:
    """Wait for the run's end, and return whether it succeeded. Logs each change of the state of a step.

    `names` are the run's steps, if known. Raises UserError after the timeout.
    """
    give_up_at = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
    states: dict[str, str] = {}
    pods = _WaitingPods(server, run_id)
    while True:
        run = server.get_run_patiently(run_id, give_up_at)
        names = names or steps_of(server, run)
        for step in _steps(run, names):
            if step.state != "not run" and states.get(step.name) != step.state:
                states[step.name] = step.state
                log.info("run: %s %s", step.name, step.state)
        if run.state in ENDED:
            break
        if time.monotonic() > give_up_at:
            raise UserError(f"the run has not ended after {timeout_seconds:.0f} s",
                            f"continue with python pipeline.py --watch {run_id}")  # fmt: skip
        pods.report()
        time.sleep(POLL_SECONDS)
    state = state_of(run)
    click.echo(f"the run {'was cancelled' if state == 'cancelled' else state}", err=True)
    for line in why_run_failed(server, run, names):
        click.echo(line, err=True)
    return state == "succeeded"


class _WaitingPods:
    """Says once for each pod what it waits for, if this account may read pods."""

    def __init__(self, server: PipelineServer, run_id: str) -> None:
        self._server, self._run_id = server, run_id
        self._cluster: KubernetesClient | None = None
        self._next = 0.0
        self._reported: set[str] = set()

    def report(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PODS_SECONDS
        try:
            self._cluster = self._cluster or _cluster(self._server)
            pods = find_step_pods(self._cluster, self._run_id)
        except UserError:  # the run is watched all the same
            return
        for pod in pods:
            reason = pod.what_it_waits_for()
            if reason and pod.age_seconds >= WAITING_SECONDS and pod.name not in self._reported:
                self._reported.add(pod.name)
                log.info("run: %s has been waiting for %s: %s", pod.step, duration(pod.age_seconds), reason)


# ---- --logs and --retry ----


def show_logs(name: str, server: PipelineServer, *, follow: bool) -> None:
    """Print the logs of the run's steps, those of one step after the other; with `follow`, until the run's end.

    Raises UserError if this account is not allowed to read them.
    """
    run = find_run(name, server)
    names = steps_of(server, run)
    cluster = _cluster(server, WATCH_RETRY_SECONDS)
    if not cluster.may("get", "", "pods/log"):
        raise UserError(f"this account is not allowed to read logs in {cluster.namespace}",
                        "ask an admin of the project for the role view")  # fmt: skip
    logs: dict[str, PodLog] = {}
    stdout = sys.stdout  # each call to the server redirects it for a moment, to hide what kfp's client prints
    while True:
        run = server.get_run_patiently(run.run_id)
        pods = [pod for pod in find_step_pods(cluster, run.run_id) if pod.step in names]
        for pod in pods:
            if pod.name not in logs and (pod.has_ended or pod.phase == "Running"):
                logs[pod.name] = _start_log(cluster, pod, stdout, follow=follow)
        running = {pod.name for pod in pods if not pod.has_ended}
        for pod_name, pod_log in logs.items():
            if pod_name not in running:
                pod_log.end()
        if run.state in ENDED or not follow:
            break
        time.sleep(POLL_SECONDS)
    for pod_log in logs.values():
        pod_log.end()
        pod_log.join()
    for step in _steps(run, names):
        if step.state in ("succeeded", "failed", "running") and all(pod.step != step.name for pod in pods):
            log.info("run: the pod of %s is gone, and its log with it", step.name)


def _start_log(cluster: KubernetesClient, pod: StepPod, stdout: TextIO, *, follow: bool) -> PodLog:
    """Start to print a pod's log; a log that is not followed has been printed when this returns."""
    log.info("run: log of %s, attempt %d, pod %s", pod.step, pod.attempt, pod.name)
    pod_log = PodLog(lambda: cluster.core, cluster.namespace, pod.name, CONTAINER, partial(_print_line, stdout))
    if pod.has_ended or not follow:
        pod_log.end()
    pod_log.start()
    if pod.has_ended or not follow:
        pod_log.join()
    return pod_log


def _print_line(stdout: TextIO, line: str) -> None:
    with _print_lock:  # two logs may print at once, and a text stream would lose lines
        click.echo(line, file=stdout)


def retry(name: str, server: PipelineServer) -> str:
    """Let the server retry a run that failed or was cancelled, and return the run's id. Raises UserError."""
    run = find_run(name, server)
    if run.state == "SUCCEEDED":
        raise UserError(f"run {run.run_id} has succeeded, so there is nothing to retry", "start another with --submit")
    if run.state not in ENDED:
        raise UserError(f"run {run.run_id} has not ended", f"python pipeline.py --watch {run.run_id} shows it, "
                        f"--cancel {run.run_id} ends it")  # fmt: skip
    own_name = run_name(run)
    if own_name and (active := server.active_runs(own_name, by_parameter=True)):
        raise in_progress(own_name, active[0].id)
    server.retry_run(run.run_id)
    click.echo(f"run {run.run_id} is tried again from its failed step on; training resumes from its checkpoint",
               err=True)  # fmt: skip
    return str(run.run_id)
