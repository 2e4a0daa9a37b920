"""All findings: of this machine, and of the cluster."""

from collections.abc import Sequence

from tailtune.doctor.findings import BLOCKS, OK, UNKNOWN, Finding, as_lines
from tailtune.doctor.local import local_findings
from tailtune.errors import UserError
from tailtune.log import log
from tailtune.recipe.schema import Recipe

LAPTOP_SECONDS, STEP_SECONDS = 20, 600
"""How long the cluster's API may fail, for somebody who waits and for a step."""


def examine(
    recipe: Recipe, namespace: str | None = None, *, cluster: bool = True, images: Sequence[str] = ()
) -> list[Finding]:
    """All findings, local ones first; a cluster that cannot be reached is one of them."""
    return [*local_findings(), *(_of_cluster(recipe, namespace, images, LAPTOP_SECONDS) if cluster else ())]


def refuse_blocked(recipe: Recipe, images: Sequence[str] = ()) -> None:
    """Log what is not in order on the cluster; raise UserError when something would stop the run.

    For a run's first step, whose own pod does not matter, and which is as patient as those that follow.
    """
    findings = _of_cluster(recipe, None, images, STEP_SECONDS)
    for line in as_lines([one for one in findings if one.status != OK] or findings):
        log.info("doctor: %s", line)
    if blocking := [one for one in findings if one.status == BLOCKS]:
        more = f" ({len(blocking) - 1} more above)" if len(blocking) > 1 else ""
        raise UserError(f"{blocking[0].check}: {blocking[0].message}{more}; {blocking[0].fix}")


def _of_cluster(recipe: Recipe, namespace: str | None, images: Sequence[str], api_seconds: float) -> list[Finding]:
    from kubernetes.client import ApiException

    from tailtune.doctor.cluster import cluster_findings
    from tailtune.jobs.kubernetes import KubernetesClient, in_words

    found = []
    try:
        for one in cluster_findings(KubernetesClient(namespace, api_seconds), recipe, images):
            found.append(one)
    except UserError as error:
        problem, _, fix = str(error).partition("; ")
        found.append(Finding("login", BLOCKS, problem, fix))
        found.append(Finding("cluster", UNKNOWN, "not looked at any further; --local looks at this machine alone"))
    except ApiException as error:
        found.append(Finding("cluster", UNKNOWN, f"not looked at any further: {in_words(error)}", "oc whoami"))
    return found
