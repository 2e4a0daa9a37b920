"""PyTorchJob of the Training Operator, built with the models of the kubeflow-training SDK."""

from collections.abc import Mapping
from typing import Any

from kubeflow.training import (
    KubeflowOrgV1PyTorchJob,
    KubeflowOrgV1PyTorchJobSpec,
    KubeflowOrgV1ReplicaSpec,
    KubeflowOrgV1RunPolicy,
)
from kubernetes import client

from tailtune.jobs.job import Job
from tailtune.jobs.pods import job_metadata, pod_template

KIND, GROUP, VERSION, PLURAL = "PyTorchJob", "kubeflow.org", "v1", "pytorchjobs"
CONTAINER = "pytorch"
"""Name that the operator expects for the training container."""
POD_SELECTOR = "training.kubeflow.org/job-name={name}"
PROGRESS_ANNOTATION = ""
"""None: the dashboard shows no progress for this kind."""
INIT_SECONDS = 100
"""An init container that waits for the first node is restarted less often than this: 100 attempts, each with a wait of
2 s and a look-up (training-operator 1.9, pkg/config/config.go)."""
SPARE_RESTARTS = 10
"""For each node, for restarts while no launcher is there to count them."""
KEEP_SECONDS = 7 * 24 * 3600
"""How long a finished job is kept. A failed one has no pods any more; their logs are on the workspace volume."""


def build(job: Job, annotations: Mapping[str, str]) -> KubeflowOrgV1PyTorchJob:
    """The manifest: one Master and `num_nodes - 1` Workers, all with the same pod."""

    def replicas(count: int) -> KubeflowOrgV1ReplicaSpec:
        # OnFailure: a container that dies is restarted and rejoins the others; all resume from the last checkpoint
        return KubeflowOrgV1ReplicaSpec(
            replicas=count, restart_policy="OnFailure", template=pod_template(job, CONTAINER)
        )

    specs = {"Master": replicas(1)}
    if job.num_nodes > 1:
        specs["Worker"] = replicas(job.num_nodes - 1)
    return KubeflowOrgV1PyTorchJob(
        api_version=f"{GROUP}/{VERSION}",
        kind=KIND,
        metadata=client.V1ObjectMeta(**job_metadata(job, annotations)),
        spec=KubeflowOrgV1PyTorchJobSpec(
            nproc_per_node=str(job.ranks_per_node),  # `auto` counts the host's CPUs
            run_policy=KubeflowOrgV1RunPolicy(
                clean_pod_policy="Running",
                ttl_seconds_after_finished=KEEP_SECONDS,
                active_deadline_seconds=job.deadline_seconds,
                # the operator compares it with the restarts of all containers of all pods, init containers included
                # (training-operator 1.9, pkg/core/job.go); the launcher counts those of the training container
                backoff_limit=job.num_nodes * (job.max_restarts + SPARE_RESTARTS + job.start_seconds // INIT_SECONDS),
            ),
            pytorch_replica_specs=specs,
        ),
    )


def state(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """State (`waiting`, `running`, `succeeded` or `failed`) and reason of a PyTorchJob as the API returns it."""
    conditions = {c["type"]: c for c in (manifest.get("status") or {}).get("conditions") or [] if c["status"] == "True"}
    for kind, name in (("Succeeded", "succeeded"), ("Failed", "failed"), ("Running", "running")):
        if kind in conditions:
            return name, str(conditions[kind].get("message") or conditions[kind].get("reason") or "")
    return "waiting", "waiting for admission by the queue" if "Suspended" in conditions else ""
