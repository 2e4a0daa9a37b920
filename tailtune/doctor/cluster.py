"""What stands between a project on a cluster and a run of a recipe. Reads only."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import requests
from kubernetes import client
from kubernetes.utils.quantity import parse_quantity
from packaging.version import InvalidVersion, Version

from tailtune.doctor.findings import BLOCKS, GIGABYTE, OK, UNKNOWN, WARNING, Finding
from tailtune.jobs import trainjob
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.objects import JOB_KINDS, find_kind
from tailtune.recipe.schema import Recipe
from tailtune.run import MOUNTS

RUNNER = "pipeline-runner-dspa"
"""Service account of the pipeline's steps."""
VERBS = ("create", "get", "list", "patch", "delete")
"""What a step does with training jobs."""
OLDEST_SERVER = Version("2.14.3")
"""Of Kubeflow Pipelines, whose compiled files the older ones do not read; OpenShift AI 3.0 has it."""
INTERNAL_REGISTRY = "image-registry.openshift-image-registry.svc:5000/"
SERVER_SECONDS = 20.0


def cluster_findings(cluster: KubernetesClient, recipe: Recipe, images: Sequence[str] = ()) -> Iterator[Finding]:
    api = client.ApiClient(cluster.configuration)
    version = cluster.call(client.VersionApi(api).get_code)
    yield Finding("login", OK, f"{cluster.configuration.host}, Kubernetes {version.git_version}, project "
                               f"{cluster.namespace}")  # fmt: skip
    groups = cluster.call(client.ApisApi(api).get_api_versions).groups
    yield from _pipeline_server(cluster)
    yield from _training_jobs(cluster, recipe)
    yield from _volumes(cluster, recipe)
    yield from _queue(cluster, recipe, groups)
    yield from _quota(cluster, recipe)
    yield from _secrets(cluster, recipe)
    yield from _images(cluster, images)


def _pipeline_server(cluster: KubernetesClient) -> Iterator[Finding]:
    """Whether the project has one, and whether it reads what is compiled here. A step of a run need not ask."""
    check = "pipeline server"
    try:
        found = cluster.call(lambda: cluster.custom.list_namespaced_custom_object(
            "datasciencepipelinesapplications.opendatahub.io", "v1", cluster.namespace,
            "datasciencepipelinesapplications"))["items"]  # fmt: skip
    except client.ApiException as error:
        if error.status == 404:
            yield Finding(check, BLOCKS, "the cluster has no pipeline servers",
                          "enable the aipipelines component: oc edit datasciencecluster")  # fmt: skip
        elif not cluster.in_pod:  # a step of a run has its server
            yield _unread(check, error.status, "oc get dspa")
        return
    paths = ("status", "components", "apiServer", "externalUrl")
    address = next(filter(None, (reduce(lambda at, name: at.get(name) or {}, paths, one) for one in found)), None)
    if address is None:
        yield Finding(check, BLOCKS, f"project {cluster.namespace} has none that is ready",
                      "dashboard: the project, Pipelines, Configure pipeline server; then oc get dspa")  # fmt: skip
        return
    token = cluster.configuration.get_api_key_with_prefix("authorization") or ""
    try:
        answer = requests.get(f"{address}/apis/v1beta1/healthz", headers={"Authorization": token},
                              verify=os.environ.get("TAILTUNE_CA_FILE") or cluster.configuration.ssl_ca_cert or True,
                              timeout=SERVER_SECONDS)  # fmt: skip
        answer.raise_for_status()
        told = str(answer.json().get("tag_name") or "")
        old = Version(told) < OLDEST_SERVER
    except OSError as error:  # requests' own errors are of this kind, a missing file of certificates too
        yield Finding(check, WARNING, f"{address} does not answer: {type(error).__name__}", f"curl -v {address}")
    except (InvalidVersion, AttributeError):
        yield Finding(check, OK, f"{address}; it does not tell its version, needed is {OLDEST_SERVER} or newer")
    else:
        fix = "update OpenShift AI to 3.0 or newer" if old else ""
        yield Finding(
            check, BLOCKS if old else OK, f"{address}, version {told}, needed is {OLDEST_SERVER} or newer", fix
        )


