"""The controllers that turn jobs into pods: the Training Operator, and Kubeflow Trainer with JobSet below it.

They refuse what the real ones refuse, and give pods the names, labels and environment that the real ones give. A pod's
process runs here, so that addresses are 127.0.0.1 where a cluster has names.
"""

import copy
import re
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from http_server import Refused, check_fields
from kubeflow.training import models as training_models
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob, TrainerV1alpha1TrainJobSpec
from kubernetes.client import models as kubernetes_models
from pydantic import ValidationError

Manifest = dict[str, Any]
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
NODE = "node"
"""Of a TrainJob: the replicated job that trains, and its container."""
ADDRESS = {"PYTHONUNBUFFERED": "1", "POD_IP": "127.0.0.1"}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True)
class Template:
    """A pod that is to be made."""

    role: str
    """Its place, as tests name it: `worker-0`, `node-0-1`."""
    name: str
    labels: dict[str, str]
    spec: Manifest
    environment: dict[str, str]
    """What the controller adds."""


def check_mounts(spec: Manifest) -> None:
    known = {volume["name"] for volume in spec.get("volumes") or []}
    for mount in spec["containers"][0].get("volumeMounts") or []:
        if mount["name"] not in known:
            raise Refused(422, f"volumeMounts: {mount['name']} not found")


class TrainingOperator:
    """PyTorchJob."""

    group, version, kind, plural = "kubeflow.org", "v1", "PyTorchJob", "pytorchjobs"
    deletes_failed_pods = False

    def check(self, job: Manifest) -> None:
        check_fields(job, "KubeflowOrgV1PyTorchJob", (training_models, kubernetes_models))
        specs = job["spec"]["pytorchReplicaSpecs"]
        if "Master" not in specs or specs["Master"].get("replicas") != 1 or set(specs) - {"Master", "Worker"}:
            raise Refused(422, "spec.pytorchReplicaSpecs: one Master is required")
        for spec in specs.values():
            if not any(c["name"] == "pytorch" for c in spec["template"]["spec"]["containers"]):
                raise Refused(422, "there is no container named pytorch")
            check_mounts(spec["template"]["spec"])

    def limit(self, job: Manifest) -> int:
        return int(job["spec"]["runPolicy"].get("backoffLimit", 6))

    def templates(self, job: Manifest, port: int) -> Iterator[Template]:
        name, specs = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]
        places = [(role, i) for role in ("Master", "Worker") if role in specs for i in range(specs[role]["replicas"])]
        ranks = int(job["spec"]["nprocPerNode"])
        for node, (role, index) in enumerate(places):
            template, place = specs[role]["template"], f"{role.lower()}-{index}"
            labels = {
                **(template["metadata"].get("labels") or {}),
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/replica-type": role.lower(),
                "training.kubeflow.org/replica-index": str(index),
            }
            environment = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(places) * ranks),
                "RANK": str(node), "PET_NNODES": str(len(places)), "PET_NPROC_PER_NODE": str(ranks),
                "PET_NODE_RANK": str(node), **ADDRESS,
            }  # fmt: skip
            yield Template(place, f"{name}-{place}", labels, template["spec"], environment)

    def status(self, job: Manifest, state: str, why: str = "") -> None:
        """Write the state (`created`, `running`, `succeeded`, `failed`) into the job."""
        name, kind = job["metadata"]["name"], state.capitalize()
        message = {
            "Created": f"PyTorchJob {name} is created.",
            "Running": f"PyTorchJob {name} is running.",
            "Succeeded": f"PyTorchJob {name} is successfully completed.",
            "Failed": f"PyTorchJob {name} is failed because 1 {why} replica(s) failed.",
        }[kind]
        conditions = job.setdefault("status", {}).setdefault("conditions", [])
        for condition in conditions:
            if condition["type"] == "Running":
                condition["status"] = "False"
        conditions[:] = [c for c in conditions if c["type"] != kind]
        conditions.append({"type": kind, "status": "True", "reason": f"PyTorchJob{kind}", "message": message,
                           "lastUpdateTime": now(), "lastTransitionTime": now()})  # fmt: skip


