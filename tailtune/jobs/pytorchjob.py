"""PyTorchJob of the Training Operator, through the kubeflow-training SDK."""

from collections.abc import Collection, Mapping
from typing import Any

from kubeflow.training import (
    KubeflowOrgV1PyTorchJob,
    KubeflowOrgV1PyTorchJobSpec,
    KubeflowOrgV1ReplicaSpec,
    KubeflowOrgV1RunPolicy,
)
from kubernetes import client

from tailtune.jobs.job import Job
from tailtune.jobs.pods import pod_template

KIND, GROUP, VERSION, PLURAL = "PyTorchJob", "kubeflow.org", "v1", "pytorchjobs"
CONTAINER = "pytorch"
"""The operator knows the training container by this name."""
POD_SELECTOR = "training.kubeflow.org/job-name={name}"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PROGRESS = ""
"""The dashboard reads no progress of this kind."""
KEEP_SECONDS = 7 * 24 * 3600
"""How long a finished job stays, with its pods' logs."""


def build(job: Job, annotations: Mapping[str, str], spec_fields: Collection[str] = ()) -> KubeflowOrgV1PyTorchJob:
    """1 Master and num_nodes - 1 Workers, all with the same pod."""
    assert job.pod is not None

    def replicas(count: int) -> KubeflowOrgV1ReplicaSpec:
        # OnFailure: a pod that dies starts again and joins the others, which resume from the last checkpoint
        return KubeflowOrgV1ReplicaSpec(
            replicas=count, restart_policy="OnFailure", template=pod_template(job, CONTAINER)
        )

    specs = {"Master": replicas(1)}
    if job.num_nodes > 1:
        specs["Worker"] = replicas(job.num_nodes - 1)
    return KubeflowOrgV1PyTorchJob(
        api_version=f"{GROUP}/{VERSION}",
        kind=KIND,
        metadata=client.V1ObjectMeta(
            name=job.name,
            labels={**job.labels, **({QUEUE_LABEL: job.pod.queue} if job.pod.queue else {})},
            annotations=dict(annotations),
        ),
        spec=KubeflowOrgV1PyTorchJobSpec(
            nproc_per_node=str(job.ranks_per_node),  # `auto` takes the host's CPUs
            run_policy=KubeflowOrgV1RunPolicy(
                clean_pod_policy="Running",
                ttl_seconds_after_finished=KEEP_SECONDS,
                active_deadline_seconds=job.deadline_seconds,
                backoff_limit=job.max_restarts,
            ),
            pytorch_replica_specs=specs,
        ),
    )


def state(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """(`waiting`, `running`, `succeeded` or `failed`; why) of a PyTorchJob as the API returns it."""
    conditions = {c["type"]: c for c in (manifest.get("status") or {}).get("conditions") or [] if c["status"] == "True"}
    for kind, word in (("Succeeded", "succeeded"), ("Failed", "failed"), ("Running", "running")):
        if kind in conditions:
            return word, str(conditions[kind].get("message") or conditions[kind].get("reason") or "")
    suspended = conditions.get("Suspended")
    return "waiting", "waits for admission by the queue" if suspended else ""
