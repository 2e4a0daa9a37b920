"""The training jobs of a namespace: which kind the cluster has, and how to create, read and delete them."""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kubernetes import client

from tailtune.errors import UserError
from tailtune.jobs import pods, pytorchjob, trainjob
from tailtune.jobs.job import Job
from tailtune.jobs.kubernetes import CALL_TIMEOUT_SECONDS, KubernetesClient

SHORT_TIMEOUT_SECONDS = (3, 5)
FINGERPRINT_ANNOTATION = "tailtune.io/spec-sha256"
"""Annotation with the hash of the manifest. A retried step adopts a job only if it would create the same one."""
LAUNCHER_ANNOTATION = "tailtune.io/launcher-pod"
"""Annotation naming the pod that waits for the job. `tailtune gc` deletes the job once that pod is gone."""
MANAGED_SELECTOR = "app.kubernetes.io/managed-by=tailtune"
"""Label selector for all jobs that tailtune has created."""
JOB_KINDS = {"pytorchjob": pytorchjob, "trainjob": trainjob}
"""In order of preference."""


@dataclass(frozen=True)
class Jobs:
    """The jobs of one kind in a namespace. Calls are retried while the API fails temporarily."""

    cluster: KubernetesClient
    kind: Any
    """The module `pytorchjob` or `trainjob`."""
    api: trainjob.Api | None = None
    """What the cluster's version of TrainJob can set; None for a PyTorchJob."""

    def build(self, job: Job, annotations: dict[str, str]) -> Any:
        """The manifest of the job."""
        return self.kind.build(job, annotations, *([self.api] if self.api else []))

    def fingerprint(self, job: Job) -> str:
        """SHA-256 of the job's manifest, without what depends on the objects that the cluster has at the moment."""
        api = replace(self.api, runtime=trainjob.RUNTIMES[0], account="") if self.api else None
        manifest = self.cluster.core.api_client.sanitize_for_serialization(replace(self, api=api).build(job, {}))
        return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()

    def create(self, job: Job) -> None:
        """Create the job, annotated with this pod as its launcher. Raises client.ApiException if it is refused."""
        cluster = self.cluster
        body = self.build(job, {FINGERPRINT_ANNOTATION: self.fingerprint(job), LAUNCHER_ANNOTATION: _this_pod()})

        def create() -> None:
            if self.kind is pytorchjob:
                from kubeflow.training import TrainingClient

                sdk = TrainingClient(client_configuration=cluster.configuration, namespace=cluster.namespace)
                # the SDK sets no timeout, and a request that is never answered would hold up the step for ever
                sdk.custom_api.create_namespaced_custom_object = partial(
                    sdk.custom_api.create_namespaced_custom_object, _request_timeout=CALL_TIMEOUT_SECONDS
                )
                sdk.create_job(job=body, namespace=cluster.namespace)
            else:
                cluster.custom.create_namespaced_custom_object(*self._path, body, _request_timeout=CALL_TIMEOUT_SECONDS)

        if self.api:
            trainjob.log_limits(job, self.api)
        cluster.call(create)

    def get(self, name: str) -> dict[str, Any] | None:
        """The job as the API returns it; None if it does not exist."""
        cluster = self.cluster
        try:
            return dict(
                cluster.call(
                    lambda: cluster.custom.get_namespaced_custom_object(
                        *self._path, name, _request_timeout=CALL_TIMEOUT_SECONDS
                    )
                )
            )
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def delete(
        self, name: str, *, seconds: float | None = None, timeout_seconds: tuple[int, int] = CALL_TIMEOUT_SECONDS
    ) -> bool:
        """Delete the job and its pods, and return whether it existed. Retries for `seconds`."""
        cluster, body = self.cluster, client.V1DeleteOptions(propagation_policy="Foreground")
        try:
            cluster.call(
                lambda: cluster.custom.delete_namespaced_custom_object(
                    *self._path, name, body=body, _request_timeout=timeout_seconds
                ),
                seconds,
            )
        except client.ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    def adopt(self, name: str) -> None:
        """Annotate the job with this pod as its launcher."""
        self.cluster.call(lambda: self._annotate(name, LAUNCHER_ANNOTATION, _this_pod(), CALL_TIMEOUT_SECONDS))

    def write_progress(self, name: str, status: str) -> None:
        """Write the annotation that the dashboard reads. Not retried."""
        self._annotate(name, self.kind.PROGRESS_ANNOTATION, status, SHORT_TIMEOUT_SECONDS)

    def _annotate(self, name: str, annotation: str, value: str, timeout_seconds: tuple[int, int]) -> None:
        body = {"metadata": {"annotations": {annotation: value}}}
        self.cluster.custom.patch_namespaced_custom_object(*self._path, name, body, _request_timeout=timeout_seconds)

    def find(self, selector: str = MANAGED_SELECTOR) -> list[dict[str, Any]]:
        """The jobs that match a label selector."""
        cluster = self.cluster
        answer = cluster.call(
            lambda: cluster.custom.list_namespaced_custom_object(
                *self._path, label_selector=selector, _request_timeout=CALL_TIMEOUT_SECONDS
            )
        )
        return [dict(manifest) for manifest in answer["items"]]

    def pods(self, name: str) -> list[dict[str, Any]]:
        """The pods of a job that exist now, sorted by name."""
        cluster, selector = self.cluster, self.kind.POD_SELECTOR.format(name=name)
        pod_list = cluster.call(
            lambda: cluster.core.list_namespaced_pod(
                cluster.namespace, label_selector=selector, _request_timeout=CALL_TIMEOUT_SECONDS
            )
        )
        answer = cluster.core.api_client.sanitize_for_serialization(pod_list)
        return sorted(answer["items"], key=pods.pod_name)

    def events(self, pod: str) -> list[dict[str, Any]]:
        """The events of a pod. Raises client.ApiException, with status 403 if this account may not read events."""
        cluster = self.cluster
        event_list = cluster.call(
            lambda: cluster.core.list_namespaced_event(
                cluster.namespace,
                field_selector=f"involvedObject.name={pod}",
                _request_timeout=CALL_TIMEOUT_SECONDS,
            )
        )
        return list(cluster.core.api_client.sanitize_for_serialization(event_list)["items"])

    @property
    def _path(self) -> tuple[str, str, str, str]:
        return self.kind.GROUP, self.kind.VERSION, self.cluster.namespace, self.kind.PLURAL


