"""What stands between this place and a run, each finding with the command that mends it.

Local checks always run; the others when there is a cluster. Nothing is changed.
"""

import platform
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from tailtune.errors import UserError
from tailtune.jobs.local import count_gpus
from tailtune.recipe import Recipe

if TYPE_CHECKING:
    from tailtune.jobs.cluster import Cluster

OK, WARNING, BLOCKS = "ok", "warning", "blocks"
RUNNER = "pipeline-runner-dspa"
"""Service account of the pipeline's steps."""
VERBS = ("create", "get", "list", "patch", "delete")
"""What a step does with training jobs."""
GIGABYTE = 10**9


@dataclass(frozen=True)
class Finding:
    check: str
    status: str
    """`ok`, `warning` or `blocks`."""
    message: str
    fix: str = ""
    """The exact command, or what to do."""


def examine(recipe: Recipe, namespace: str | None = None, *, cluster: bool = True) -> list[Finding]:
    """All findings, local ones first; a cluster that cannot be reached is one of them."""
    found = list(local_findings())
    if not cluster:
        return found
    from tailtune.jobs.cluster import Cluster

    try:
        there = Cluster(namespace, api_seconds=20)
        found += cluster_findings(there, recipe)
    except UserError as error:
        problem, _, fix = str(error).partition("; ")
        found.append(Finding("login", BLOCKS, problem, fix))
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


def cluster_findings(cluster: "Cluster", recipe: Recipe) -> Iterator[Finding]:
    from kubernetes import client

    api = client.ApiClient(cluster.configuration)
    version = cluster.call(client.VersionApi(api).get_code)
    yield Finding("login", OK, f"{cluster.configuration.host}, Kubernetes {version.git_version}, project "
                               f"{cluster.namespace}")  # fmt: skip
    groups = {group.name for group in cluster.call(client.ApisApi(api).get_api_versions).groups}
    yield from _jobs(cluster, recipe, groups)
    yield from _volumes(cluster, recipe)
    yield from _queue(cluster, recipe, groups)


def _jobs(cluster: "Cluster", recipe: Recipe, groups: set[str]) -> Iterator[Finding]:
    """The kind of job that the launcher would take, and what the account may do with it.

    The account is the one that is logged in, which in a pipeline's step is the runner's own.
    """
    from tailtune.jobs import trainjob
    from tailtune.jobs.cluster import KINDS

    wanted = [kind for name, kind in KINDS.items() if recipe.resources.job_kind in ("auto", name)]
    there = [kind for kind in wanted if kind.GROUP in groups]
    if not there:
        yield Finding("training job", BLOCKS, f"the cluster has no {' and no '.join(kind.KIND for kind in wanted)}",
                      "enable the component trainingoperator, or trainer: oc edit datasciencecluster")  # fmt: skip
        return
    missing = {kind.KIND: [f"{verb} {kind.PLURAL}" for verb in VERBS if not cluster.may(verb, kind.GROUP, kind.PLURAL)]
               for kind in there}  # fmt: skip
    kind = next((one for one in there if not missing[one.KIND]), there[0])
    yield Finding("training job", OK, f"{kind.KIND} is there")
    refused = missing[kind.KIND] + [
        f"{verb} {what}" for verb, what in (("list", "pods"), ("get", "pods/log")) if not cluster.may(verb, "", what)
    ]
    if not refused:
        yield Finding("permissions", OK, "may create, follow and delete training jobs")
    else:
        fix = f"oc policy add-role-to-user edit -z {RUNNER} -n {cluster.namespace}"
        if kind is trainjob:
            fix = "take the comment signs off components/trainjob in deploy/kustomization.yaml; oc apply -k deploy/"
        yield Finding("permissions", BLOCKS, f"may not {', '.join(refused)} in {cluster.namespace}", fix)
    if kind is trainjob:
        yield _runtime(cluster, recipe)


