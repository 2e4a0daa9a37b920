"""Jobs on a cluster: create or adopt, follow, judge, and never leave one behind.

The pods' volumes hold what a run needs to go on, so that this process may die at any time: the next
attempt finds the job by its name.
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tenacity
from kubernetes import client, config
from urllib3.exceptions import HTTPError

from tailtune.errors import UserError
from tailtune.jobs import pods as look
from tailtune.jobs import pytorchjob, trainjob
from tailtune.jobs.failure import explain
from tailtune.jobs.job import Job, JobFailed, label_value
from tailtune.jobs.logs import PodLog
from tailtune.log import log
from tailtune.signals import on_stop

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_SECONDS = 600
"""How long the API may fail in a row. The job itself goes on meanwhile."""
POLL_SECONDS = 3.0
CALL_TIMEOUT = (10, 60)
DELETE_SECONDS = 600
STUCK_SECONDS = 300
"""How long a pod may wait for something that seldom comes by itself: an image that cannot be pulled."""
SPEC = "tailtune.io/spec-sha256"
"""Annotation: what the job was made from, so that a retried step adopts only its own."""
LAUNCHER = "tailtune.io/launcher-pod"
"""Annotation: the pod that waits for the job. Without it nobody does: `tailtune gc`."""
MANAGED = "app.kubernetes.io/managed-by=tailtune"
TEMPORARY = (401, 408, 429, 500, 502, 503, 504)
KINDS = {"pytorchjob": pytorchjob, "trainjob": trainjob}
"""In order of preference."""
Result = TypeVar("Result")


class Cluster:
    """One namespace, with a client that survives what an API server does in a long night."""

    def __init__(self, namespace: str | None = None, api_seconds: float = API_SECONDS) -> None:
        self.api_seconds = api_seconds
        self.configuration = client.Configuration()
        self._connect()
        self.namespace = namespace or _namespace()
        self.kind: Any = pytorchjob
        self.spec_fields: tuple[str, ...] = ()

    def _connect(self) -> None:
        """Read address and credentials again: tokens expire."""
        try:
            if os.environ.get("KUBERNETES_SERVICE_HOST") and (SERVICE_ACCOUNT / "token").is_file():
                config.load_incluster_config(client_configuration=self.configuration)
            else:
                config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=self.configuration)
        except config.ConfigException as error:
            reason = " ".join(str(error).split())
            raise UserError(f"no cluster to talk to: {reason}; log in with oc login, or set KUBECONFIG") from None
        api = client.ApiClient(self.configuration)
        self.core, self.custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self.authorization = client.AuthorizationV1Api(api)

    def call(self, function: Callable[[], Result]) -> Result:
        """The function's result, tried again while the API is in trouble. Other errors are raised as they are."""

        def temporary(error: BaseException) -> bool:
            cause = error.__cause__ if isinstance(error, RuntimeError) else error  # the training SDK wraps them
            if isinstance(cause, client.ApiException):
                return cause.status in TEMPORARY
            return isinstance(cause, HTTPError | ConnectionError | TimeoutError)

        def before_retry(attempt: tenacity.RetryCallState) -> None:
            error = attempt.outcome.exception() if attempt.outcome else None
            log.warning("train: the cluster's API fails (%s), trying again", _in_words(error))
            self._connect()

        try:
            return tenacity.Retrying(
                retry=tenacity.retry_if_exception(temporary),
                wait=tenacity.wait_random_exponential(multiplier=0.5, max=30),
                stop=tenacity.stop_after_delay(self.api_seconds),
                before_sleep=before_retry,
                reraise=True,
            )(function)
        except (RuntimeError, HTTPError, OSError, client.ApiException) as error:
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
            if isinstance(cause, client.ApiException) and cause.status == 401:
                raise UserError("the cluster refuses the token; log in again with oc login") from None
            if isinstance(cause, client.ApiException):
                raise cause from None
            if not temporary(error):
                raise
            raise UserError(f"the cluster's API has not answered for {self.api_seconds:.0f} s: {_in_words(cause)}; "
                            "the job goes on, run again to follow it") from None  # fmt: skip

    def choose_kind(self, wanted: str) -> str:
        """Take the kind of job that is wanted, or for `auto` the first that the cluster has and the account may create.

        Says what it took and why. Raises UserError.
        """
        reasons = []
        for name, kind in KINDS.items():
            if wanted not in ("auto", name):
                continue
            if not self._has(kind):
                reasons.append(f"{kind.KIND} does not exist here")
            elif not self.may("create", kind.GROUP, kind.PLURAL):
                reasons.append(f"this account may not create {kind.KIND}")
            else:
                self.kind = kind
                why = f"; {reasons[0]}" if reasons else ""
                return f"{kind.KIND} ({'as there is' if wanted == 'auto' else 'as the recipe says'}{why})"
        raise UserError(f"no training job can be made in {self.namespace}: {'; '.join(reasons)}; run tailtune doctor")

    def _has(self, kind: Any) -> bool:
        """Whether the API knows the kind; takes down which fields its spec has."""
        api = self.core.api_client
        auth = {"response_type": "object", "auth_settings": ["BearerToken"], "_request_timeout": CALL_TIMEOUT}
        path = f"/apis/{kind.GROUP}/{kind.VERSION}"
        try:
            resources = self.call(lambda: api.call_api(path, "GET", **auth))[0]["resources"]
            if all(one["name"] != kind.PLURAL for one in resources):
                return False
            if kind is trainjob:
                schemas = self.call(lambda: api.call_api(f"/openapi/v3{path}", "GET", **auth))[0]["components"][
                    "schemas"
                ]
                spec = next(one for name, one in schemas.items() if name.endswith(f".{kind.KIND}"))
                self.spec_fields = tuple(spec["properties"]["spec"]["properties"])
        except client.ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    def may(self, verb: str, group: str, resource: str) -> bool:
        """Whether this account may do it in the namespace."""
        name, _, sub = resource.partition("/")
        attributes = client.V1ResourceAttributes(
            namespace=self.namespace, verb=verb, group=group, resource=name, subresource=sub or None
        )
        review = client.V1SelfSubjectAccessReview(
            spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
        )
        answer = self.call(lambda: self.authorization.create_self_subject_access_review(review))
        return bool(answer.status.allowed)

    def build(self, job: Job, annotations: dict[str, str]) -> Any:
        return self.kind.build(job, annotations, self.spec_fields)

    def fingerprint(self, job: Job) -> str:
        """Of everything that the job is."""
        content = self.core.api_client.sanitize_for_serialization(self.build(job, {}))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def create(self, job: Job) -> None:
        body = self.build(job, {SPEC: self.fingerprint(job), LAUNCHER: _this_pod()})
        if self.kind is pytorchjob:
            from kubeflow.training import TrainingClient

            sdk = TrainingClient(client_configuration=self.configuration, namespace=self.namespace)
            sdk.create_job(job=body, namespace=self.namespace)
        else:
            self.custom.create_namespaced_custom_object(*self._where(), body, _request_timeout=CALL_TIMEOUT)

    def get(self, name: str) -> dict[str, Any] | None:
        try:
            return dict(self.custom.get_namespaced_custom_object(*self._where(), name, _request_timeout=CALL_TIMEOUT))
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def delete(self, name: str) -> None:
        """Delete the job and its pods; not an error when it is gone."""
        try:
            body = client.V1DeleteOptions(propagation_policy="Foreground")
            self.custom.delete_namespaced_custom_object(*self._where(), name, body=body, _request_timeout=CALL_TIMEOUT)
        except client.ApiException as error:
            if error.status != 404:
                raise

    def adopt(self, name: str) -> None:
        """Say that this pod waits for the job now."""
        body = {"metadata": {"annotations": {LAUNCHER: _this_pod()}}}
        self.custom.patch_namespaced_custom_object(*self._where(), name, body, _request_timeout=CALL_TIMEOUT)

    def jobs(self, selector: str = MANAGED) -> list[dict[str, Any]]:
        """tailtune's jobs in the namespace."""
        found = self.custom.list_namespaced_custom_object(*self._where(), label_selector=selector,
                                                          _request_timeout=CALL_TIMEOUT)  # fmt: skip
        return list(found["items"])

    def pod_is_alive(self, name: str) -> bool:
        try:
            pod = self.core.read_namespaced_pod(name, self.namespace, _request_timeout=CALL_TIMEOUT)
        except client.ApiException as error:
            if error.status == 404:
                return False
            raise
        return pod.status.phase in ("Pending", "Running")

    def pods(self, name: str) -> list[dict[str, Any]]:
        selector = self.kind.POD_SELECTOR.format(name=name)
        found = self.core.list_namespaced_pod(self.namespace, label_selector=selector, _request_timeout=CALL_TIMEOUT)
        plain = self.core.api_client.sanitize_for_serialization(found)
        return sorted(plain["items"], key=look.pod_name)

    def _where(self) -> tuple[str, str, str, str]:
        return self.kind.GROUP, self.kind.VERSION, self.namespace, self.kind.PLURAL


