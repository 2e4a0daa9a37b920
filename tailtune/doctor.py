"""What stands between this place and a run, each finding with the command that mends it.

Local checks always run; the others when there is a cluster. Nothing is changed.
"""

import platform
import shutil
import socket
from collections.abc import Iterator, Sequence
from importlib import metadata

from packaging.requirements import Requirement

from tailtune.errors import UserError
from tailtune.findings import BLOCKS, GIGABYTE, OK, UNKNOWN, WARNING, Finding, as_lines
from tailtune.jobs.local import count_gpus
from tailtune.log import log
from tailtune.recipe import Recipe

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

    from tailtune.cluster_doctor import cluster_findings
    from tailtune.jobs.api import Cluster, in_words

    found = []
    try:
        for one in cluster_findings(Cluster(namespace, api_seconds), recipe, images):
            found.append(one)
    except UserError as error:
        problem, _, fix = str(error).partition("; ")
        found.append(Finding("login", BLOCKS, problem, fix))
        found.append(Finding("cluster", UNKNOWN, "not looked at any further; --local looks at this machine alone"))
    except ApiException as error:
        found.append(Finding("cluster", UNKNOWN, f"not looked at any further: {in_words(error)}", "oc whoami"))
    return found


def local_findings() -> Iterator[Finding]:
    yield Finding("python", OK, platform.python_version())
    yield from _packages()
    gpus = count_gpus()
    if not gpus:
        yield Finding("gpu", OK, "no NVIDIA GPU here: local runs train a small model on the CPU")
    else:
        import torch

        if torch.cuda.is_available():
            names = ", ".join(torch.cuda.get_device_name(i) for i in range(gpus))
            yield Finding("gpu", OK, f"{names}; CUDA {torch.version.cuda}")
        else:
            yield Finding("gpu", BLOCKS, f"{gpus} GPUs, but torch {torch.__version__} does not see them",
                          "install a CUDA build of torch, or a driver that is new enough: nvidia-smi")  # fmt: skip
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        yield Finding("ports", OK, "ranks can listen on this machine")
    except OSError as error:
        yield Finding("ports", BLOCKS, f"ranks cannot listen: {error.strerror}", "allow local sockets")
    free = shutil.disk_usage(".").free
    status = OK if free > 5 * GIGABYTE else WARNING
    yield Finding("disk", status, f"{free / GIGABYTE:.0f} GB free here", "" if status == OK else "free some space")


def _packages() -> Iterator[Finding]:
    """The installed versions against what tailtune asks for."""
    wrong = []
    for text in metadata.requires("tailtune") or []:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, needed {requirement.specifier}")
    if wrong:
        yield Finding("packages", BLOCKS, "; ".join(wrong), "pip install -c constraints.txt -e .")
    else:
        shown = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "trl", "kfp"))
        yield Finding("packages", OK, shown)
