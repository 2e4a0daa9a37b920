"""Run a job on a cluster: create or adopt it, and follow it to its end.

The launcher can die at any time. Everything that is needed to resume training is on the pods' volumes, and the next
attempt finds the job by its name. When the launcher is stopped because its run is ended, it deletes the job; when only
its own pod has to go, as when a node is drained, the job goes on training.
"""

import os
import re
import sys
import threading
import time
from datetime import datetime
from functools import partial
from typing import Any

from kubernetes import client

from tailtune.errors import UserError
from tailtune.jobs import pods
from tailtune.jobs.failure import explain, would_recur
from tailtune.jobs.job import PIPELINE_RUN_LABEL, Job, JobFailed
from tailtune.jobs.kubernetes import CALL_TIMEOUT_SECONDS, KubernetesClient, in_words
from tailtune.jobs.logs import PodLog
from tailtune.jobs.objects import (
    FINGERPRINT_ANNOTATION,
    JOB_KINDS,
    LAUNCHER_ANNOTATION,
    SHORT_TIMEOUT_SECONDS,
    Jobs,
    choose_kind,
)
from tailtune.jobs.progress import ProgressReporter
from tailtune.log import log
from tailtune.signals import on_stop

POLL_SECONDS = 3.0
DELETE_SECONDS = 600
"""How long to wait for an earlier attempt's job to disappear."""
STOP_SECONDS = 5
"""How long calls are retried after SIGTERM. In a step of a pipeline there is about one second: KFP's launcher, which
runs the step, dies of the signal, and then Argo's executor ends the container (kubeflow/pipelines,
backend/src/v2/component/launcher_v2.go; argo, cmd/argoexec/commands/emissary.go)."""
NO_PODS_SECONDS = 60
"""Report a job that still has no pods after this many seconds."""
STUCK_SECONDS = 300
"""Give up after this many seconds on a problem that rarely resolves itself, for example an image that is not found."""
EVENTS_SECONDS = 30
"""Read the events of a pod that has been starting for this many seconds, and again at this interval."""
CLAIM_NOT_FOUND = re.compile(r"persistentvolumeclaim \S+ not found")


class _Stopped(BaseException):
    """Raised in the main thread on SIGTERM or SIGINT (its argument); interrupts a call that is being retried, too."""


_again: list[threading.Timer] = []


def _stop(received: list[int]) -> None:
    # Python ignores an exception that is raised inside a finalizer: send the signal again, until it is noticed
    _cancel_timers()
    _again.append(threading.Timer(0.2, os.kill, (os.getpid(), received[0])))
    _again[-1].start()
    raise _Stopped(received[0])


def _cancel_timers() -> None:
    while _again:
        _again.pop().cancel()


def run_job(job: Job, cluster: KubernetesClient) -> None:
    """Create the job, or adopt the one from an earlier attempt, and follow it until it has succeeded.

    Raises JobFailed if it fails. On SIGTERM and SIGINT, the job is deleted if its pipeline run is being ended, or if
    there is none; otherwise it is left alone, and another attempt of the step follows it again.
    """
    jobs, follower, is_own = None, None, False
    try:
        with on_stop(_stop):
            jobs, kind = choose_kind(cluster, job.pod.kind if job.pod else "auto")
            log.info("train: the job is a %s", kind)
            _create_or_adopt(job, jobs)
            is_own = True
            follower = Follower(job, jobs)
            follower.wait()
    except _Stopped as stopped:
        with on_stop(lambda received: None):  # ignore further signals
            _cancel_timers()
            if job.pipeline_run and not _run_is_terminated(job, cluster):
                left = f"job '{job.name}' keeps running" if is_own else "it had no job yet"
                raise JobFailed(
                    f"this step was stopped by signal {stopped.args[0]}, but its run was not; {left}",
                    f"if the step is not retried automatically: python pipeline.py --retry {job.pipeline_run}",
                ) from None
            is_deleted, outcome, remedy = _delete_at_once(job, cluster, jobs, is_own)
            if is_deleted and follower:
                follower.close(STOP_SECONDS / 2)
        raise JobFailed(f"job '{job.name}' was stopped by signal {stopped.args[0]} {outcome}", remedy) from None