def run_job(job: Job, cluster: Cluster) -> None:
    """Run a job to its end, or go on with the one of an earlier attempt. Raises JobFailed.

    SIGTERM and SIGINT delete the job, so that its GPUs are free.
    """
    stop = threading.Event()
    with on_stop(lambda received: stop.set()) as received:
        log.info("train: the job is a %s", cluster.choose_kind(job.pod.kind if job.pod else "auto"))
        _create_or_adopt(job, cluster, stop)
        follower = Follower(job, cluster)
        try:
            while not stop.is_set():
                if follower.look():
                    return
                stop.wait(POLL_SECONDS)
            _delete(job.name, cluster)
            raise JobFailed(f"job '{job.name}' was stopped by signal {received[0]} and deleted; "
                            "run again to resume from its last checkpoint")  # fmt: skip
        finally:
            follower.close()


def _create_or_adopt(job: Job, cluster: Cluster, stop: threading.Event) -> None:
    found = cluster.call(lambda: cluster.get(job.name))
    if found is not None:
        state, _ = cluster.kind.state(found)
        same = (found["metadata"].get("annotations") or {}).get(SPEC) == cluster.fingerprint(job)
        if same and state in ("waiting", "running") and not found["metadata"].get("deletionTimestamp"):
            log.info("train: job %s is there already and %s: following it", job.name, state)
            cluster.call(lambda: cluster.adopt(job.name))
            return
        log.info("train: job %s of an earlier attempt (%s) is replaced", job.name, state)
        _delete(job.name, cluster)
        give_up = time.monotonic() + DELETE_SECONDS
        while cluster.call(lambda: cluster.get(job.name)) is not None:
            if time.monotonic() > give_up or stop.wait(1):
                raise JobFailed(f"job '{job.name}' of an earlier attempt does not go away; "
                                f"delete it: oc delete {cluster.kind.PLURAL} {job.name}")  # fmt: skip
    try:
        cluster.call(lambda: cluster.create(job))
    except client.ApiException as error:
        if error.status == 409:  # created by a call whose answer was lost
            return
        raise JobFailed(f"job '{job.name}' was refused: {_in_words(error)}; run tailtune doctor") from None
    log.info("train: job %s created, %d nodes x %d ranks", job.name, job.num_nodes, job.ranks_per_node)