class Trainer:
    """TrainJob, over JobSet and Kubernetes' Job."""

    group, version, kind, plural = "trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs"
    deletes_failed_pods = True
    """A Job whose pods restart in place (OnFailure) deletes them when it gives up, with their last words."""

    def __init__(self) -> None:
        self.runtimes = {"torch-distributed", "torch-distributed-cpu"}
        self.fields = {field.alias or name for name, field in TrainerV1alpha1TrainJobSpec.model_fields.items()}
        """What the installed version's spec knows."""
        self.backoff_limit = 6

    def check(self, job: Manifest) -> None:
        if not DNS_LABEL.fullmatch(job["metadata"]["name"]):
            raise Refused(422, f"metadata.name: Invalid value: {job['metadata']['name']!r}: a DNS-1035 label")
        if unknown := set(job["spec"]) - self.fields:
            raise Refused(400, f'strict decoding error: unknown field "spec.{min(unknown)}"')
        known = copy.deepcopy(job)
        known["spec"].pop("podTemplateOverrides", None)  # of versions that the models are too new for
        try:
            again = TrainerV1alpha1TrainJob.from_dict(known).to_dict()
        except (ValidationError, AttributeError) as error:
            raise Refused(422, f"TrainJob is invalid: {error}") from None
        if path := first_lost(known, again):
            raise Refused(400, f'strict decoding error: unknown field "{path}"')
        runtime = job["spec"]["runtimeRef"]["name"]
        if runtime not in self.runtimes:
            raise Refused(403, f'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: '
                               f'spec.runtimeRef: Invalid value: ClusterTrainingRuntime "{runtime}" not found: it '
                               "must be created before the TrainJob is created")  # fmt: skip
        for patch in self._patches(job):
            for container in patch["spec"]["containers"]:
                if container["name"] != NODE:
                    raise Refused(403, f"container {container['name']} does not exist in the runtime job {NODE}")
        check_mounts(self._pod_spec(job))

    def limit(self, job: Manifest) -> int:
        return self.backoff_limit

    def _patches(self, job: Manifest) -> Iterator[Manifest]:
        """What the job says about the pods that train: their metadata and spec."""
        for override in job["spec"].get("podTemplateOverrides") or []:
            if {"name": NODE} in override["targetJobs"]:
                yield override
        for one in job["spec"].get("runtimePatches") or []:
            for replicated in one["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
                if replicated["name"] != NODE:
                    raise Refused(403, f"the runtime has no job {replicated['name']}")
                yield replicated["template"]["spec"]["template"]

    def _pod_spec(self, job: Manifest) -> Manifest:
        """The runtime's pod, then the job's trainer, then its patches."""
        trainer = job["spec"]["trainer"]
        container = {"name": NODE, "image": trainer["image"], "command": trainer["command"],
                     "env": trainer.get("env") or [], "resources": trainer["resourcesPerNode"]}  # fmt: skip
        spec: Manifest = {}
        for patch in self._patches(job):
            spec |= {name: value for name, value in patch["spec"].items() if name != "containers"}
            for one in patch["spec"]["containers"]:
                container |= one
        return {**spec, "containers": [container]}

    def templates(self, job: Manifest, port: int) -> Iterator[Template]:
        name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
        child = f"{name}-{NODE}-0"
        given: dict[str, str] = {}
        for patch in self._patches(job):
            given |= patch["metadata"]["labels"]
        for node in range(trainer["numNodes"]):
            labels = {
                **given,
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": NODE,
                "jobset.sigs.k8s.io/job-index": "0",
                "batch.kubernetes.io/job-name": child,
                "batch.kubernetes.io/job-completion-index": str(node),
            }
            environment = {
                "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
                "JOB_COMPLETION_INDEX": str(node), **ADDRESS,
            }  # fmt: skip
            place = f"{NODE}-0-{node}"
            yield Template(place, f"{name}-{place}-{uuid.uuid4().hex[:5]}", labels, self._pod_spec(job), environment)

    def status(self, job: Manifest, state: str, why: str = "") -> None:
        """Write the state (`created`, `suspended`, `running`, `succeeded`, `failed`) into the job."""
        before = (job.get("status") or {}).get("conditions") or []
        count = {"running": "active", "succeeded": "succeeded", "failed": "failed", "suspended": "suspended"}.get(state)
        names = ("ready", "succeeded", "failed", "active", "suspended")
        conditions = []
        if state == "suspended":
            conditions.append(("Suspended", "True", "Suspended", "TrainJob is suspended"))
        elif any(c["type"] == "Suspended" for c in before):
            conditions.append(("Suspended", "False", "Resumed", "TrainJob is resumed"))
        if state == "succeeded":
            conditions.append(("Complete", "True", "AllJobsCompleted", "jobset completed successfully"))
        elif state == "failed":
            conditions.append(("Failed", "True", "FailedJobs", "jobset failed due to one or more job failures"))
        keys = ("type", "status", "reason", "message")
        job["status"] = {
            "conditions": [
                {**dict(zip(keys, one, strict=True)), "lastTransitionTime": now()} for one in conditions
            ],
            "jobsStatus": [{"name": NODE, **{name: int(name == count) for name in names}}],
        }  # fmt: skip

    def runtime(self, name: str) -> Manifest:
        """A ClusterTrainingRuntime as it can be read."""
        container = {"name": NODE, "image": "registry/pytorch:1"}
        job = {"template": {"spec": {"template": {"spec": {"containers": [container]}}}}, "name": NODE}
        return {"apiVersion": f"{self.group}/{self.version}", "kind": "ClusterTrainingRuntime",
                "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
                "spec": {"mlPolicy": {"numNodes": 1, "torch": {}},
                         "template": {"spec": {"replicatedJobs": [job]}}}}  # fmt: skip

    def schemas(self) -> Manifest:
        """As much of the OpenAPI document of the group as says which fields a TrainJob's spec has."""
        spec = {"type": "object", "properties": {name: {} for name in sorted(self.fields)}}
        properties = {"apiVersion": {}, "kind": {}, "metadata": {}, "spec": spec, "status": {"type": "object"}}
        return {
            "org.kubeflow.trainer.v1alpha1.ClusterTrainingRuntime": {"type": "object", "properties": {"spec": {}}},
            "org.kubeflow.trainer.v1alpha1.TrainJob": {"type": "object", "properties": properties},
            "org.kubeflow.trainer.v1alpha1.TrainJobList": {"type": "object", "properties": {"items": {}}},
        }


def first_lost(given: Any, again: Any, path: str = "") -> str:
    """The first field that is missing in the second; empty when there is none."""
    if isinstance(given, dict):
        for key, value in given.items():
            here = f"{path}.{key}".lstrip(".")
            if value is not None and (lost := here if key not in again else first_lost(value, again[key], here)):
                return lost
    elif isinstance(given, list):
        for i, value in enumerate(given):
            if lost := first_lost(value, again[i], f"{path}[{i}]"):
                return lost
    return ""


def may(allowed: Collection[tuple[str, str, str]], verb: str, group: str, resource: str) -> bool:
    """Whether a rule allows it; `*` is everything."""
    wanted = verb, group, resource
    return any(all(rule in ("*", one) for rule, one in zip(rules, wanted, strict=True)) for rules in allowed)


def rules(manifest: Manifest) -> list[tuple[str, str, str]]:
    """(verb, group, resource) of a Role or ClusterRole."""
    return [
        (verb, group, resource)
        for rule in manifest["rules"]
        for verb in rule["verbs"] for group in rule["apiGroups"] for resource in rule["resources"]
    ]  # fmt: skip
