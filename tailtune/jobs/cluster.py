"""Jobs on a cluster: create or adopt, follow, judge, and never leave one behind.

The pods' volumes hold what a run needs to go on, so that this process may die at any time: the next
attempt finds the job by its name.
"""

import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kubernetes import client

from tailtune.errors import UserError
from tailtune.jobs import pods as look
from tailtune.jobs import pytorchjob, trainjob
from tailtune.jobs.api import CALL_TIMEOUT, Cluster, in_words
from tailtune.jobs.failure import explain
from tailtune.jobs.job import BadInput, Job, JobFailed, label_value
from tailtune.jobs.logs import PodLog
from tailtune.jobs.progress import Reporter
from tailtune.log import log
from tailtune.signals import on_stop

POLL_SECONDS = 3.0
DELETE_SECONDS = 600
STOP_SECONDS = 15
"""How long deleting may take after SIGTERM: a pod has 30 s."""
SHORT_TIMEOUT = (3, 5)
NO_PODS_SECONDS = 60
"""After how long a job without pods is spoken of."""
STUCK_SECONDS = 300
"""How long a pod may wait for something that seldom comes by itself: an image that cannot be pulled."""
SPEC = "tailtune.io/spec-sha256"
"""Annotation: what the job was made from, so that a retried step adopts only its own."""
LAUNCHER = "tailtune.io/launcher-pod"
"""Annotation: the pod that waits for the job. Without it nobody does: `tailtune gc`."""
MANAGED = "app.kubernetes.io/managed-by=tailtune"
NO_CLAIM = re.compile(r"persistentvolumeclaim \S+ not found")
KINDS = {"pytorchjob": pytorchjob, "trainjob": trainjob}
"""In order of preference."""


@dataclass(frozen=True)
class Jobs:
    """The jobs of one kind in a namespace. Every call is tried again while the API is in trouble."""

    cluster: Cluster
    kind: Any
    spec_fields: tuple[str, ...] = ()
    """What the cluster's version of the kind knows, where versions differ."""

    def build(self, job: Job, annotations: dict[str, str]) -> Any:
        """The manifest."""
        return self.kind.build(job, annotations, self.spec_fields)

    def fingerprint(self, job: Job) -> str:
        """Of everything that the job is."""
        content = self.cluster.core.api_client.sanitize_for_serialization(self.build(job, {}))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def create(self, job: Job) -> None:
        """Make the job; this pod waits for it."""
        cluster = self.cluster
        body = self.build(job, {SPEC: self.fingerprint(job), LAUNCHER: _this_pod()})

        def create() -> None:
            if self.kind is pytorchjob:
                from kubeflow.training import TrainingClient

                sdk = TrainingClient(client_configuration=cluster.configuration, namespace=cluster.namespace)
                sdk.create_job(job=body, namespace=cluster.namespace)
            else:
                cluster.custom.create_namespaced_custom_object(*self._where, body, _request_timeout=CALL_TIMEOUT)

        cluster.call(create)

    def get(self, name: str) -> dict[str, Any] | None:
        """The job as the API returns it; None when there is none."""
        cluster = self.cluster
        try:
            return dict(cluster.call(lambda: cluster.custom.get_namespaced_custom_object(
                *self._where, name, _request_timeout=CALL_TIMEOUT)))  # fmt: skip
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def delete(self, name: str, *, seconds: float | None = None, timeout: tuple[int, int] = CALL_TIMEOUT) -> bool:
        """Delete the job and its pods; whether it was there."""
        cluster, body = self.cluster, client.V1DeleteOptions(propagation_policy="Foreground")
        try:
            cluster.call(lambda: cluster.custom.delete_namespaced_custom_object(
                *self._where, name, body=body, _request_timeout=timeout), seconds)  # fmt: skip
        except client.ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    def adopt(self, name: str) -> None:
        """Say that this pod waits for the job now."""
        cluster, body = self.cluster, {"metadata": {"annotations": {LAUNCHER: _this_pod()}}}
        cluster.call(lambda: cluster.custom.patch_namespaced_custom_object(*self._where, name, body,
                                                                           _request_timeout=CALL_TIMEOUT))  # fmt: skip

    def write_progress(self, name: str, text: str) -> None:
        """Leave it in the annotation that the dashboard reads, where the kind has one. Tried once."""
        if self.kind.PROGRESS:
            body = {"metadata": {"annotations": {self.kind.PROGRESS: text}}}
            self.cluster.custom.patch_namespaced_custom_object(*self._where, name, body, _request_timeout=SHORT_TIMEOUT)

    def find(self, selector: str = MANAGED) -> list[dict[str, Any]]:
        """tailtune's jobs."""
        cluster = self.cluster
        found = cluster.call(lambda: cluster.custom.list_namespaced_custom_object(
            *self._where, label_selector=selector, _request_timeout=CALL_TIMEOUT))  # fmt: skip
        return [dict(one) for one in found["items"]]

    def pods(self, name: str) -> list[dict[str, Any]]:
        """The pods of a job that are there."""
        cluster, selector = self.cluster, self.kind.POD_SELECTOR.format(name=name)
        found = cluster.call(lambda: cluster.core.list_namespaced_pod(
            cluster.namespace, label_selector=selector, _request_timeout=CALL_TIMEOUT))  # fmt: skip
        plain = cluster.core.api_client.sanitize_for_serialization(found)
        return sorted(plain["items"], key=look.pod_name)

    @property
    def _where(self) -> tuple[str, str, str, str]:
        return self.kind.GROUP, self.kind.VERSION, self.cluster.namespace, self.kind.PLURAL