def _training_jobs(cluster: KubernetesClient, recipe: Recipe) -> Iterator[Finding]:
    """The kind of job that the launcher would take, and what the steps' account may do with it."""
    wanted = [kind for name, kind in JOB_KINDS.items() if recipe.resources.job_kind in ("auto", name)]
    there = [kind for kind in wanted if find_kind(cluster, kind)]
    if not there:
        yield Finding("training job", BLOCKS, f"the cluster has no {' and no '.join(kind.KIND for kind in wanted)}",
                      "enable the component trainingoperator, or trainer: oc edit datasciencecluster")  # fmt: skip
        return
    user = _runner(cluster)
    missing = {kind.KIND: [f"{verb} {kind.PLURAL}" for verb in VERBS
                           if not cluster.may(verb, kind.GROUP, kind.PLURAL, user)] for kind in there}  # fmt: skip
    kind = next((one for one in there if not missing[one.KIND]), there[0])
    yield Finding("training job", OK, f"{kind.KIND} is there")
    refused = missing[kind.KIND] + [
        f"{verb} {what}"
        for verb, what in (("list", "pods"), ("get", "pods/log"))
        if not cluster.may(verb, "", what, user)
    ]
    check = "permissions of the runner" if user else "permissions"
    if not refused:
        yield Finding(check, OK, "may create, follow and delete training jobs")
    else:
        fix = f"oc policy add-role-to-user edit -z {RUNNER} -n {cluster.namespace}"
        if kind is trainjob:
            fix = "take the comment signs off components/trainjob in deploy/kustomization.yaml; oc apply -k deploy/"
        yield Finding(check, BLOCKS, f"may not {', '.join(refused)} in {cluster.namespace}", fix)
    if kind is trainjob:
        yield _runtime(cluster, recipe)


def _runner(cluster: KubernetesClient) -> str | None:
    """The steps' account, where the one that is logged in may ask about it; else None: its own permissions count."""
    user = f"system:serviceaccount:{cluster.namespace}:{RUNNER}"
    try:
        cluster.may("list", "", "pods", user)
    except client.ApiException:
        return None
    return user


def _runtime(cluster: KubernetesClient, recipe: Recipe) -> Finding:
    name, plural = trainjob.RUNTIMES[bool(recipe.resources.gpu)], "clustertrainingruntimes"
    found = _read(cluster, lambda name, _: cluster.custom.get_cluster_custom_object(
        trainjob.GROUP, trainjob.VERSION, plural, name), name)  # fmt: skip
    if found == 404:
        return Finding("runtime", BLOCKS, f"there is no ClusterTrainingRuntime {name}",
                       "enable the component trainer: oc edit datasciencecluster")  # fmt: skip
    if isinstance(found, int):
        return _unread("runtime", found, "an administrator of the cluster: oc apply -k deploy/cluster-admin/")
    return Finding("runtime", OK, f"{name} is there")


def _volumes(cluster: KubernetesClient, recipe: Recipe) -> Iterator[Finding]:
    claims, num_nodes = recipe.cluster, recipe.resources.num_nodes
    places = {claims.data_claim: MOUNTS["data_dir"], claims.models_claim: MOUNTS["models_dir"],
              claims.workspace_claim: MOUNTS["workspace_dir"]}  # fmt: skip
    for claim, path in places.items():
        check = f"volume {claim}"
        found = _read(cluster, cluster.core.read_namespaced_persistent_volume_claim, claim)
        if isinstance(found, int):
            yield _unread(check, found, "oc apply -k deploy/")
            continue
        modes, phase = found.spec.access_modes or [], found.status.phase
        size = (found.status.capacity or found.spec.resources.requests or {}).get("storage", "?")
        if phase == "Lost":
            yield Finding(check, BLOCKS, "has lost its volume", f"oc delete pvc {claim}; oc apply -k deploy/")
        elif num_nodes > 1 and "ReadWriteMany" not in modes:
            why = f"is {', '.join(modes)}, and {num_nodes} nodes need ReadWriteMany"
            yield Finding(check, BLOCKS, why, "give it a class with ReadWriteMany in deploy/")
        elif "ReadWriteMany" not in modes:
            why = f"is {', '.join(modes)}: steps and training wait for ever when they come to different nodes"
            yield Finding(check, WARNING, why, "give it a class with ReadWriteMany in deploy/, or pin both to one node "
                                               "with -p resources.node_selector=")  # fmt: skip
        else:
            free = f", {shutil.disk_usage(path).free / GIGABYTE:.0f} GB free" if Path(path).is_dir() else ""
            yield Finding(check, OK, f"{phase}, {size}, {', '.join(modes)}{free}")


def _queue(cluster: KubernetesClient, recipe: Recipe, groups: Sequence[client.V1APIGroup]) -> Iterator[Finding]:
    name = recipe.resources.queue
    there = any(one.name == "kueue.x-k8s.io" for one in groups)
    if not name:
        if there:
            yield Finding("queue", WARNING, "the cluster has Kueue, and the run names no queue",
                          "oc get localqueue; then -p queue=NAME")  # fmt: skip
        return
    version = next((one.versions[0].version for one in groups if one.name == "kueue.x-k8s.io"), "v1beta1")
    found = _read(cluster, lambda name, namespace: cluster.custom.get_namespaced_custom_object(
        "kueue.x-k8s.io", version, namespace, "localqueues", name), name)  # fmt: skip
    if found == 404 and not there:
        yield Finding(f"queue {name}", WARNING, "the cluster has no Kueue, so the job does not queue", "-p queue=")
    elif isinstance(found, int):
        yield _unread(f"queue {name}", found, "oc get localqueue; then -p queue=NAME")
    else:
        yield Finding(f"queue {name}", OK, "the LocalQueue is there")


