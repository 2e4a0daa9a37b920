"""The pods of a job: their template, and what their status means.

Everything here is plain Kubernetes JSON, so that both kinds of job share it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tailtune.errors import UserError
from tailtune.jobs.job import Job, parse_user_error

SCRATCH = "/tmp"
CACHES = {
    "HOME": SCRATCH,
    "HF_HOME": f"{SCRATCH}/huggingface",
    "XDG_CACHE_HOME": f"{SCRATCH}/cache",
    "TRITON_CACHE_DIR": f"{SCRATCH}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/inductor",
}
"""OpenShift gives pods a random user without a home directory: all caches go to scratch space."""
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""Label of a TrainJob's pods, whose names are all different; a PyTorchJob gives a pod the name of its predecessor."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
SECONDS_AFTER_CHECKPOINT = 30


def job_metadata(job: Job, annotations: Mapping[str, str]) -> dict[str, Any]:
    """Name, labels (with the queue, if there is one) and annotations of a job."""
    assert job.pod is not None
    queue = {QUEUE_LABEL: job.pod.queue} if job.pod.queue else {}
    return {"name": job.name, "labels": {**job.labels, **queue}, "annotations": dict(annotations)}


def pod_template(job: Job, container: str) -> dict[str, Any]:
    """The job's pod. `container` is the name that the operator expects.

    The container satisfies the restricted Pod Security Standard. `runAsNonRoot` is not set for the whole pod, because
    the operator adds an init container whose image runs as root; OpenShift's admission gives that one a user as well.
    """
    pod = job.pod
    assert pod is not None
    claims = dict.fromkeys(claim for claim, _ in pod.volumes)
    gpus = {pod.gpu: str(job.ranks_per_node)} if pod.gpu else {}
    environment = {**CACHES, **job.environment}
    return {
        "metadata": {"labels": dict(job.labels)},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
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
                        *([f"--log-dir={job.log_dir}"] if job.log_dir else []),
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
                        *({"name": name, "mountPath": path} for name, path in pod.volumes),
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


# ---- the pods' status -------------------------------------------------------------------------------

WAITING = {
    "ImagePullBackOff": "image", "ErrImagePull": "image", "InvalidImageName": "image", "ErrImageNeverPull": "image",
    "ImageInspectError": "image", "CreateContainerConfigError": "configuration",
    "CreateContainerError": "configuration",
}  # fmt: skip
"""Reasons for which a container waits and that do not resolve themselves, with what is wrong."""
EVENT_PROBLEMS = {"FailedMount": "volume", "FailedAttachVolume": "volume", "FailedCreatePodSandBox": "starting"}
"""Reasons of a pod's events that explain why it does not start, with what is wrong. Its status does not show them."""


@dataclass(frozen=True)
class Failure:
    """A container that ended with an error."""

    pod: str
    exit_code: int
    reason: str
    """Kubernetes' reason: OOMKilled, Error, Evicted…"""
    report: Mapping[str, Any]
    """The termination message that `tailtune.jobs.node` wrote, or the end of the log as `{"lines": […]}`."""

    @property
    def user_error(self) -> UserError | None:
        """The error that a rank reported about its input, if any."""
        return parse_user_error(self.report.get("user_error"))


def pod_name(pod: Mapping[str, Any]) -> str:
    """The pod's name."""
    return str(pod["metadata"]["name"])


def node_name(pod: Mapping[str, Any]) -> str:
    """A name of the job's node that a pod made in this one's place has as well."""
    return str((pod["metadata"].get("labels") or {}).get(INDEX_LABEL) or pod_name(pod))


def container_statuses(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The status of each container; empty until the pod is on a node."""
    return list((pod.get("status") or {}).get("containerStatuses") or [])


def is_running(pod: Mapping[str, Any]) -> bool:
    """Whether the pod is in the phase Running."""
    return (pod.get("status") or {}).get("phase") == "Running"


def has_started(pod: Mapping[str, Any]) -> bool:
    """Whether the pod's container has run, so that it has a log."""
    return any("waiting" not in (c.get("state") or {}) or c.get("restartCount") for c in container_statuses(pod))


def num_restarts(pod: Mapping[str, Any]) -> int:
    """How often the pod's container was restarted."""
    return sum(status.get("restartCount") or 0 for status in container_statuses(pod))


def why_pending(pod: Mapping[str, Any]) -> tuple[str, str] | None:
    """(class of problem, reason in words) for a pod that is pending; None for one that is running or has ended."""
    status = pod.get("status") or {}
    if status.get("phase") not in (None, "Pending"):
        return None
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message") or condition.get("reason") or "not scheduled"
            return ("volume" if "volume" in message.lower() else "scheduling"), message
    init_containers = status.get("initContainerStatuses") or []
    for container in (*init_containers, *container_statuses(pod)):
        state = container.get("state") or {}
        in_which = f"{container['name']}: " if container in init_containers else ""
        if waiting := state.get("waiting"):
            reason = waiting.get("reason") or "waiting"
            detail = f": {waiting['message']}" if waiting.get("message") else ""
            return WAITING.get(reason, "starting"), f"{in_which}{reason}{detail}"
        if in_which and "running" in state:
            return "starting", f"{in_which}running"
    return "scheduling", "waiting for a node"


def event_problem(events: Iterable[Mapping[str, Any]]) -> tuple[str, str] | None:
    """(class of problem, reason in words) of the last of a pod's events that explains why it does not start."""
    problems = [event for event in events if event.get("reason") in EVENT_PROBLEMS]
    if not problems:
        return None
    last = max(problems, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return EVENT_PROBLEMS[last["reason"]], f"{last['reason']}: {' '.join(str(last.get('message') or '').split())}"


def failures(pods: Iterable[Mapping[str, Any]]) -> list[Failure]:
    """The containers that ended with an error, in the order in which they ended.

    This includes the last failure of a container that has since been restarted.
    """
    timed_failures = []
    for pod in pods:
        status = pod.get("status") or {}
        ends = [
            (container.get(state) or {}).get("terminated")
            for container in container_statuses(pod)
            for state in ("lastState", "state")
        ]
        for end in filter(None, ends):
            if end.get("exitCode"):
                report = _parse_report(end.get("message") or "")
                failure = Failure(pod_name(pod), int(end["exitCode"]), str(end.get("reason") or "Error"), report)
                timed_failures.append((str(end.get("finishedAt") or ""), failure))
        if not any(ends) and status.get("phase") == "Failed":  # evicted, with or without having run
            report = {"failure": status.get("message") or "", "lines": []}
            failure = Failure(pod_name(pod), 1, str(status.get("reason") or "Failed"), report)
            timed_failures.append(("", failure))
    return [failure for _, failure in sorted(timed_failures, key=lambda pair: pair[0])]


def _parse_report(message: str) -> dict[str, Any]:
    try:
        report = json.loads(message)
    except ValueError:
        return {"lines": message.splitlines()}
    return report if isinstance(report, dict) else {"lines": [message]}