def _run_is_terminated(job: Job, cluster: KubernetesClient) -> bool:
    """Whether the job's pipeline run is being ended. If the API does not tell, the run's last step decides."""
    try:
        return cluster.pipeline_run_is_terminated(job.pipeline_run, seconds=STOP_SECONDS)
    except (UserError, client.ApiException) as error:
        log.warning("train: cannot tell whether the run is being ended: %s", in_words(error))
        return False


def _delete_at_once(job: Job, cluster: KubernetesClient, jobs: Jobs | None, is_own: bool) -> tuple[bool, str, str]:
    """Delete the job in the short time that is left after SIGTERM.

    `jobs` is None if the signal arrived before a kind was chosen; all kinds are then tried. Unless `is_own`, the job of
    this name may be that of another pipeline run, which is left alone. Returns whether a job was
    deleted, the outcome (worded as the end of a sentence), and the remedy.
    """

    def delete(candidate: Jobs) -> bool:
        try:
            if not is_own and (manifest := candidate.get(job.name)) and _pipeline_run(manifest) != job.pipeline_run:
                return False
            return candidate.delete(job.name, seconds=STOP_SECONDS, timeout_seconds=SHORT_TIMEOUT_SECONDS)
        except client.ApiException as error:
            if jobs or error.status != 403:
                raise
            return False  # an account without access to a kind has created no job of that kind

    candidates = [jobs] if jobs else [Jobs(cluster, kind) for kind in JOB_KINDS.values()]
    try:
        for _ in range(2):
            deleted = [delete(candidate) for candidate in candidates]
            if any(deleted):
                log.info("train: job %s deleted", job.name)
                return True, "and deleted", "run again to resume from its last checkpoint"
            time.sleep(1)  # the API may still be processing a request to create the job
    except (UserError, client.ApiException) as error:
        problem = error.problem if isinstance(error, UserError) else in_words(error)
        return False, f"but could not be deleted: {problem}", "delete it with tailtune cancel RUN"
    return False, "before it could be created", ""


def _create_or_adopt(job: Job, jobs: Jobs) -> None:
    """Create the job. An existing one with this name is adopted if it is the same and still active, else replaced."""
    manifest = jobs.get(job.name)
    if manifest is not None:
        state, _ = jobs.kind.state(manifest)
        annotations = manifest["metadata"].get("annotations") or {}
        is_same = annotations.get(FINGERPRINT_ANNOTATION) == jobs.fingerprint(job)
        if is_same and state in ("waiting", "running") and not manifest["metadata"].get("deletionTimestamp"):
            log.info("train: job %s already exists and is %s: following it", job.name, state)
            jobs.adopt(job.name)
            return
        launcher = str(annotations.get(LAUNCHER_ANNOTATION) or "")
        is_foreign = _pipeline_run(manifest) != job.pipeline_run and state in ("waiting", "running")
        if is_foreign and launcher and jobs.cluster.pod_is_alive(launcher):
            raise JobFailed(
                f"job '{job.name}' is {state} and belongs to pipeline run {_pipeline_run(manifest)}",
                "wait for that run, end it with python pipeline.py --cancel, or choose another --run-name",
            )
        log.info("train: replacing job %s from an earlier attempt (%s)", job.name, state)
        _delete(job.name, jobs)
        give_up_at = time.monotonic() + DELETE_SECONDS
        while jobs.get(job.name) is not None:
            if time.monotonic() > give_up_at:
                raise JobFailed(
                    f"job '{job.name}' from an earlier attempt has still not been deleted",
                    f"delete it: oc delete {jobs.kind.PLURAL} {job.name}",
                )
            time.sleep(1)
    job.clear_progress()
    try:
        jobs.create(job)
    except client.ApiException as error:
        if error.status == 409:  # created by a request whose response was lost, or by someone else: check again
            _create_or_adopt(job, jobs)
            return
        raise JobFailed(f"job '{job.name}' was refused: {in_words(error)}", "run tailtune doctor") from None
    log.info("train: job %s created; nodes: %d, ranks per node: %d", job.name, job.num_nodes, job.ranks_per_node)


def _pipeline_run(manifest: dict[str, Any]) -> str:
    return str((manifest["metadata"].get("labels") or {}).get(PIPELINE_RUN_LABEL, ""))


def _delete(name: str, jobs: Jobs) -> None:
    jobs.delete(name)
    log.info("train: job %s deleted", name)