def _quota(cluster: KubernetesClient, recipe: Recipe) -> Iterator[Finding]:
    """Whether the job's pods fit: what can never fit blocks, what does not fit now is a warning."""
    wanted, nodes = recipe.resources, recipe.resources.num_nodes
    needs = {"pods": "1", "requests.cpu": wanted.cpu_request, "cpu": wanted.cpu_request, "limits.cpu": wanted.cpu,
             "requests.memory": wanted.memory_request, "memory": wanted.memory_request,
             "limits.memory": wanted.memory}  # fmt: skip
    if wanted.gpu:
        needs[f"requests.{wanted.gpu}"] = str(wanted.ranks_per_node)
    found = _read(cluster, lambda _, namespace: cluster.core.list_namespaced_resource_quota(namespace), "")
    if isinstance(found, int):
        yield _unread("quota", found, f"oc get resourcequota -n {cluster.namespace}")
        return
    short: dict[str, str] = {}
    for quota in found.items:
        if quota.spec and (quota.spec.scopes or quota.spec.scope_selector):  # for some pods, and maybe not for ours
            continue
        hard, used = quota.status.hard or {}, quota.status.used or {}
        for name, one in needs.items():
            if name not in hard:
                continue
            need, limit = nodes * parse_quantity(one), parse_quantity(hard[name])
            if need > limit - parse_quantity(used.get(name, "0")):
                text = f"{name}: {nodes} x {one} needed, {used.get(name, '0')} of {hard[name]} used"
                short[text] = BLOCKS if need > limit else WARNING
    if short:
        yield Finding("quota", BLOCKS if BLOCKS in short.values() else WARNING, "; ".join(short),
                      "free some, ask for more, or lower -p num_nodes= and resources.*")  # fmt: skip
    else:
        yield Finding("quota", OK, f"room for {nodes} pods" if found.items else "the project has none")


def _secrets(cluster: KubernetesClient, recipe: Recipe) -> Iterator[Finding]:
    """By name and key; values are not looked at. None stops a run: there are other ways to be let in."""
    names = recipe.cluster
    wanted = (
        ("hf_secret", names.hf_secret, "token", "gated or private models and data sets", False),
        ("s3_secret", names.s3_secret, "AWS_ACCESS_KEY_ID", "data on S3", recipe.data.source.startswith("s3://")),
        ("ca_secret", names.ca_secret, "ca-bundle.crt", "servers with certificates of your own", False),
    )
    for parameter, name, key, purpose, needed in wanted:
        check = f"secret {name}"
        create = (
            f"oc create secret generic NAME --from-file={key}=FILE -n {cluster.namespace}; then -p {parameter}=NAME"
        )
        found = _read(cluster, cluster.core.read_namespaced_secret, name)
        if found == 404:
            yield Finding(
                check, WARNING if needed else OK, f"not there; needed for {purpose}", create if needed else ""
            )
        elif isinstance(found, int):
            yield _unread(check, found, create)
        elif key not in (found.data or {}):
            yield Finding(check, WARNING, f"has no key {key}, so it is of no use for {purpose}", create)
        else:
            yield Finding(check, OK, f"there, with {key}")


def _images(cluster: KubernetesClient, images: Sequence[str]) -> Iterator[Finding]:
    """Those of the cluster's own registry; others are met when a pod pulls them."""
    for image in images:
        path = image.removeprefix(INTERNAL_REGISTRY)
        namespace, _, name = path.partition("/")
        check = f"image {name.partition(':')[0].rpartition('/')[2]}"
        if path == image or "/" in name or "@" in name or ":" not in name:
            yield Finding(check, OK, f"{image}: not checked, only names with a tag in the cluster's own registry are")
            continue
        found = _read(cluster, lambda name, namespace: cluster.custom.get_namespaced_custom_object(
            "image.openshift.io", "v1", namespace, "imagestreamtags", name), name, namespace)  # fmt: skip
        if found == 404:
            build = f"oc start-build {name.partition(':')[0]} --from-repo=. --follow -n {namespace}"
            yield Finding(check, BLOCKS, "is not built", build)
        elif isinstance(found, int):
            yield _unread(check, found, f"oc get istag -n {namespace}")
        else:
            yield Finding(check, OK, f"{name} is in project {namespace}")


def _read(cluster: KubernetesClient, read: Callable[[str, str], Any], name: str, namespace: str | None = None) -> Any:
    """What `read` gives for a name in the project, or the status with which it is refused, 4xx."""
    try:
        return cluster.call(lambda: read(name, namespace or cluster.namespace))
    except client.ApiException as error:
        if 400 <= error.status < 500:
            return error.status
        raise


def _unread(check: str, status: int, fix: str) -> Finding:
    if status == 404:
        return Finding(check, BLOCKS, "does not exist", fix)
    return Finding(check, UNKNOWN, "may not be read by this account: not checked", fix)
