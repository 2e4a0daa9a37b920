"""TrainJob of Kubeflow Trainer v2, the successor of PyTorchJob."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kubernetes import client

from tailtune.errors import UserError
from tailtune.jobs.job import Job
from tailtune.jobs.kubernetes import CALL_TIMEOUT_SECONDS, KubernetesClient
from tailtune.jobs.pods import job_metadata, pod_template
from tailtune.log import log

KIND, GROUP, VERSION, PLURAL = "TrainJob", "trainer.kubeflow.org", "v1alpha1", "trainjobs"
CONTAINER = "node"
"""Name of the training container, and of the job within the JobSet, in the runtimes."""
POD_SELECTOR = "jobset.sigs.k8s.io/jobset-name={name}"
PROGRESS_ANNOTATION = "trainer.opendatahub.io/trainerStatus"
"""Annotation from which the dashboard reads the progress (progress.py)."""
RUNTIMES = ("torch-distributed", "torch-distributed-cpu")
"""ClusterTrainingRuntimes, in order of preference. They differ only in image and resources, which the job sets itself;
some versions have only the first one (red-hat-data-services/trainer, manifests/rhoai/runtimes/)."""
ACCOUNT = "tailtune-training"
"""Service account without rights or token, from deploy/: a TrainJob cannot set `automountServiceAccountToken`."""
PATCH_MANAGER = "tailtune.io/launcher"
PATCHES = {
    "runtimePatches": ("trainingRuntimeSpec", "template", "spec", "replicatedJobs", "template", "spec", "template",
                       "spec"),
    "podTemplateOverrides": ("spec",),
}  # fmt: skip
"""Fields of a spec that configure pods, newest first, and where each has the pod's fields."""
GRACE = "terminationGracePeriodSeconds"
DEFAULT_GRACE_SECONDS = 30
DEFAULT_SHUTDOWN_SECONDS = 25
"""Leaves the pod's main process time for its termination message, within Kubernetes' default grace period."""


@dataclass(frozen=True)
class Api:
    """What the cluster's version of TrainJob can set. It would drop other fields without an error."""

    spec: frozenset[str]
    """Fields of a spec."""
    pod: frozenset[str]
    """Fields of a pod that a spec can set; all others come from the runtime."""
    container: frozenset[str]
    """Fields of a container in such a pod."""
    runtime: str = RUNTIMES[0]
    account: str = ""
    """Service account of the pods; empty for the project's default one."""

    @property
    def patch(self) -> str:
        """The field of a spec that configures pods. Raises UserError if the version has none that tailtune knows."""
        for name in PATCHES:
            if name in self.spec:
                return name
        raise UserError(
            f"this cluster's TrainJob supports neither {' nor '.join(PATCHES)}",
            "set -p resources.job_kind=pytorchjob",
        )

    def shutdown_seconds(self, job: Job) -> int:
        """How long the ranks of the job may take to stop."""
        return job.shutdown_seconds if GRACE in self.pod else min(job.shutdown_seconds, DEFAULT_SHUTDOWN_SECONDS)


def read_api(schema: Mapping[str, Any]) -> Api:
    """The fields in the OpenAPI schema of TrainJob."""
    spec = _properties(schema, "spec")
    path = next(((name, *PATCHES[name]) for name in PATCHES if name in spec), ())
    pod = _properties(schema, "spec", *path) if path else {}
    return Api(frozenset(spec), frozenset(pod), frozenset(_properties(pod.get("containers", {}))))


