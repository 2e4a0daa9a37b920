"""Delete jobs that are left behind."""

from collections.abc import Callable
from typing import Any

from kubernetes import client

from tailtune.errors import UserError
from tailtune.jobs.job import label_value
from tailtune.jobs.kubernetes import KubernetesClient, in_words
from tailtune.jobs.objects import JOB_KINDS, LAUNCHER, MANAGED, Jobs


def cancel(
    cluster: KubernetesClient, *, run: str | None = None, pipeline_run: str | None = None, dry_run: bool = False
) -> list[str]:
    """Delete the jobs, of every kind, that have not ended: of runs by name, or of one run of the pipeline by its id.

    Returns their names. Raises UserError when this account may not look.
    """
    label = f"run={label_value(run)}" if run else f"pipeline-run={label_value(pipeline_run or '')}"
    return _delete_all(cluster, f"{MANAGED},tailtune.io/{label}", lambda manifest: True, dry_run)


def collect_garbage(cluster: KubernetesClient, *, dry_run: bool = False) -> list[str]:
    """Delete jobs that have not ended and that nobody waits for: the pod of their step is gone. Their names."""

    def orphaned(manifest: dict[str, Any]) -> bool:
        launcher = str((manifest["metadata"].get("annotations") or {}).get(LAUNCHER) or "")
        return bool(launcher) and not cluster.pod_is_alive(launcher)

    return _delete_all(cluster, MANAGED, orphaned, dry_run)


def _delete_all(
    cluster: KubernetesClient, selector: str, wanted: Callable[[dict[str, Any]], bool], dry_run: bool
) -> list[str]:
    names, refused, looked = [], "", False
    for kind in JOB_KINDS.values():
        jobs = Jobs(cluster, kind)
        try:
            found = jobs.find(selector)
        except client.ApiException as error:
            if error.status not in (403, 404):
                raise
            refused = refused or (in_words(error) if error.status == 403 else "")
            continue
        looked = True
        for manifest in found:
            going = manifest["metadata"].get("deletionTimestamp")
            if not going and kind.state(manifest)[0] in ("waiting", "running") and wanted(manifest):
                names.append(name := manifest["metadata"]["name"])
                if not dry_run:
                    jobs.delete(name)
    if refused and not looked:
        raise UserError(f"this account may not see training jobs in {cluster.namespace}: {refused}; oc whoami")
    return names