def started_at(manifest: dict[str, Any]) -> str:
    """When the job was created, or when a queue admitted it last."""
    status = manifest.get("status") or {}
    admitted = [
        condition.get("lastTransitionTime") or ""
        for condition in status.get("conditions") or []
        if condition["type"] == "Suspended" and condition["status"] == "False"
    ]
    return max([manifest["metadata"]["creationTimestamp"], status.get("startTime") or "", *admitted])


class Follower:
    """Polls a job, reports what changes, and prints its pods' logs."""

    def __init__(self, job: Job, jobs: Jobs) -> None:
        self.job, self.jobs = job, jobs
        self.followed_since = time.monotonic()
        self.is_started = False
        """Whether all pods have been seen running at the same time."""
        self._logs: dict[tuple[str, str], PodLog] = {}
        """Keyed by the pod's name and uid."""
        self._last_reported: dict[str, str] = {}
        """The last reported reason for waiting, keyed by the name of the pod or job."""
        self._stuck_since: dict[str, float] = {}
        """When a problem that rarely resolves itself was first seen, keyed by the pod's name."""
        self._events: dict[str, tuple[float, tuple[str, str] | None]] = {}
        """When the events of a starting pod were last read, and the problem they show, keyed by the pod's name."""
        self._may_read_events = True
        self._last_seen: dict[str, dict[str, Any]] = {}
        """The last pod of each node as last seen, because an operator may delete the pods of a failed job."""
        progress_path = job.progress_path if jobs.kind.PROGRESS_ANNOTATION else None
        self._progress = ProgressReporter(progress_path, partial(jobs.write_progress, job.name))
        self._print_lock = threading.Lock()

    def wait(self) -> None:
        """Poll until the job has succeeded and its logs have been printed. Raises JobFailed if it fails."""
        try:
            while not self.poll():
                time.sleep(POLL_SECONDS)
        except Exception as error:  # not _Stopped: run_job then deletes the job before it closes the logs
            self.close()
            if isinstance(error, JobFailed):
                self._progress.report(succeeded=False)
            raise
        self.close()
        self._progress.report(succeeded=True)

    def poll(self) -> bool:
        """Check the job once, and return whether it has succeeded.

        Raises JobFailed if the job has failed, no longer exists, or has run out of time.
        """
        job, jobs = self.job, self.jobs
        manifest, job_pods = jobs.get(job.name), jobs.pods(job.name)
        if manifest is None:
            raise JobFailed(
                f"job '{job.name}' was deleted while it ran", "run again to resume from its last checkpoint"
            )
        if (other := _pipeline_run(manifest)) != job.pipeline_run:
            raise JobFailed(
                f"job '{job.name}' was replaced by that of pipeline run {other}, which has the same name",
                "let that run finish, or give each run a --run-name of its own",
            )
        state, reason = jobs.kind.state(manifest)
        self._follow_logs(job_pods)
        self._report_pending_pods(job_pods)
        self._progress.report()
        if job_pods:
            self._last_reported.pop(job.name, None)
        elif state == "waiting":
            self._report_no_pods(reason)
        if state == "succeeded":
            return True
        by_age = sorted(job_pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
        self._last_seen |= {pods.node_name(pod): pod for pod in by_age}
        failures = pods.failures(self._last_seen.values())
        if state == "failed":
            raise explain(job.name, failures, reason)
        num_restarts = max((pods.num_restarts(pod) for pod in job_pods), default=0)  # one fault may end all pods
        # a container would start torchrun with as many restarts again
        used_up = num_restarts > job.max_restarts or any(failure.report.get("restarts_used_up") for failure in failures)
        if used_up or would_recur(failures):
            _delete(job.name, jobs)
            raise explain(job.name, failures, reason)
        self._check_time_limits(job_pods, started_at(manifest))
        return False

    def close(self, seconds: float = 2 * CALL_TIMEOUT_SECONDS[0]) -> None:
        """Print the rest of the logs, for at most `seconds`."""
        for pod_log in self._logs.values():
            pod_log.end()
        give_up_at = time.monotonic() + seconds
        for pod_log in self._logs.values():
            pod_log.join(timeout=max(0, give_up_at - time.monotonic()))

    def _check_time_limits(self, job_pods: list[dict[str, Any]], created_at: str) -> None:
        job, now = self.job, time.monotonic()
        if not self.is_started and len(job_pods) == job.num_nodes and all(map(pods.is_running, job_pods)):
            self.is_started = True
            log.info("train: pods running: %d of %d", len(job_pods), job.num_nodes)
        if not self.is_started and now - self.followed_since > job.start_seconds:
            self._give_up(f"did not start within {job.start_seconds} s: {self._pending_reasons()}")
        if self._stuck_since and now - min(self._stuck_since.values()) > STUCK_SECONDS:
            self._give_up(f"was stuck for {STUCK_SECONDS} s: {self._pending_reasons()}")
        # since its creation: an earlier attempt of the step may have followed it, and not every kind has a deadline
        if time.time() - datetime.fromisoformat(created_at).timestamp() > job.deadline_seconds:
            _delete(job.name, self.jobs)
            raise JobFailed(
                f"job '{job.name}' took longer than {job.deadline_seconds} s and was deleted",
                "raise the job's resources.deadline_seconds, and run again to resume",
            )

    def _pending_reasons(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in sorted(self._last_reported.items())) or "no pod exists"

    def _give_up(self, reason: str) -> None:
        _delete(self.job.name, self.jobs)
        raise explain(self.job.name, [], reason)

    def _follow_logs(self, job_pods: list[dict[str, Any]]) -> None:
        """Start a thread for the log of each pod that has started since the last poll."""
        cluster, container = self.jobs.cluster, self.jobs.kind.CONTAINER
        for pod in job_pods:
            name = pods.pod_name(pod)
            key = name, str(pod["metadata"].get("uid"))
            if key not in self._logs and pods.has_started(pod):
                show = partial(self._print_line, name.removeprefix(f"{self.job.name}-"))
                self._logs[key] = PodLog(lambda: cluster.core, cluster.namespace, name, container, show)
                self._logs[key].start()
            if key in self._logs:
                self._logs[key].num_restarts = pods.num_restarts(pod)

    def _print_line(self, pod: str, line: str) -> None:
        """Print a line of a pod's log. The ranks' lines have a prefix already; torchrun's lines get the pod's name."""
        with self._print_lock:
            print(line if line.startswith("[rank ") else f"[{pod}] {line}", file=sys.stderr, flush=True)

    def _report_once(self, name: str, reason: str, line: str) -> None:
        """Log the line unless the same reason was the last one reported for this pod or job."""
        if self._last_reported.get(name) != reason:
            self._last_reported[name] = reason
            log.info("%s", line)

    def _report_no_pods(self, reason: str) -> None:
        name = self.job.name
        if not reason and time.monotonic() - self.followed_since > NO_PODS_SECONDS:
            reason = f"it has no pods yet; a quota may be exhausted: oc describe {self.jobs.kind.PLURAL} {name}"
        if reason:
            self._report_once(name, reason, f"train: job {name} is held back: {reason}")

    def _report_pending_pods(self, job_pods: list[dict[str, Any]]) -> None:
        for pod in job_pods:
            name, pending = pods.pod_name(pod), pods.why_pending(pod)
            if pending is None:
                self._stuck_since.pop(name, None)
                self._last_reported.pop(name, None)
                continue
            problem, reason = pending
            if problem == "starting":
                problem, reason = self._with_events(name, problem, reason)
            if problem in ("image", "configuration") or CLAIM_NOT_FOUND.search(reason):
                self._stuck_since.setdefault(name, time.monotonic())
            else:
                self._stuck_since.pop(name, None)
            self._report_once(name, reason, f"train: pod {name} is waiting ({problem}): {reason}")

    def _with_events(self, pod: str, problem: str, reason: str) -> tuple[str, str]:
        """Add what a pod's events say about why it does not start, read every EVENTS_SECONDS."""
        now = time.monotonic()
        read_at, event = self._events.setdefault(pod, (now, None))
        if self._may_read_events and now - read_at >= EVENTS_SECONDS:
            try:
                event = pods.event_problem(self.jobs.events(pod))
            except client.ApiException as error:
                if error.status != 403:
                    raise
                self._may_read_events = False
                log.info("train: this account is not allowed to read events, which may show why pods do not start: "
                         "oc describe pod %s", pod)  # fmt: skip
            self._events[pod] = now, event
        return (event[0], f"{reason}; {event[1]}") if event else (problem, reason)
