"""Jobs on a cluster: create or adopt, follow, judge, and never leave one behind.

The pods' volumes hold what a run needs to go on, so that this process may die at any time: the next
attempt finds the job by its name.
"""

import re
import sys
import threading
import time
from functools import partial
from typing import Any

from kubernetes import client

from tailtune.errors import UserError
from tailtune.jobs import pods as look
from tailtune.jobs.failure import explain
from tailtune.jobs.job import BadInput, Job, JobFailed
from tailtune.jobs.kubernetes import CALL_TIMEOUT, KubernetesClient, in_words
from tailtune.jobs.logs import PodLog
from tailtune.jobs.objects import JOB_KINDS, SHORT_TIMEOUT, SPEC, Jobs, choose_kind
from tailtune.jobs.progress import Reporter
from tailtune.log import log
from tailtune.signals import on_stop

POLL_SECONDS = 3.0
DELETE_SECONDS = 600
STOP_SECONDS = 15
"""How long deleting may take after SIGTERM: a pod has 30 s."""
NO_PODS_SECONDS = 60
"""After how long a job without pods is spoken of."""
STUCK_SECONDS = 300
"""How long a pod may wait for something that seldom comes by itself: an image that cannot be pulled."""
NO_CLAIM = re.compile(r"persistentvolumeclaim \S+ not found")


class _Stopped(BaseException):
    """SIGTERM or SIGINT, its argument: ends whatever the main thread waits for, a call and its retries too."""


def _stop(received: list[int]) -> None:
    if len(received) == 1:
        raise _Stopped(received[0])


def run_job(job: Job, cluster: KubernetesClient) -> None:
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


def _delete_at_once(job: Job, cluster: KubernetesClient, jobs: Jobs | None) -> tuple[bool, str]:
    """Delete a job within the seconds that a stopped pod has; what came of it, also in words."""
    kinds = [jobs] if jobs else [Jobs(cluster, kind) for kind in JOB_KINDS.values()]
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