def _properties(schema: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The fields of an object, or of an array's elements, below a path of such fields."""
    properties: Mapping[str, Any] = (schema.get("items") or schema).get("properties", {})
    return _properties(properties.get(path[0], {}), *path[1:]) if path else properties


def find_runtime(cluster: KubernetesClient) -> str | None:
    """The first of RUNTIMES that exists. Raises client.ApiException where they may not be read."""
    for name in RUNTIMES:
        path = (GROUP, VERSION, "clustertrainingruntimes", name)
        read = partial(cluster.custom.get_cluster_custom_object, *path, _request_timeout=CALL_TIMEOUT_SECONDS)
        try:
            cluster.call(read)
            return name
        except client.ApiException as error:
            if error.status != 404:
                raise
    return None


def with_objects(api: Api, cluster: KubernetesClient) -> Api:
    """The API with the runtime and the service account to use in this namespace.

    Where runtimes may not be read, it is the first one, which every version has. An account that is not known to exist
    is not used: pods that name one that does not exist are never created.
    """
    runtime, account = RUNTIMES[0], ""
    with _unless_refused():
        runtime = find_runtime(cluster) or runtime
    with _unless_refused():
        path = (ACCOUNT, cluster.namespace)
        cluster.call(lambda: cluster.core.read_namespaced_service_account(*path, _request_timeout=CALL_TIMEOUT_SECONDS))
        account = ACCOUNT
    return replace(api, runtime=runtime, account=account)


@contextmanager
def _unless_refused() -> Iterator[None]:
    try:
        yield
    except client.ApiException as error:
        if error.status not in (403, 404):
            raise


def log_limits(job: Job, api: Api) -> None:
    """Log what this version of TrainJob cannot do for the job."""
    if (seconds := api.shutdown_seconds(job)) < job.shutdown_seconds:
        log.warning(
            "train: this cluster's TrainJob gives pods %d s to stop, so a checkpoint that takes longer than %d s is "
            "not saved when they are stopped, and training resumes from the one before",
            DEFAULT_GRACE_SECONDS, seconds,
        )  # fmt: skip
    if not api.account:
        log.warning("train: the job's pods mount the token of the project's default service account: the account %s of "
                    "deploy/ does not exist, or may not be read", ACCOUNT)  # fmt: skip


def build(job: Job, annotations: Mapping[str, str], api: Api) -> dict[str, Any]:
    """The manifest, for the cluster's version of TrainJob. Raises UserError if that cannot configure pods."""
    assert job.pod is not None
    template = pod_template(replace(job, shutdown_seconds=api.shutdown_seconds(job)), CONTAINER)
    pod = template["spec"]
    container = pod["containers"][0]
    patch = {name: value for name, value in pod.items() if name in api.pod}
    # the trainer's webhook refuses variables here; they belong in `trainer`
    patch["containers"] = [{name: value for name, value in container.items() if name in api.container - {"env"}}]
    if api.account:
        patch["serviceAccountName"] = api.account
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": GROUP, "kind": "ClusterTrainingRuntime", "name": api.runtime},
        "trainer": {
            "image": job.pod.image,
            "command": container["command"],
            "env": container["env"],
            "numNodes": job.num_nodes,
            "numProcPerNode": job.ranks_per_node,
            "resourcesPerNode": container["resources"],
        },
    }
    if "activeDeadlineSeconds" in api.spec:  # the launcher enforces it in any case
        spec["activeDeadlineSeconds"] = job.deadline_seconds
    metadata = {"labels": dict(job.labels)}
    if api.patch == "runtimePatches":
        replicated = {"name": CONTAINER, "template": {"spec": {"template": {"metadata": metadata, "spec": patch}}}}
        spec["runtimePatches"] = [{
            "manager": PATCH_MANAGER,
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
        }]  # fmt: skip
    else:
        spec["podTemplateOverrides"] = [{"targetJobs": [{"name": CONTAINER}], "metadata": metadata, "spec": patch}]
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": job_metadata(job, annotations),
        "spec": spec,
    }


def state(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """State (`waiting`, `running`, `succeeded` or `failed`) and reason of a TrainJob as the API returns it."""
    status = manifest.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or [] if c["status"] == "True"}
    for kind, name in (("Complete", "succeeded"), ("Failed", "failed")):
        if kind in conditions:
            return name, str(conditions[kind].get("message") or conditions[kind].get("reason") or "")
    if "Suspended" in conditions:
        return "waiting", "waiting for admission by the queue"
    if any(job.get("active") for job in status.get("jobsStatus") or []):
        return "running", ""
    return "waiting", ""
