"""All findings: those of this machine and those of the cluster."""

from collections.abc import Sequence

from tailtune.doctor.findings import BLOCKS, OK, UNKNOWN, Finding, as_lines
from tailtune.doctor.local import local_findings
from tailtune.errors import UserError
from tailtune.log import log
from tailtune.recipe.schema import Recipe

LAPTOP_SECONDS, STEP_SECONDS = 20, 600
"""How long to keep retrying the cluster's API: while a user waits, and in a step of a run."""


def examine(
    recipe: Recipe, namespace: str | None = None, *, cluster: bool = True, images: Sequence[str] = ()
) -> list[Finding]:
    """Return all findings, local ones first. A cluster that cannot be reached is one of them."""
    return [*local_findings(), *(_on_cluster(recipe, namespace, images, LAPTOP_SECONDS) if cluster else ())]


def refuse_blocked(recipe: Recipe, images: Sequence[str] = ()) -> None:
    """Log every problem found on the cluster. Raises UserError when something would stop the run.

    For the first step of a run: it leaves out its own pod, and retries as long as the steps that follow.
    """
    findings = _on_cluster(recipe, None, images, STEP_SECONDS)
    for line in as_lines([finding for finding in findings if finding.status != OK] or findings):
        log.info("doctor: %s", line)
    if blocking := [finding for finding in findings if finding.status == BLOCKS]:
        more = f" ({len(blocking) - 1} more above)" if len(blocking) > 1 else ""
        raise UserError(f"{blocking[0].check}: {blocking[0].message}{more}", blocking[0].fix)


def _on_cluster(recipe: Recipe, namespace: str | None, images: Sequence[str], api_seconds: float) -> list[Finding]:
    from kubernetes.client import ApiException

    from tailtune.doctor.cluster import cluster_findings
    from tailtune.jobs.kubernetes import KubernetesClient, in_words

    findings = []
    try:
        for finding in cluster_findings(KubernetesClient(namespace, api_seconds), recipe, images):
            findings.append(finding)
    except UserError as error:
        findings.append(Finding("login", BLOCKS, error.problem, error.remedy))
        findings.append(Finding("cluster", UNKNOWN, "not checked any further; --local checks only this machine"))
    except ApiException as error:
        findings.append(Finding("cluster", UNKNOWN, f"not checked any further: {in_words(error)}", "oc whoami"))
    return findings
