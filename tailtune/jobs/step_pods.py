"""The pods of a pipeline run's steps: what each one is, what it waits for, and why it failed."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kubernetes import client

from tailtune.errors import UserError
from tailtune.jobs.kubernetes import CALL_TIMEOUT_SECONDS, WORKFLOW_RUN_LABEL, KubernetesClient, in_words
from tailtune.jobs.pods import container_statuses, pod_name, why_pending
from tailtune.log import LINE_PREFIX

CONTAINER = "main"
"""Argo's name for the container that runs the step; `wait` is its sidecar."""
NODE_NAME = "workflows.argoproj.io/node-name"
"""Annotation with the node of the workflow: argo-workflows, workflow/controller/workflowpod.go."""
NODE = re.compile(r".*\.(?:([^.]+)\.executor(?:\((\d+)\))?|([^.]+-driver))")
"""A step is a DAG of one task, `executor`, and `executor(N)` are its attempts: kubeflow/pipelines,
backend/src/v2/compiler/argocompiler/container.go. Its driver runs before it."""
ERROR_LINE = re.compile(rf"(?:{re.escape(LINE_PREFIX)})?[\w-]+: error: (.+)")
"""How a step reports a UserError (log.py)."""
OTHER_PROGRAMS = re.compile(r'[IWEF]\d{4} |time="[^"]*" level=|\s*$')
"""Lines of KFP's launcher and Argo's executor around those of the step."""
NUM_LAST_LINES = 5
TAIL_LINES = 200
"""How many lines of a log are searched for its error."""


@dataclass(frozen=True)
class StepPod:
    """A pod of a step, or of the driver that runs before the step."""

    step: str
    """Name of the step, or `STEP-driver`."""
    attempt: int
    """From 1; the server tries a failed step again in another pod."""
    manifest: Mapping[str, Any]

    @property
    def name(self) -> str:
        return pod_name(self.manifest)

    @property
    def phase(self) -> str:
        return str((self.manifest.get("status") or {}).get("phase") or "Pending")

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def age_seconds(self) -> float:
        created = datetime.fromisoformat(self.manifest["metadata"]["creationTimestamp"])
        return (datetime.now(UTC) - created).total_seconds()

    @property
    def end(self) -> Mapping[str, Any]:
        """How the step's container ended; empty if it has not, or never started."""
        states = [status.get("state") or {} for status in container_statuses(self.manifest)
                  if status["name"] == CONTAINER]  # fmt: skip
        return next((state["terminated"] for state in states if state.get("terminated")), {})

    def what_it_waits_for(self) -> str:
        """Why the pod is pending, in words; empty if it is not, or is only starting."""
        problem, reason = why_pending(self.manifest) or ("starting", "")
        return "" if problem == "starting" else reason


def find_step_pods(cluster: KubernetesClient, pipeline_run: str) -> list[StepPod]:
    """Return the pods that exist, in the order in which they were created.

    Raises UserError if this account is not allowed to list pods.
    """
    try:
        answer = cluster.call(
            lambda: cluster.core.list_namespaced_pod(
                cluster.namespace, label_selector=f"{WORKFLOW_RUN_LABEL}={pipeline_run}",
                _request_timeout=CALL_TIMEOUT_SECONDS,
            )
        )  # fmt: skip
    except client.ApiException as error:
        raise _not_allowed(cluster, "list pods", error) from None
    manifests = cluster.core.api_client.sanitize_for_serialization(answer)["items"]
    manifests.sort(key=lambda pod: (pod["metadata"]["creationTimestamp"], pod_name(pod)))
    matches = [(NODE.fullmatch((pod["metadata"].get("annotations") or {}).get(NODE_NAME) or ""), pod)
               for pod in manifests]  # fmt: skip
    return [StepPod(match[1] or match[3], int(match[2] or 0) + 1, pod) for match, pod in matches if match]


def own_attempt(cluster: KubernetesClient, pipeline_run: str) -> int:
    """Return which attempt of its step this pod is, from 1; 1 outside of a pod of the run.

    A retry of the run begins at 1 again: the server removes the step's failed nodes, and Argo counts those that exist
    (kubeflow/pipelines, backend/src/common/util/workflow.go, GenerateRetryExecution; argo-workflows,
    workflow/controller/operator.go). KFP_POD_NAME is set in every step: backend/src/v2/compiler/argocompiler/common.go.
    Raises UserError if this account is not allowed to list pods.
    """
    own_name = os.environ.get("KFP_POD_NAME")
    return next((pod.attempt for pod in find_step_pods(cluster, pipeline_run) if pod.name == own_name), 1)


def why_failed(
    cluster: KubernetesClient, pods: Collection[StepPod], step: str, pipeline_run: str
) -> tuple[str, list[str]]:
    """Return what is known of a failed step: attempt, cause and remedy, and then lines of its log if no line says why.

    `pods` are those of the run.
    """
    own = [pod for pod in pods if pod.step == step and pod.phase != "Succeeded"]
    if not own:
        return f"{step} failed: it has no pod, which was deleted or never created; " \
               f"oc describe workflow -l {WORKFLOW_RUN_LABEL}={pipeline_run}", []  # fmt: skip
    pod = max(own, key=lambda pod: pod.attempt)
    failed = f"{step} failed, attempt {pod.attempt}: "
    status = pod.manifest["status"]
    if pod.end.get("reason") == "OOMKilled":
        limit = _memory_limit(pod.manifest)
        return f"{failed}it used more memory than its limit of {limit} (OOMKilled); raise resources.step_memory, or " \
               "resources.memory for a step that loads models", []  # fmt: skip
    if status.get("reason"):  # the whole pod: evicted, preempted, its node lost
        return f"{failed}{status['reason']}: {status.get('message') or 'no message'}", []
    if waits_for := pod.what_it_waits_for():
        return f"{failed}its pod has not started: {waits_for}", []
    try:
        lines = _last_lines(cluster, pod.name)
    except UserError as error:
        lines = []
        failed += f"its log cannot be read ({error.problem}); "
    if errors := [match[1] for line in lines if (match := ERROR_LINE.fullmatch(line))]:
        return failed + errors[-1], []
    code = pod.end.get("exitCode")
    end = f"exit code {code}" if code is not None else f"its pod is {pod.phase}"
    return failed + end, [line for line in lines if not OTHER_PROGRAMS.match(line)][-NUM_LAST_LINES:]


def _last_lines(cluster: KubernetesClient, pod: str) -> Sequence[str]:
    """Raises UserError if the log cannot be read."""
    try:
        text = cluster.call(
            lambda: cluster.core.read_namespaced_pod_log(
                pod, cluster.namespace, container=CONTAINER, tail_lines=TAIL_LINES,
                _request_timeout=CALL_TIMEOUT_SECONDS,
            )
        )  # fmt: skip
    except client.ApiException as error:
        raise _not_allowed(cluster, "read logs", error) from None
    return str(text).splitlines()


def _not_allowed(cluster: KubernetesClient, what: str, error: client.ApiException) -> UserError:
    if error.status == 403:
        return UserError(
            f"this account is not allowed to {what} in {cluster.namespace}", "ask an admin of the project for the "
            "role view"
        )  # fmt: skip
    return UserError(f"cannot {what} in {cluster.namespace}: {in_words(error)}")


def _memory_limit(pod: Mapping[str, Any]) -> str:
    container = next(container for container in pod["spec"]["containers"] if container["name"] == CONTAINER)
    return str(((container.get("resources") or {}).get("limits") or {}).get("memory") or "the node's memory")
