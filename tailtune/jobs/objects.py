"""The training jobs of a namespace: which kind the cluster has, and create, read, delete."""

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

from kubernetes import client

from tailtune.errors import UserError
from tailtune.jobs import pods as look
from tailtune.jobs import pytorchjob, trainjob
from tailtune.jobs.job import Job
from tailtune.jobs.kubernetes import CALL_TIMEOUT, KubernetesClient

SHORT_TIMEOUT = (3, 5)
SPEC = "tailtune.io/spec-sha256"
"""Annotation: what the job was made from, so that a retried step adopts only its own."""
LAUNCHER = "tailtune.io/launcher-pod"
"""Annotation: the pod that waits for the job. Without it nobody does: `tailtune gc`."""
MANAGED = "app.kubernetes.io/managed-by=tailtune"
JOB_KINDS = {"pytorchjob": pytorchjob, "trainjob": trainjob}
"""In order of preference."""


@dataclass(frozen=True)
class Jobs:
    """The jobs of one kind in a namespace. Every call is tried again while the API is in trouble."""

    cluster: KubernetesClient
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


def choose_kind(cluster: KubernetesClient, wanted: str) -> tuple[Jobs, str]:
    """The kind of job that is wanted, or for `auto` the first that the cluster has and the account may create; and why.

    Raises UserError.
    """
    reasons = []
    for name, kind in JOB_KINDS.items():
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


def find_kind(cluster: KubernetesClient, kind: Any) -> Jobs | None:
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


def _this_pod() -> str:
    """Name of the step's pod; empty outside a cluster, where nobody can see whether the launcher lives."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return ""
    return os.environ.get("KFP_POD_NAME") or os.environ.get("HOSTNAME", "")  # Linux cuts the latter at 63 characters
