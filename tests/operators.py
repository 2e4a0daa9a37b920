"""Fakes of the controllers that turn jobs into pods: the Training Operator, and Kubeflow Trainer with JobSet.

They reject what the real ones reject, and give pods the same names, labels and environment. A pod's process runs on
this machine, so addresses are 127.0.0.1 instead of a cluster's DNS names.
"""

import copy
import math
import re
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from http_server import Refused, check_fields
from kubeflow.training import models as training_models
from kubeflow_trainer_api.models import (
    TrainerV1alpha1ContainerPatch,
    TrainerV1alpha1PodSpecPatch,
    TrainerV1alpha1TrainJob,
    TrainerV1alpha1TrainJobSpec,
)
from kubernetes.client import models as kubernetes_models
from pydantic import ValidationError

Manifest = dict[str, Any]
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
INIT_CONTAINER = "init-pytorch"
NODE = "node"
"""Name of a TrainJob's replicated job that trains, and of its container."""
TOKEN_DIRECTORY = "/var/run/secrets/kubernetes.io/serviceaccount"
ADDRESS = {"PYTHONUNBUFFERED": "1", "POD_IP": "127.0.0.1"}


def now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True)
class Template:
    """A pod to create."""

    role: str
    """The pod's name in tests: `worker-0`, `node-0-1`."""
    name: str
    labels: dict[str, str]
    spec: Manifest
    environment: dict[str, str]
    """Variables that the controller adds."""


def check_mounts(spec: Manifest) -> None:
    """Raise Refused for a mount of a volume that the pod does not have."""
    volumes = {volume["name"] for volume in spec.get("volumes") or []}
    for mount in spec["containers"][0].get("volumeMounts") or []:
        if mount["name"] not in volumes:
            raise Refused(422, f"volumeMounts: {mount['name']} not found")