def choose_kind(cluster: KubernetesClient, requested: str) -> tuple[Jobs, str]:
    """The kind of job to create, and in words why it was chosen.

    For `auto` this is the first kind that the cluster has and that this account is allowed to create. Raises UserError
    if there is none, or if the requested one is not available.
    """
    reasons = []
    for name, kind in JOB_KINDS.items():
        if requested not in ("auto", name):
            continue
        jobs = find_kind(cluster, kind)
        if jobs is None:
            reasons.append(f"{kind.KIND} does not exist here")
        elif not cluster.may("create", kind.GROUP, kind.PLURAL):
            reasons.append(f"this account is not allowed to create {kind.KIND}")
        else:
            why = "chosen automatically" if requested == "auto" else "set by the recipe"
            if jobs.api:
                jobs = replace(jobs, api=trainjob.with_objects(jobs.api, cluster))
            return jobs, f"{kind.KIND} ({'; '.join([why, *reasons])})"
    problem = f"no training job can be created in {cluster.namespace}: {'; '.join(reasons)}"
    raise UserError(problem, "run tailtune doctor")


def find_kind(cluster: KubernetesClient, kind: Any) -> Jobs | None:
    """The namespace's jobs of a kind; None if the cluster does not have the kind."""
    path = f"/apis/{kind.GROUP}/{kind.VERSION}"
    try:
        if all(resource["name"] != kind.PLURAL for resource in cluster.get_json(path)["resources"]):
            return None
        if kind is not trainjob:
            return Jobs(cluster, kind)
        schemas = cluster.get_json(f"/openapi/v3{path}")["components"]["schemas"]
    except client.ApiException as error:
        if error.status == 404:
            return None
        raise
    schema = next(schema for name, schema in schemas.items() if name.endswith(f".{kind.KIND}"))
    return Jobs(cluster, kind, trainjob.read_api(schema))


def _this_pod() -> str:
    """Name of the step's pod; empty outside a cluster, where `tailtune gc` cannot see whether the launcher is alive."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return ""
    return os.environ.get("KFP_POD_NAME") or os.environ.get("HOSTNAME", "")  # Linux cuts HOSTNAME at 63 characters