def _runtime(cluster: "Cluster", recipe: Recipe) -> Finding:
    from kubernetes import client

    from tailtune.jobs import trainjob

    name, plural = trainjob.RUNTIMES[bool(recipe.resources.gpu)], "clustertrainingruntimes"
    try:
        cluster.call(lambda: cluster.custom.get_cluster_custom_object(trainjob.GROUP, trainjob.VERSION, plural, name))
    except client.ApiException as error:
        if error.status == 403:
            return Finding("runtime", WARNING, f"{name} may not be read: not checked",
                           "an administrator of the cluster: oc apply -k deploy/cluster-admin/")  # fmt: skip
        return Finding("runtime", BLOCKS, f"there is no ClusterTrainingRuntime {name}",
                       "enable the component trainer: oc edit datasciencecluster")  # fmt: skip
    return Finding("runtime", OK, f"{name} is there")


def _volumes(cluster: "Cluster", recipe: Recipe) -> Iterator[Finding]:
    from kubernetes import client

    claims = recipe.cluster
    places = {claims.data_claim: "/shared/data", claims.models_claim: "/shared/models",
              claims.workspace_claim: "/shared/workspace"}  # fmt: skip
    for claim, path in places.items():
        check = f"volume {claim}"
        try:
            found = cluster.call(
                partial(cluster.core.read_namespaced_persistent_volume_claim, claim, cluster.namespace)
            )
        except client.ApiException as error:
            fix = "oc apply -k deploy/" if error.status == 404 else f"ask for the right to read it: {error.reason}"
            yield Finding(check, BLOCKS, "does not exist" if error.status == 404 else str(error.reason), fix)
            continue
        modes, phase = found.spec.access_modes or [], found.status.phase
        size = (found.status.capacity or found.spec.resources.requests or {}).get("storage", "?")
        if recipe.resources.num_nodes > 1 and "ReadWriteMany" not in modes:
            why = f"is {', '.join(modes)}, and {recipe.resources.num_nodes} nodes need ReadWriteMany"
            yield Finding(check, BLOCKS, why, "give it a class with ReadWriteMany in deploy/, or set -p num_nodes=1")
        elif phase == "Lost":
            yield Finding(check, BLOCKS, "has lost its volume", f"oc delete pvc {claim}; oc apply -k deploy/")
        else:
            free = f", {shutil.disk_usage(path).free / GIGABYTE:.0f} GB free" if Path(path).is_dir() else ""
            yield Finding(check, OK, f"{phase}, {size}, {', '.join(modes)}{free}")


def _queue(cluster: "Cluster", recipe: Recipe, groups: set[str]) -> Iterator[Finding]:
    from kubernetes import client

    name = recipe.resources.queue
    if not name:
        if "kueue.x-k8s.io" in groups:
            yield Finding("queue", WARNING, "the cluster has Kueue, and the run names no queue",
                          "oc get localqueue; then -p queue=NAME")  # fmt: skip
        return
    try:
        cluster.call(lambda: cluster.custom.get_namespaced_custom_object(
            "kueue.x-k8s.io", "v1beta1", cluster.namespace, "localqueues", name))  # fmt: skip
        yield Finding("queue", OK, f"LocalQueue {name} is there")
    except client.ApiException as error:
        if error.status == 403:
            yield Finding("queue", WARNING, f"LocalQueue {name} may not be read: not checked", "oc apply -k deploy/")
        else:
            yield Finding("queue", BLOCKS, f"LocalQueue {name} does not exist", "oc get localqueue; then -p queue=NAME")


MARKS = {OK: "✓", WARNING: "!", BLOCKS: "✗"}


def as_lines(findings: list[Finding]) -> list[str]:
    """For a terminal: a line each, the fix below it."""
    width = max(len(one.check) for one in findings)
    lines = []
    for one in findings:
        lines.append(f"{MARKS[one.status]} {one.check:{width}}  {one.message}")
        if one.fix:
            lines.append(f"  {'':{width}}  → {one.fix}")
    return lines


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    return [asdict(one) for one in findings]


def blocked(findings: list[Finding]) -> bool:
    return any(one.status == BLOCKS for one in findings)