def choose_kind(cluster: Cluster, wanted: str) -> tuple[Jobs, str]:
    """The kind of job that is wanted, or for `auto` the first that the cluster has and the account may create; and why.

    Raises UserError.
    """
    reasons = []
    for name, kind in KINDS.items():
        if wanted not in ("auto", name):
            continue
        jobs = find_kind(cluster, kind)
        if jobs is None:
            reasons.append(f"{kind.KIND} does not exist here")
        elif not cluster.may("create", kind.GROUP, kind.PLURAL):
            reasons.append(f"this account may not create {kind.KIND}")
        else:
            why = f"; {reasons[0]}" if reasons else ""
            return jobs, f"{kind.KIND} ({'as there is' if wanted == 'auto' else 'as the recipe says'}{why})"
    raise UserError(f"no training job can be made in {cluster.namespace}: {'; '.join(reasons)}; run tailtune doctor")


def find_kind(cluster: Cluster, kind: Any) -> Jobs | None:
    """None when the API does not know the kind."""
    path = f"/apis/{kind.GROUP}/{kind.VERSION}"
    try:
        if all(one["name"] != kind.PLURAL for one in cluster.get_json(path)["resources"]):
            return None
        if kind is not trainjob:
            return Jobs(cluster, kind)
        schemas = cluster.get_json(f"/openapi/v3{path}")["components"]["schemas"]
    except client.ApiException as error:
        if error.status == 404:
            return None
        raise
    spec = next(one for name, one in schemas.items() if name.endswith(f".{kind.KIND}"))
    return Jobs(cluster, kind, tuple(spec["properties"]["spec"]["properties"]))


class _Stopped(BaseException):
    """SIGTERM or SIGINT, its argument: ends whatever the main thread waits for, a call and its retries too."""


def _stop(received: list[int]) -> None:
    if len(received) == 1:
        raise _Stopped(received[0])


def run_job(job: Job, cluster: Cluster) -> None:
    """Run a job to its end, or go on with the one of an earlier attempt. Raises JobFailed.

    SIGTERM and SIGINT delete the job, so that its GPUs are free.
    """
    jobs, follower = None, None
    try:
        with on_stop(_stop):
            jobs, why = choose_kind(cluster, job.pod.kind if job.pod else "auto")
            log.info("train: the job is a %s", why)
            _create_or_adopt(job, jobs)
            follower = Follower(job, jobs)
            follower.wait()
    except _Stopped as stopped:
        with on_stop(lambda again: None):
            deleted, outcome = _delete_at_once(job, cluster, jobs)
            if deleted and follower:
                follower.close(STOP_SECONDS / 2)
        raise JobFailed(f"job '{job.name}' was stopped by signal {stopped.args[0]} {outcome}") from None


def _delete_at_once(job: Job, cluster: Cluster, jobs: Jobs | None) -> tuple[bool, str]:
    """Delete a job within the seconds that a stopped pod has; what came of it, also in words."""
    kinds = [jobs] if jobs else [Jobs(cluster, kind) for kind in KINDS.values()]
    try:
        for _ in range(2):
            there = []
            for one in kinds:
                try:
                    there.append(one.delete(job.name, seconds=STOP_SECONDS, timeout=SHORT_TIMEOUT))
                except client.ApiException as error:
                    if jobs or error.status != 403:  # of a kind that was not chosen, there is no job
                        raise
            if any(there):
                log.info("train: job %s deleted", job.name)
                return True, "and deleted; run again to resume from its last checkpoint"
            time.sleep(1)  # a creation that was under way may come through yet
    except (UserError, client.ApiException) as error:
        problem = str(error).split("; ")[0] if isinstance(error, UserError) else in_words(error)
        return False, f"but could not be deleted: {problem}; delete it with tailtune cancel RUN"
    return False, "before there was one"