class TrainingOperator:
    """The controller of PyTorchJob."""

    group, version, kind, plural = "kubeflow.org", "v1", "PyTorchJob", "pytorchjobs"
    deletes_failed_pods = True  # before the condition Failed: training-operator 1.9, pkg/controller.v1/common/job.go

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

    def max_deleted_pods(self, job: Manifest) -> float:
        """How many pods may be deleted before the job fails. Each is made again, without end: training-operator 1.9,
        pkg/controller.v1/common/pod.go, ReconcilePods."""
        return math.inf

    def templates(self, job: Manifest, port: int) -> Iterator[Template]:
        name, specs = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]
        replicas = [(role, i) for role in ("Master", "Worker") if role in specs for i in range(specs[role]["replicas"])]
        ranks = int(job["spec"]["nprocPerNode"])
        for node, (role, index) in enumerate(replicas):
            template, pod_role = specs[role]["template"], f"{role.lower()}-{index}"
            labels = {
                **(template["metadata"].get("labels") or {}),
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/replica-type": role.lower(),
                "training.kubeflow.org/replica-index": str(index),
            }
            environment = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(replicas) * ranks),
                "RANK": str(node), "PET_NNODES": str(len(replicas)), "PET_NPROC_PER_NODE": str(ranks),
                "PET_NODE_RANK": str(node), **ADDRESS,
            }  # fmt: skip
            yield Template(pod_role, f"{name}-{pod_role}", labels, self._with_init(template["spec"], role), environment)

    def _with_init(self, spec: Manifest, role: str) -> Manifest:
        """The pod's spec with the init container of a worker, which waits for the first node's name.

        Source: training-operator 1.9, pkg/controller.v1/pytorch/initcontainer.go.
        """
        resources = {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}}
        wait = {"name": INIT_CONTAINER, "image": "alpine:3.10", "imagePullPolicy": "IfNotPresent",
                "resources": resources, "command": ["sh", "-c", "until nslookup MASTER; do sleep 2; done"]}  # fmt: skip
        return {**spec, "initContainers": [wait]} if role == "Worker" else spec

    def status(self, job: Manifest, state: str, why: str = "") -> None:
        """Set the job's status to `created`, `running`, `succeeded` or `failed`."""
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
    """The controller of TrainJob, with JobSet and Kubernetes' Job."""

    group, version, kind, plural = "trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs"
    deletes_failed_pods = True
    """A Job whose pods restart in place (OnFailure) deletes them, and their termination messages, when it gives up."""

    def __init__(self) -> None:
        self.runtimes = {"torch-distributed", "torch-distributed-cpu"}
        self.fields = fields_of(TrainerV1alpha1TrainJobSpec)
        """Fields of a spec in the installed version."""
        self.pod_fields = fields_of(TrainerV1alpha1PodSpecPatch)
        self.container_fields = fields_of(TrainerV1alpha1ContainerPatch)
        self.backoff_limit = 6

    def install_version_2_1(self) -> None:
        """The version of OpenShift AI 3.2 to 3.5: kubeflow/trainer v2.1 and red-hat-data-services/trainer,
        manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml, podTemplateOverrides."""
        self.fields -= {"runtimePatches", "activeDeadlineSeconds"}
        self.fields |= {"podTemplateOverrides"}
        self.pod_fields -= {"securityContext", "terminationGracePeriodSeconds"}
        self.container_fields -= {"securityContext"}

    def check(self, job: Manifest) -> None:
        if not DNS_LABEL.fullmatch(job["metadata"]["name"]):
            raise Refused(422, f"metadata.name: Invalid value: {job['metadata']['name']!r}: a DNS-1035 label")
        if unknown := set(job["spec"]) - self.fields:
            raise Refused(400, f'strict decoding error: unknown field "spec.{min(unknown)}"')
        manifest = copy.deepcopy(job)
        manifest["spec"].pop("podTemplateOverrides", None)  # a field of versions that are older than the models
        try:
            parsed = TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()
        except (ValidationError, AttributeError) as error:
            raise Refused(422, f"TrainJob is invalid: {error}") from None
        if path := first_lost(manifest, parsed):
            raise Refused(400, f'strict decoding error: unknown field "{path}"')
        runtime = job["spec"]["runtimeRef"]["name"]
        if runtime not in self.runtimes:
            raise Refused(403, f'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: '
                               f'spec.runtimeRef: Invalid value: ClusterTrainingRuntime "{runtime}" not found: it '
                               "must be created before the TrainJob is created")  # fmt: skip
        for patch in self._patches(job):
            # the real server drops unknown fields, and the client does not show its warnings
            refuse_unknown(patch, {"metadata", "spec", "targetJobs"}, "podTemplateOverrides")
            refuse_unknown(patch["spec"], self.pod_fields, "spec")
            for container in patch["spec"]["containers"]:
                refuse_unknown(container, self.container_fields, "containers")
                if container["name"] != NODE:
                    raise Refused(403, f"container {container['name']} does not exist in the runtime job {NODE}")
                if container.get("env"):  # pkg/runtime/framework/plugins/jobset/jobset.go
                    raise Refused(403, "must not have envs for the dataset-initializer, model-initializer, node "
                                       "containers")  # fmt: skip
        check_mounts(self._pod_spec(job))

    def limit(self, job: Manifest) -> int:
        return self.backoff_limit

    def max_deleted_pods(self, job: Manifest) -> float:
        """A Job counts a pod that is deleted as a failed one: kubernetes, pkg/controller/job/job_controller.go,
        isPodFailed and exceedsBackoffLimit. The restarts of its containers are no longer counted once it is gone.

        The real controller makes the next pod before the deleted one is gone; here, both would have one address.
        """
        return self.backoff_limit

    def _patches(self, job: Manifest) -> Iterator[Manifest]:
        """The job's patches of the training pods: metadata and spec."""
        for override in job["spec"].get("podTemplateOverrides") or []:
            if {"name": NODE} in override["targetJobs"]:
                yield override
        for patch in job["spec"].get("runtimePatches") or []:
            for replicated in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
                if replicated["name"] != NODE:
                    raise Refused(403, f"the runtime has no job {replicated['name']}")
                yield replicated["template"]["spec"]["template"]

    def _pod_spec(self, job: Manifest) -> Manifest:
        """The runtime's pod with the job's trainer and its patches."""
        trainer = job["spec"]["trainer"]
        container = {"name": NODE, "image": trainer["image"], "command": trainer["command"],
                     "env": trainer.get("env") or [], "resources": trainer["resourcesPerNode"]}  # fmt: skip
        spec: Manifest = {}
        for patch in self._patches(job):
            spec |= {name: value for name, value in patch["spec"].items() if name != "containers"}
            for container_patch in patch["spec"]["containers"]:
                container |= container_patch
        return {**spec, "containers": [container]}

    def templates(self, job: Manifest, port: int) -> Iterator[Template]:
        name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
        child = f"{name}-{NODE}-0"
        job_labels: dict[str, str] = {}
        for patch in self._patches(job):
            job_labels |= patch["metadata"]["labels"]
        for node in range(trainer["numNodes"]):
            labels = {
                **job_labels,
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
            role = f"{NODE}-0-{node}"
            yield Template(role, f"{name}-{role}-{uuid.uuid4().hex[:5]}", labels, self._pod_spec(job), environment)

    def status(self, job: Manifest, state: str, why: str = "") -> None:
        """Set the job's status to `created`, `suspended`, `running`, `succeeded` or `failed`."""
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
                {**dict(zip(keys, condition, strict=True)), "lastTransitionTime": now()} for condition in conditions
            ],
            "jobsStatus": [{"name": NODE, **{name: int(name == count) for name in names}}],
        }  # fmt: skip

    def runtime(self, name: str) -> Manifest:
        """A ClusterTrainingRuntime as the API returns it."""
        container = {"name": NODE, "image": "registry/pytorch:1"}
        job = {"template": {"spec": {"template": {"spec": {"containers": [container]}}}}, "name": NODE}
        return {"apiVersion": f"{self.group}/{self.version}", "kind": "ClusterTrainingRuntime",
                "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
                "spec": {"mlPolicy": {"numNodes": 1, "torch": {}},
                         "template": {"spec": {"replicatedJobs": [job]}}}}  # fmt: skip

    def schemas(self) -> Manifest:
        """The part of the group's OpenAPI document with the fields of a TrainJob's spec and of its pods."""
        pod: Manifest = {"type": "object", "properties": {name: {} for name in sorted(self.pod_fields)}}
        pod["properties"]["containers"] = array(properties={name: {} for name in sorted(self.container_fields)})
        template = {"type": "object", "properties": {"metadata": {"type": "object"}, "spec": pod}}
        job_template = nested("template", "spec", "template", inner=template)
        patch = nested("trainingRuntimeSpec", "template", "spec", "replicatedJobs",
                       inner={"type": "array", "items": job_template})  # fmt: skip
        known = {"runtimePatches": {"type": "array", "items": patch},
                 "podTemplateOverrides": {"type": "array", "items": template}}  # fmt: skip
        spec = {"type": "object", "properties": {name: known.get(name, {}) for name in sorted(self.fields)}}
        properties = {"apiVersion": {}, "kind": {}, "metadata": {}, "spec": spec, "status": {"type": "object"}}
        return {
            "org.kubeflow.trainer.v1alpha1.ClusterTrainingRuntime": {"type": "object", "properties": {"spec": {}}},
            "org.kubeflow.trainer.v1alpha1.TrainJob": {"type": "object", "properties": properties},
            "org.kubeflow.trainer.v1alpha1.TrainJobList": {"type": "object", "properties": {"items": {}}},
        }


