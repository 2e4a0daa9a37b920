"""The pods of a job: their template, and what their status says to a person.

Everything here is Kubernetes' own JSON, so that one template serves both kinds of job.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tailtune.jobs.job import Job

SCRATCH = "/tmp"
CACHES = {
    "HOME": SCRATCH,
    "HF_HOME": f"{SCRATCH}/huggingface",
    "XDG_CACHE_HOME": f"{SCRATCH}/cache",
    "TRITON_CACHE_DIR": f"{SCRATCH}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/inductor",
}
"""A random user without a home: everything that writes beside the volumes writes into scratch space."""
SECONDS_AFTER_CHECKPOINT = 30


def pod_template(job: Job, container: str) -> dict[str, Any]:
    """A pod of the job that passes the restricted Pod Security Standard; `container` is the operator's name for it."""
    pod = job.pod
    assert pod is not None
    claims = dict.fromkeys(claim for claim, _ in pod.volumes)
    mounts = pod.volumes
    gpus = {pod.gpu: str(job.ranks_per_node)} if pod.gpu else {}
    environment = {**CACHES, **job.environment}
    return {
        "metadata": {"labels": dict(job.labels)},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "terminationGracePeriodSeconds": job.shutdown_seconds + SECONDS_AFTER_CHECKPOINT,
            "nodeSelector": dict(pod.node_selector),
            "tolerations": [dict(toleration) for toleration in pod.tolerations],
            "containers": [
                {
                    "name": container,
                    "image": pod.image,
                    "command": [
                        "python", "-m", "tailtune.jobs.node",
                        f"--job={job.name}",
                        f"--max-restarts={job.max_restarts}",
                        f"--shutdown-seconds={job.shutdown_seconds}",
                        f"--start-seconds={job.start_seconds}",
                        job.module,
                        *job.args,
                    ],
                    "env": [
                        *({"name": name, "value": value} for name, value in environment.items()),
                        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    ],
                    "resources": {
                        "limits": {"cpu": pod.cpu, "memory": pod.memory, **gpus},
                        "requests": {"cpu": pod.cpu_request, "memory": pod.memory_request, **gpus},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "readOnlyRootFilesystem": True,
                        "runAsNonRoot": True,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": [
                        *({"name": name, "mountPath": path} for name, path in mounts),
                        {"name": "shared-memory", "mountPath": "/dev/shm"},
                        {"name": "scratch", "mountPath": SCRATCH},
                    ],
                }
            ],
            "volumes": [
                *({"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims),
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # NCCL and data loaders
                {"name": "scratch", "emptyDir": {}},
            ],
        },
    }  # fmt: skip


# ---- what their status says ------------------------------------------------------------------------

WAITING = {
    "ImagePullBackOff": "image", "ErrImagePull": "image", "InvalidImageName": "image", "ErrImageNeverPull": "image",
    "ImageInspectError": "image", "CreateContainerConfigError": "configuration",
    "CreateContainerError": "configuration",
}  # fmt: skip
"""Reason of a waiting container that does not go away by itself → what is wrong."""


@dataclass(frozen=True)
class Failure:
    """A container of a rank that ended badly."""

    pod: str
    exit_code: int
    reason: str
    """Kubernetes' word: OOMKilled, Error, Evicted…"""
    words: Mapping[str, Any]
    """What `tailtune.jobs.node` wrote, or the end of the log as `{"lines": […]}`."""


def pod_name(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def statuses(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((pod.get("status") or {}).get("containerStatuses") or [])


def is_running(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"


def why_pending(pod: Mapping[str, Any]) -> tuple[str, str] | None:
    """(what, in words) a pod waits for; None when it runs or has ended. `what` is a class of failure."""
    status = pod.get("status") or {}
    if status.get("phase") not in (None, "Pending"):
        return None
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message") or condition.get("reason") or "not scheduled"
            return ("volume" if "volume" in message.lower() else "scheduling"), message
    for container in statuses(pod):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            reason = waiting.get("reason") or "waiting"
            detail = f": {waiting['message']}" if waiting.get("message") else ""
            return WAITING.get(reason, "starting"), f"{reason}{detail}"
    return "scheduling", "waits for a node"


def failures(pods: Iterable[Mapping[str, Any]]) -> list[Failure]:
    """Containers that ended badly, restarted ones too, first come first."""
    found = []
    for pod in pods:
        status = pod.get("status") or {}
        ends = [
            (container.get(state) or {}).get("terminated")
            for container in statuses(pod)
            for state in ("lastState", "state")
        ]
        for end in filter(None, ends):
            if end.get("exitCode"):
                failure = Failure(pod_name(pod), int(end["exitCode"]), str(end.get("reason") or "Error"),
                                  _words(end.get("message") or ""))  # fmt: skip
                found.append((str(end.get("finishedAt") or ""), failure))
        if not any(ends) and status.get("phase") == "Failed":  # evicted before or while it ran
            failure = Failure(pod_name(pod), 1, str(status.get("reason") or "Failed"),
                              {"failure": status.get("message") or "", "lines": []})  # fmt: skip
            found.append(("", failure))
    return [failure for _, failure in sorted(found, key=lambda pair: pair[0])]


def _words(message: str) -> dict[str, Any]:
    try:
        words = json.loads(message)
    except ValueError:
        return {"lines": message.splitlines()}
    return words if isinstance(words, dict) else {"lines": [message]}