def _delete(name: str, cluster: Cluster) -> None:
    cluster.call(lambda: cluster.delete(name))
    log.info("train: job %s deleted", name)


class Follower:
    """Looks at a job again and again; says what changed, and passes its pods' logs on."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        self.started_at: float | None = None
        self.created_at = time.monotonic()
        self._logs: dict[tuple[str, str], PodLog] = {}
        self._said: dict[str, str] = {}
        self._stuck_since: dict[str, float] = {}
        self._print = threading.Lock()

    def look(self) -> bool:
        """Whether the job has succeeded. Raises JobFailed when it has failed or ran out of time."""
        job, cluster = self.job, self.cluster
        found = cluster.call(lambda: cluster.get(job.name))
        pods = cluster.call(lambda: cluster.pods(job.name))
        if found is None:
            raise JobFailed(f"job '{job.name}' was deleted while it ran; run again to resume from its last checkpoint")
        self._follow(pods)
        self._say_pending(pods)
        state, why = cluster.kind.state(found)
        bad = look.failures(pods)
        if state == "succeeded":
            return True
        if state == "failed":
            self.close()
            raise JobFailed(explain(job.name, bad, why))
        if any(failure.words.get("user_error") for failure in bad):  # a restart would meet the same bad input
            _delete(job.name, cluster)
            raise JobFailed(explain(job.name, bad, why))
        now = time.monotonic()
        if self.started_at is None and len(pods) == job.num_nodes and all(map(look.is_running, pods)):
            self.started_at = now
            log.info("train: all %d pods run", len(pods))
        if self.started_at is None and now - self.created_at > job.start_seconds:
            self._give_up(f"did not start within {job.start_seconds} s: {self._waits()}")
        if self._stuck_since and now - min(self._stuck_since.values()) > STUCK_SECONDS:
            self._give_up(f"waits for something that does not come: {self._waits()}")
        if now - self.created_at > job.deadline_seconds:
            _delete(job.name, cluster)
            raise JobFailed(f"job '{job.name}' took longer than {job.deadline_seconds} s and was deleted; raise "
                            "resources.deadline_seconds, and run again to resume")  # fmt: skip
        return False

    def close(self) -> None:
        """Read what is left of the logs."""
        for thread in self._logs.values():
            thread.end()
        for thread in self._logs.values():
            thread.join(timeout=2 * CALL_TIMEOUT[0])

    def _waits(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in sorted(self._said.items())) or "no pod exists"

    def _give_up(self, why: str) -> None:
        _delete(self.job.name, self.cluster)
        raise JobFailed(explain(self.job.name, [], why))

    def _follow(self, pods: list[dict[str, Any]]) -> None:
        cluster = self.cluster
        for pod in pods:
            key = look.pod_name(pod), str(pod["metadata"].get("uid"))
            begun = any("waiting" not in (c.get("state") or {}) or c.get("restartCount") for c in look.statuses(pod))
            if key not in self._logs and begun:
                show = partial(self._show, key[0].removeprefix(f"{self.job.name}-"))
                self._logs[key] = PodLog(lambda: cluster.core, cluster.namespace, key[0], cluster.kind.CONTAINER, show)
                self._logs[key].start()
            if key in self._logs:
                self._logs[key].restarts = sum(c.get("restartCount") or 0 for c in look.statuses(pod))

    def _show(self, prefix: str, line: str) -> None:
        with self._print:
            print(line if line.startswith("[rank ") else f"[{prefix}] {line}", file=sys.stderr, flush=True)

    def _say_pending(self, pods: list[dict[str, Any]]) -> None:
        for pod in pods:
            name, waits = look.pod_name(pod), look.why_pending(pod)
            if waits is not None and waits[0] in ("image", "configuration"):
                self._stuck_since.setdefault(name, time.monotonic())
            else:
                self._stuck_since.pop(name, None)
            if waits is None:
                self._said.pop(name, None)
            elif self._said.get(name) != waits[1]:
                self._said[name] = waits[1]
                log.info("train: pod %s waits (%s): %s", name, *waits)


def cancel(run: str, cluster: Cluster, *, dry_run: bool = False) -> list[str]:
    """Delete the jobs of a run that have not ended, of every kind; their names."""
    return _delete_all(cluster, f"{MANAGED},tailtune.io/run={label_value(run)}", lambda manifest: True, dry_run)


def collect_garbage(cluster: Cluster, *, dry_run: bool = False) -> list[str]:
    """Delete jobs that have not ended and that nobody waits for: the pod of their step is gone. Their names."""

    def orphaned(manifest: dict[str, Any]) -> bool:
        launcher = str((manifest["metadata"].get("annotations") or {}).get(LAUNCHER) or "")
        return bool(launcher) and not cluster.call(lambda: cluster.pod_is_alive(launcher))

    return _delete_all(cluster, MANAGED, orphaned, dry_run)


def _delete_all(cluster: Cluster, selector: str, wanted: Callable[[dict[str, Any]], bool], dry_run: bool) -> list[str]:
    names = []
    for kind in KINDS.values():
        cluster.kind = kind
        try:
            found = cluster.call(lambda: cluster.jobs(selector))
        except client.ApiException as error:
            if error.status in (403, 404):  # no such kind here, or none that this account may see
                continue
            raise
        for manifest in found:
            going = manifest["metadata"].get("deletionTimestamp")
            if not going and cluster.kind.state(manifest)[0] in ("waiting", "running") and wanted(manifest):
                names.append(name := manifest["metadata"]["name"])
                if not dry_run:
                    cluster.call(lambda name=name: cluster.delete(name))  # type: ignore[misc]
    return names


def _this_pod() -> str:
    """Name of the step's pod; empty outside a cluster, where nobody can see whether the launcher lives."""
    return os.environ.get("HOSTNAME", "") if os.environ.get("KUBERNETES_SERVICE_HOST") else ""


def _in_words(error: BaseException | None) -> str:
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, client.ApiException):
        try:
            message = json.loads(error.body or "{}").get("message", "")
        except (ValueError, AttributeError):
            message = ""
        return f"{error.status} {message or error.reason}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _namespace() -> str:
    """Of the pod, or of the kubeconfig's context."""
    path = SERVICE_ACCOUNT / "namespace"
    if path.is_file():
        return path.read_text().strip()
    _, active = config.list_kube_config_contexts(os.environ.get("KUBECONFIG"))
    namespace = active["context"].get("namespace")
    if not namespace:
        raise UserError("the cluster's context names no project; choose one with oc project, or give --namespace")
    return str(namespace)