def fields_of(model: Any) -> set[str]:
    """The fields of a generated model, as JSON names them."""
    return {field.alias or name for name, field in model.model_fields.items()}


def array(**items: Any) -> Manifest:
    """The schema of an array of objects."""
    return {"type": "array", "items": {"type": "object", **items}}


def nested(*path: str, inner: Manifest) -> Manifest:
    """The schema of an object that has `inner` at a path of fields."""
    for name in reversed(path):
        inner = {"type": "object", "properties": {name: inner}}
    return inner


def refuse_unknown(value: Manifest, fields: Collection[str], path: str) -> None:
    """Raise Refused for a field that is not one of `fields`."""
    if unknown := set(value) - set(fields):
        raise Refused(400, f'strict decoding error: unknown field "{path}.{min(unknown)}"')


def admitted(spec: Manifest, accounts: dict[str, Manifest]) -> Manifest:
    """A pod's spec after the API server's admission, which mounts the token of its service account.

    Raises Refused for an account that does not exist.
    """
    name = spec.get("serviceAccountName", "default")
    if name not in accounts:
        raise Refused(403, f'error looking up service account {name}: serviceaccount "{name}" not found')
    if not spec.get("automountServiceAccountToken", accounts[name].get("automountServiceAccountToken", True)):
        return spec
    volume = "kube-api-access-x7k2p"
    token = {"name": volume, "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
    mount = {"name": volume, "mountPath": TOKEN_DIRECTORY, "readOnly": True}
    containers = {
        kind: [{**each, "volumeMounts": [*(each.get("volumeMounts") or []), mount]} for each in spec[kind]]
        for kind in ("initContainers", "containers")
        if kind in spec
    }
    return {**spec, **containers, "volumes": [*(spec.get("volumes") or []), token]}


def first_lost(given: Any, parsed: Any, path: str = "") -> str:
    """Path of the first field of `given` that is missing in `parsed`; empty if there is none."""
    if isinstance(given, dict):
        for key, value in given.items():
            here = f"{path}.{key}".lstrip(".")
            if value is not None and (lost := here if key not in parsed else first_lost(value, parsed[key], here)):
                return lost
    elif isinstance(given, list):
        for i, value in enumerate(given):
            if lost := first_lost(value, parsed[i], f"{path}[{i}]"):
                return lost
    return ""


def may(allowed: Collection[tuple[str, str, str]], verb: str, group: str, resource: str, name: str = "") -> bool:
    """Whether one of the rules in `allowed` permits the request; `*` matches everything.

    A rule for named objects permits no request without a name, such as a list: kubernetes,
    pkg/apis/rbac/v1/evaluation_helpers.go, ResourceNameMatches.
    """
    requests = {(verb, group, resource), (verb, group, f"{resource}:{name}")}
    return any(
        all(rule in ("*", part) for rule, part in zip(rules, request, strict=True))
        for rules in allowed for request in requests
    )  # fmt: skip


def rules(manifest: Manifest) -> list[tuple[str, str, str]]:
    """The rules of a Role or ClusterRole as (verb, group, resource), for a named object `resource:name`."""
    return [
        (verb, group, f"{resource}{name}")
        for rule in manifest["rules"]
        for verb in rule["verbs"] for group in rule["apiGroups"] for resource in rule["resources"]
        for name in [f":{name}" for name in rule.get("resourceNames", [])] or [""]
    ]  # fmt: skip
