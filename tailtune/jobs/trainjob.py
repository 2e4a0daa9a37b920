"""TrainJob of Kubeflow Trainer v2, the successor of PyTorchJob, with the runtime `torch-distributed`."""

from collections.abc import Collection, Mapping
from typing import Any

from tailtune.errors import UserError
from tailtune.jobs.job import Job
from tailtune.jobs.pods import job_metadata, pod_template

KIND, GROUP, VERSION, PLURAL = "TrainJob", "trainer.kubeflow.org", "v1alpha1", "trainjobs"
CONTAINER = "node"
"""Name of the training container, and of the job within the JobSet, in the runtimes."""
POD_SELECTOR = "jobset.sigs.k8s.io/jobset-name={name}"
PROGRESS_ANNOTATION = "trainer.opendatahub.io/trainerStatus"
"""Annotation from which the dashboard reads the progress (progress.py)."""
RUNTIMES = {True: "torch-distributed", False: "torch-distributed-cpu"}
"""Whether the job has GPUs, and the ClusterTrainingRuntime to use."""
PATCH_MANAGER = "tailtune.io/launcher"
PATCHED_POD_FIELDS = ("securityContext", "terminationGracePeriodSeconds", "nodeSelector", "tolerations", "volumes")
"""Fields of the pod that a TrainJob can set; all others come from the runtime."""


def build(
    job: Job, annotations: Mapping[str, str], spec_fields: Collection[str] = ("runtimePatches",)
) -> dict[str, Any]:
    """The manifest. `spec_fields` are the fields of a spec that the cluster's CRD has.

    Pods are configured with `runtimePatches`, or with `podTemplateOverrides` in older versions. Raises UserError if the
    CRD has neither.
    """
    assert job.pod is not None
    template = pod_template(job, CONTAINER)
    pod = template["spec"]
    container = pod["containers"][0]
    patch = {
        **{name: pod[name] for name in PATCHED_POD_FIELDS},
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
            "manager": PATCH_MANAGER,
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
        }]  # fmt: skip
    elif "podTemplateOverrides" in spec_fields:
        del patch["securityContext"]  # overrides have one only for containers
        patch["containers"] = [{name: container[name] for name in ("name", "volumeMounts")}]
        del patch["terminationGracePeriodSeconds"]
        spec["podTemplateOverrides"] = [{"targetJobs": [{"name": CONTAINER}], "metadata": metadata, "spec": patch}]
    else:
        raise UserError(
            "this cluster's TrainJob supports neither runtimePatches nor podTemplateOverrides",
            "set -p resources.job_kind=pytorchjob",
        )
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
