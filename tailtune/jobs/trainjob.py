"""TrainJob of Kubeflow Trainer v2, PyTorchJob's successor, on the runtime `torch-distributed`."""

from collections.abc import Collection, Mapping
from typing import Any

from tailtune.errors import UserError
from tailtune.jobs.job import Job
from tailtune.jobs.pods import pod_template

KIND, GROUP, VERSION, PLURAL = "TrainJob", "trainer.kubeflow.org", "v1alpha1", "trainjobs"
CONTAINER = "node"
"""The runtimes' own name of the training container, and of the job within the JobSet."""
POD_SELECTOR = "jobset.sigs.k8s.io/jobset-name={name}"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PROGRESS = "trainer.opendatahub.io/trainerStatus"
"""Annotation that the dashboard reads (progress.py)."""
RUNTIMES = {True: "torch-distributed", False: "torch-distributed-cpu"}
MANAGER = "tailtune.io/launcher"
PATCHED = ("securityContext", "terminationGracePeriodSeconds", "nodeSelector", "tolerations", "volumes")
"""What of a pod a TrainJob may set; the rest is the runtime's."""


def build(
    job: Job, annotations: Mapping[str, str], spec_fields: Collection[str] = ("runtimePatches",)
) -> dict[str, Any]:
    """The manifest. `spec_fields` are what the cluster's CRD knows: pods were set by `podTemplateOverrides` before.

    Raises UserError when it knows neither.
    """
    assert job.pod is not None
    template = pod_template(job, CONTAINER)
    pod = template["spec"]
    container = pod["containers"][0]
    patch = {
        **{name: pod[name] for name in PATCHED},
        "containers": [{name: container[name] for name in ("name", "securityContext", "volumeMounts")}],
    }
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": GROUP, "kind": "ClusterTrainingRuntime", "name": RUNTIMES[bool(job.pod.gpu)]},
        "trainer": {
            "image": job.pod.image,
            "command": container["command"],
            "env": container["env"],
            "numNodes": job.num_nodes,
            "numProcPerNode": job.ranks_per_node,
            "resourcesPerNode": container["resources"],
        },
    }
    if "activeDeadlineSeconds" in spec_fields:
        spec["activeDeadlineSeconds"] = job.deadline_seconds
    metadata = {"labels": dict(job.labels)}
    if "runtimePatches" in spec_fields:
        replicated = {"name": CONTAINER, "template": {"spec": {"template": {"metadata": metadata, "spec": patch}}}}
        spec["runtimePatches"] = [{
            "manager": MANAGER,
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
        }]  # fmt: skip
    elif "podTemplateOverrides" in spec_fields:
        del patch["securityContext"]  # only containers have one there
        patch["containers"] = [{name: container[name] for name in ("name", "volumeMounts")}]
        del patch["terminationGracePeriodSeconds"]
        spec["podTemplateOverrides"] = [{"targetJobs": [{"name": CONTAINER}], "metadata": metadata, "spec": patch}]
    else:
        raise UserError("this cluster's TrainJob knows neither runtimePatches nor podTemplateOverrides; "
                        "set -p resources.job_kind=pytorchjob")  # fmt: skip
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {
            "name": job.name,
            "labels": {**job.labels, **({QUEUE_LABEL: job.pod.queue} if job.pod.queue else {})},
            "annotations": dict(annotations),
        },
        "spec": spec,
    }


def state(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """(`waiting`, `running`, `succeeded` or `failed`; why) of a TrainJob as the API returns it."""
    status = manifest.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or [] if c["status"] == "True"}
    for kind, word in (("Complete", "succeeded"), ("Failed", "failed")):
        if kind in conditions:
            return word, str(conditions[kind].get("message") or conditions[kind].get("reason") or "")
    if "Suspended" in conditions:
        return "waiting", "waits for admission by the queue"
    if any(one.get("active") for one in status.get("jobsStatus") or []):
        return "running", ""
    return "waiting", ""
