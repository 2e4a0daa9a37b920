"""Delete jobs that were left behind."""

from collections.abc import Callable
from typing import Any

from kubernetes import client

from tailtune.errors import UserError
from tailtune.jobs.job import PIPELINE_RUN_LABEL, label_value
from tailtune.jobs.kubernetes import KubernetesClient, in_words
from tailtune.jobs.objects import JOB_KINDS, LAUNCHER_ANNOTATION, MANAGED_SELECTOR, Jobs

ASK_CLUSTER_ADMIN = "an administrator of the cluster: oc apply -k deploy/cluster-admin/"
"""The remedy for rights on training jobs, which the roles of a project do not contain."""


class NotAllowedToListError(UserError):
    """This account is not allowed to list training jobs of any kind."""


def cancel(
    cluster: KubernetesClient, *, run: str | None = None, pipeline_run: str | None = None, dry_run: bool = False
) -> list[str]:
    """Delete the jobs of a run that have not ended, and return their names.

    `run` is the run's name, shared by all pipeline runs with this name; `pipeline_run` is the id of one pipeline run.
    Raises NotAllowedToListError.
    """
    label = f"tailtune.io/run={label_value(run)}" if run else f"{PIPELINE_RUN_LABEL}={label_value(pipeline_run or '')}"
    return _delete_all(cluster, f"{MANAGED_SELECTOR},{label}", lambda manifest: True, dry_run)


def is_in_progress(cluster: KubernetesClient, *, run: str, pipeline_run: str) -> bool | None:
    """Whether a pipeline run or a training job of the run `run` has not ended; None if this account may not know.

    The job of a run that failed by itself may still be training.
    """
    try:
        active = bool(pipeline_run) and cluster.workflow_is_active(pipeline_run)
        return active or bool(cancel(cluster, run=run, dry_run=True))
    except NotAllowedToListError:
        return None
    except client.ApiException as error:
        if error.status not in (403, 404):
            raise
        return None


def end_of_run(cluster: KubernetesClient, pipeline_run: str) -> tuple[list[str], list[str]]:
    """What the last step of a pipeline run does: if someone has ended the run, delete its jobs that have not ended.

    Jobs of a run that failed by itself keep training: they have lost their launcher, and a retry follows them again.
    But without a deadline of their own they could hold their GPUs for ever, so those are deleted, too. An account that
    may not read workflows deletes them all. Returns the names of the deleted jobs and of those that keep training.
    """
    left = cancel(cluster, pipeline_run=pipeline_run, dry_run=True)
    if not left:
        return [], []
    try:
        if not cluster.pipeline_run_is_terminated(pipeline_run):
            selector = f"{MANAGED_SELECTOR},{PIPELINE_RUN_LABEL}={label_value(pipeline_run)}"
            deleted = _delete_all(cluster, selector, lambda manifest: not _has_deadline(manifest), dry_run=False)
            return deleted, [name for name in left if name not in deleted]
    except client.ApiException as error:
        if error.status != 403:
            raise
    return cancel(cluster, pipeline_run=pipeline_run), []


def delete_jobs_of_ended_runs(cluster: KubernetesClient) -> list[str]:
    """Delete the jobs of pipeline runs that somebody has ended, and return their names.

    A run's last step does this, but only once: a run that is retried keeps it as done (kubeflow/pipelines,
    backend/src/common/util/workflow.go, GenerateRetryExecution, which starts only a workflow's own exit handler again).
    Raises NotAllowedToListError, and client.ApiException if this account may not read workflows.
    """

    def is_ended(manifest: dict[str, Any]) -> bool:
        pipeline_run = str((manifest["metadata"].get("labels") or {}).get(PIPELINE_RUN_LABEL) or "")
        return pipeline_run != "" and cluster.pipeline_run_is_terminated(pipeline_run)

    return _delete_all(cluster, MANAGED_SELECTOR, is_ended, dry_run=False)


def collect_garbage(cluster: KubernetesClient, *, dry_run: bool = False) -> list[str]:
    """Delete orphaned jobs and return their names: jobs that have not ended, although their launcher's pod has.

    A job without a launcher's pod was started from outside the cluster and is left alone. Raises NotAllowedToListError.
    """

    def is_orphaned(manifest: dict[str, Any]) -> bool:
        launcher = str((manifest["metadata"].get("annotations") or {}).get(LAUNCHER_ANNOTATION) or "")
        return bool(launcher) and not cluster.pod_is_alive(launcher)

    return _delete_all(cluster, MANAGED_SELECTOR, is_orphaned, dry_run)


def _has_deadline(manifest: dict[str, Any]) -> bool:
    spec = manifest["spec"]
    return "activeDeadlineSeconds" in spec or "activeDeadlineSeconds" in (spec.get("runPolicy") or {})


def _delete_all(
    cluster: KubernetesClient, selector: str, predicate: Callable[[dict[str, Any]], bool], dry_run: bool
) -> list[str]:
    names, refusal, could_list = [], "", False
    for kind in JOB_KINDS.values():
        jobs = Jobs(cluster, kind)
        try:
            manifests = jobs.find(selector)
        except client.ApiException as error:
            if error.status not in (403, 404):
                raise
            refusal = refusal or (in_words(error) if error.status == 403 else "")
            continue
        could_list = True
        for manifest in manifests:
            is_active = kind.state(manifest)[0] in ("waiting", "running")
            if is_active and not manifest["metadata"].get("deletionTimestamp") and predicate(manifest):
                names.append(name := manifest["metadata"]["name"])
                if not dry_run:
                    jobs.delete(name)
    if refusal and not could_list:
        problem = f"this account is not allowed to list training jobs in {cluster.namespace}: {refusal}"
        raise NotAllowedToListError(problem, ASK_CLUSTER_ADMIN)
    return names