def _create_or_adopt(job: Job, jobs: Jobs) -> None:
    found = jobs.get(job.name)
    if found is not None:
        state, _ = jobs.kind.state(found)
        same = (found["metadata"].get("annotations") or {}).get(SPEC) == jobs.fingerprint(job)
        if same and state in ("waiting", "running") and not found["metadata"].get("deletionTimestamp"):
            log.info("train: job %s is there already and %s: following it", job.name, state)
            jobs.adopt(job.name)
            return
        log.info("train: job %s of an earlier attempt (%s) is replaced", job.name, state)
        _delete(job.name, jobs)
        give_up = time.monotonic() + DELETE_SECONDS
        while jobs.get(job.name) is not None:
            if time.monotonic() > give_up:
                raise JobFailed(f"job '{job.name}' of an earlier attempt does not go away; "
                                f"delete it: oc delete {jobs.kind.PLURAL} {job.name}")  # fmt: skip
            time.sleep(1)
    try:
        jobs.create(job)
    except client.ApiException as error:
        if error.status == 409:  # made by a call whose answer was lost, or by somebody else: the job says which
            _create_or_adopt(job, jobs)
            return
        raise JobFailed(f"job '{job.name}' was refused: {in_words(error)}; run tailtune doctor") from None
    log.info("train: job %s created, %d nodes x %d ranks", job.name, job.num_nodes, job.ranks_per_node)


def _delete(name: str, jobs: Jobs) -> None:
    jobs.delete(name)
    log.info("train: job %s deleted", name)


class Follower:
    """Looks at a job again and again; says what changed, and passes its pods' logs on."""

    def __init__(self, job: Job, jobs: Jobs) -> None:
        self.job, self.jobs = job, jobs
        self.started_at: float | None = None
        self.created_at = time.monotonic()
        self._logs: dict[tuple[str, str], PodLog] = {}
        self._said: dict[str, str] = {}
        self._stuck_since: dict[str, float] = {}
        self._seen: dict[str, dict[str, Any]] = {}
        """The pods by their uid, as they were last: an operator may delete those of a failed job."""
        self._progress = Reporter(partial(jobs.write_progress, job.name))
        self._print = threading.Lock()

    def wait(self) -> None:
        """Look until the job has succeeded; its pods' logs have been shown then. Raises JobFailed."""
        try:
            while not self.look():
                time.sleep(POLL_SECONDS)
        except Exception as error:  # when the launcher is stopped, the job is deleted first
            self.close()
            if isinstance(error, JobFailed):
                self._progress.tell(succeeded=False)
            raise
        self.close()
        self._progress.tell(succeeded=True)

    def look(self) -> bool:
        """Whether the job has succeeded. Raises JobFailed when it has failed or ran out of time."""
        job, jobs = self.job, self.jobs
        found, pods = jobs.get(job.name), jobs.pods(job.name)
        if found is None:
            raise JobFailed(f"job '{job.name}' was deleted while it ran; run again to resume from its last checkpoint")
        self._follow(pods)
        self._say_pending(pods)
        self._progress.tell()
        self._seen |= {pod["metadata"]["uid"]: pod for pod in pods}
        state, why = jobs.kind.state(found)
        bad = look.failures(self._seen.values())
        if state == "waiting" and not pods:
            self._say_no_pods(why)
        elif pods:
            self._said.pop(job.name, None)
        if state == "succeeded":
            return True
        if state == "failed":
            self.close()
            raise _failed(job.name, bad, why)
        if any(failure.words.get("user_error") for failure in bad):  # a restart would meet the same bad input
            _delete(job.name, jobs)
            raise _failed(job.name, bad, why)
        now = time.monotonic()
        if self.started_at is None and len(pods) == job.num_nodes and all(map(look.is_running, pods)):
            self.started_at = now
            log.info("train: all %d pods run", len(pods))
        if self.started_at is None and now - self.created_at > job.start_seconds:
            self._give_up(f"did not start within {job.start_seconds} s: {self._waits()}")
        if self._stuck_since and now - min(self._stuck_since.values()) > STUCK_SECONDS:
            self._give_up(f"waits for something that does not come: {self._waits()}")
        if now - self.created_at > job.deadline_seconds:
            _delete(job.name, jobs)
            raise JobFailed(f"job '{job.name}' took longer than {job.deadline_seconds} s and was deleted; raise "
                            "resources.deadline_seconds, and run again to resume")  # fmt: skip
        return False

    def close(self, seconds: float = 2 * CALL_TIMEOUT[0]) -> None:
        """Read what is left of the logs, for so many seconds at most."""
        for thread in self._logs.values():
            thread.end()
        give_up = time.monotonic() + seconds
        for thread in self._logs.values():
            thread.join(timeout=max(0, give_up - time.monotonic()))

    def _waits(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in sorted(self._said.items())) or "no pod exists"

    def _give_up(self, why: str) -> None:
        _delete(self.job.name, self.jobs)
        raise JobFailed(explain(self.job.name, [], why))

    def _follow(self, pods: list[dict[str, Any]]) -> None:
        cluster = self.jobs.cluster
        for pod in pods:
            key = look.pod_name(pod), str(pod["metadata"].get("uid"))
            begun = any("waiting" not in (c.get("state") or {}) or c.get("restartCount") for c in look.statuses(pod))
            if key not in self._logs and begun:
                show = partial(self._show, key[0].removeprefix(f"{self.job.name}-"))
                container = self.jobs.kind.CONTAINER
                self._logs[key] = PodLog(lambda: cluster.core, cluster.namespace, key[0], container, show)
                self._logs[key].start()
            if key in self._logs:
                self._logs[key].restarts = sum(c.get("restartCount") or 0 for c in look.statuses(pod))

    def _show(self, prefix: str, line: str) -> None:
        with self._print:
            self._progress.read(line)
            print(line if line.startswith("[rank ") else f"[{prefix}] {line}", file=sys.stderr, flush=True)

    def _say(self, name: str, why: str, line: str) -> None:
        """Log the line, when what the pod or the job waits for is not what was said last."""
        if self._said.get(name) != why:
            self._said[name] = why
            log.info("%s", line)

    def _say_no_pods(self, why: str) -> None:
        if not why and time.monotonic() - self.created_at > NO_PODS_SECONDS:
            why = f"it has no pods yet; a quota may be full: oc describe {self.jobs.kind.PLURAL} {self.job.name}"
        if why:
            self._say(self.job.name, why, f"train: job {self.job.name} is held back: {why}")

    def _say_pending(self, pods: list[dict[str, Any]]) -> None:
        for pod in pods:
            name, waits = look.pod_name(pod), look.why_pending(pod)
            if waits is not None and (waits[0] in ("image", "configuration") or NO_CLAIM.search(waits[1])):
                self._stuck_since.setdefault(name, time.monotonic())
            else:
                self._stuck_since.pop(name, None)
            if waits is None:
                self._said.pop(name, None)
            else:
                self._say(name, waits[1], f"train: pod {name} waits ({waits[0]}): {waits[1]}")


def _failed(name: str, failures: list[look.Failure], why: str) -> JobFailed:
    bad_input = any(failure.words.get("user_error") for failure in failures)
    return (BadInput if bad_input else JobFailed)(explain(name, failures, why))


def cancel(
    cluster: Cluster, *, run: str | None = None, pipeline_run: str | None = None, dry_run: bool = False
) -> list[str]:
    """Delete the jobs, of every kind, that have not ended: of runs by name, or of one run of the pipeline by its id.

    Returns their names. Raises UserError when this account may not look.
    """
    label = f"run={label_value(run)}" if run else f"pipeline-run={label_value(pipeline_run or '')}"
    return _delete_all(cluster, f"{MANAGED},tailtune.io/{label}", lambda manifest: True, dry_run)


def collect_garbage(cluster: Cluster, *, dry_run: bool = False) -> list[str]:
    """Delete jobs that have not ended and that nobody waits for: the pod of their step is gone. Their names."""

    def orphaned(manifest: dict[str, Any]) -> bool:
        launcher = str((manifest["metadata"].get("annotations") or {}).get(LAUNCHER) or "")
        return bool(launcher) and not cluster.pod_is_alive(launcher)

    return _delete_all(cluster, MANAGED, orphaned, dry_run)


def _delete_all(cluster: Cluster, selector: str, wanted: Callable[[dict[str, Any]], bool], dry_run: bool) -> list[str]:
    names, refused, looked = [], "", False
    for kind in KINDS.values():
        jobs = Jobs(cluster, kind)
        try:
            found = jobs.find(selector)
        except client.ApiException as error:
            if error.status not in (403, 404):
                raise
            refused = refused or (in_words(error) if error.status == 403 else "")
            continue
        looked = True
        for manifest in found:
            going = manifest["metadata"].get("deletionTimestamp")
            if not going and kind.state(manifest)[0] in ("waiting", "running") and wanted(manifest):
                names.append(name := manifest["metadata"]["name"])
                if not dry_run:
                    jobs.delete(name)
    if refused and not looked:
        raise UserError(f"this account may not see training jobs in {cluster.namespace}: {refused}; oc whoami")
    return names


def _this_pod() -> str:
    """Name of the step's pod; empty outside a cluster, where nobody can see whether the launcher lives."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return ""
    return os.environ.get("KFP_POD_NAME") or os.environ.get("HOSTNAME", "")  # Linux cuts the latter at 63 characters
