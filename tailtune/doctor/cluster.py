"""What would stop a run of a recipe in a project on a cluster. Only reads."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import requests
from kubernetes import client
from kubernetes.utils.quantity import parse_quantity
from packaging.version import InvalidVersion, Version

from tailtune.doctor.findings import BLOCKS, GIGABYTE, OK, UNKNOWN, WARNING, Finding
from tailtune.jobs import trainjob
from tailtune.jobs.cleanup import ASK_CLUSTER_ADMIN
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.objects import JOB_KINDS, find_kind
from tailtune.recipe.schema import Recipe
from tailtune.run import MOUNTS

RUNNER = "pipeline-runner"
"""Service account of the steps on Kubeflow Pipelines; OpenShift AI adds a dash and the pipeline server's name."""
SERVER_GROUP = "datasciencepipelinesapplications.opendatahub.io"
VERBS = ("create", "get", "list", "patch", "delete")
"""What a step needs to do with training jobs."""
PERSON_VERBS = ("list", "delete")
"""What `tailtune cancel` and `tailtune gc` need to do with them."""
OLDEST_SERVER = Version("2.14.3")
"""Kubeflow Pipelines' version that compiled files need; OpenShift AI 3.0 has it."""
INTERNAL_REGISTRY = "image-registry.openshift-image-registry.svc:5000/"
SERVER_TIMEOUT_SECONDS = 20.0
HOSTNAME = "kubernetes.io/hostname"
SELECTED_NODE = "volume.kubernetes.io/selected-node"
"""Annotation of a claim whose volume was made for the node of the first pod: kubernetes, pkg/volume."""


def cluster_findings(cluster: KubernetesClient, recipe: Recipe, images: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the findings one by one. Raises UserError and ApiException when the API fails for good."""
    api = client.ApiClient(cluster.configuration)
    version = cluster.call(client.VersionApi(api).get_code)
    yield Finding("login", OK, f"{cluster.configuration.host}, Kubernetes {version.git_version}, project "
                               f"{cluster.namespace}")  # fmt: skip
    groups = cluster.call(client.ApisApi(api).get_api_versions).groups
    is_openshift = any(group.name == "image.openshift.io" for group in groups)
    yield from _pipeline_server(cluster, is_openshift)
    yield from _training_jobs(cluster, recipe)
    yield from _volumes(cluster, recipe)
    yield from _queue(cluster, recipe, groups)
    yield from _quota(cluster, recipe)
    yield from _secrets(cluster, recipe)
    yield from _images(cluster, images, is_openshift)


def find_pipeline_server(cluster: KubernetesClient) -> str | None:
    """Return the address in the status of the project's DataSciencePipelinesApplication; None while none is ready.

    Raises client.ApiException, with status 404 where the cluster has no pipeline servers.
    """
    for server in _pipeline_servers(cluster):
        value: Any = server
        for key in ("status", "components", "apiServer", "externalUrl"):
            value = value.get(key) or {}
        if value:
            return str(value)
    return None


def _pipeline_servers(cluster: KubernetesClient) -> list[dict[str, Any]]:
    """Return the project's DataSciencePipelinesApplications. Raises client.ApiException."""
    answer = cluster.call(lambda: cluster.custom.list_namespaced_custom_object(
        SERVER_GROUP, "v1", cluster.namespace, "datasciencepipelinesapplications"))  # fmt: skip
    return list(answer["items"])


def _pipeline_server(cluster: KubernetesClient, is_openshift: bool) -> Iterator[Finding]:
    """Check that the project has a server, and that it is new enough for the compiled files.

    Inside a run, which has a server, one that is not found is not a finding.
    """
    check = "pipeline server"
    try:
        address = find_pipeline_server(cluster)
    except client.ApiException as error:
        if cluster.in_pod:
            return
        if error.status != 404:
            yield _unread(check, error.status, "oc get dspa")
        elif is_openshift:
            yield Finding(check, BLOCKS, "the cluster has no pipeline servers",
                          "enable the aipipelines component: oc edit datasciencecluster")  # fmt: skip
        else:
            yield Finding(check, UNKNOWN, "the cluster has no OpenShift AI: Kubeflow Pipelines is not checked",
                          "name its address when you submit: pipeline.py --submit --endpoint ADDRESS")  # fmt: skip
        return
    if address is None:
        if cluster.in_pod:
            return
        yield Finding(check, BLOCKS, f"project {cluster.namespace} has none that is ready",
                      "dashboard: the project, Pipelines, Configure pipeline server; then oc get dspa")  # fmt: skip
        return
    token = cluster.configuration.get_api_key_with_prefix("authorization") or ""
    try:
        response = requests.get(f"{address}/apis/v1beta1/healthz", headers={"Authorization": token},
                                verify=os.environ.get("TAILTUNE_CA_FILE") or True,  # not the CA of the cluster's API
                                timeout=SERVER_TIMEOUT_SECONDS)  # fmt: skip
        response.raise_for_status()
        version = str(response.json().get("tag_name") or "")
        too_old = Version(version) < OLDEST_SERVER
    except requests.exceptions.SSLError:
        yield Finding(check, WARNING, f"the certificate of {address} is not trusted here",
                      "put the CA of the cluster's router into a file, and name it in TAILTUNE_CA_FILE")  # fmt: skip
    except OSError as error:  # the base class of requests' errors; also raised for a missing file of certificates
        yield Finding(check, WARNING, f"{address} does not answer: {type(error).__name__}", f"curl -v {address}")
    except (InvalidVersion, AttributeError):
        yield Finding(check, UNKNOWN, f"{address} does not report its version; {OLDEST_SERVER} or newer is needed",
                      "look up the version of OpenShift AI in the dashboard: 3.0 or newer is needed")  # fmt: skip
    else:
        message = f"{address}, version {version}; {OLDEST_SERVER} or newer is needed"
        yield (
            Finding(check, BLOCKS, message, "update OpenShift AI to 3.0 or newer")
            if too_old
            else Finding(check, OK, message)
        )


def _training_jobs(cluster: KubernetesClient, recipe: Recipe) -> Iterator[Finding]:
    """Check the kind of job that the launcher would create, and who is allowed to do what with it.

    In a step of a run, this account is the runner. At a terminal, a person asks about the runner and about themselves.
    """
    kinds = [kind for name, kind in JOB_KINDS.items() if recipe.resources.job_kind in ("auto", name)]
    installed = [kind for kind in kinds if find_kind(cluster, kind)]
    if not installed:
        yield Finding("training job", BLOCKS, f"the cluster has no {' and no '.join(kind.KIND for kind in kinds)}",
                      "enable the component trainingoperator, or trainer: oc edit datasciencecluster")  # fmt: skip
        return
    runner = _runner(cluster)
    user = None if cluster.in_pod else f"system:serviceaccount:{cluster.namespace}:{runner}"
    try:
        missing = [(kind, _missing(cluster, VERBS, kind, user)) for kind in installed]
        kind, refused = next((each for each in missing if not each[1]), missing[0])
        refused += [
            f"{verb} {resource}"
            for verb, resource in (("list", "pods"), ("get", "pods/log"))
            if not cluster.may(verb, "", resource, user)
        ]
    except client.ApiException as error:
        if user is None or error.status != 403:
            raise
        kind, refused = installed[0], None
    yield Finding("training job", OK, f"{kind.KIND} is available")
    check = "permissions of the runner"
    if refused is None:
        yield Finding(check, UNKNOWN, f"you are not allowed to ask about {runner}; the first step of a run checks them")
    elif refused:
        yield Finding(check, BLOCKS, f"{runner} is not allowed to {', '.join(refused)} in {cluster.namespace}",
                      f"{ASK_CLUSTER_ADMIN}, with {cluster.namespace} and {runner} in "
                      f"deploy/project/kustomization.yaml")  # fmt: skip
    else:
        yield Finding(check, OK, f"{runner} may create, follow and delete training jobs")
    if not cluster.in_pod:
        yield _person(cluster, kind)
    if kind is trainjob:
        yield _runtime(cluster)


def _person(cluster: KubernetesClient, kind: Any) -> Finding:
    """Check what cleaning up needs. Who is not allowed to do that can still start runs and end them."""
    if refused := _missing(cluster, PERSON_VERBS, kind):
        return Finding("your permissions", WARNING,
                       f"you are not allowed to {', '.join(refused)} in {cluster.namespace}: submitting, watching and "
                       f"`pipeline.py --cancel` work, because a run's last step deletes its job; `tailtune cancel` and "
                       f"`tailtune gc` do not", ASK_CLUSTER_ADMIN)  # fmt: skip
    return Finding("your permissions", OK, "you may see and delete training jobs")


def _missing(cluster: KubernetesClient, verbs: Sequence[str], kind: Any, user: str | None = None) -> list[str]:
    """Return what this account, or `user`, is not allowed to do with jobs of a kind. Raises client.ApiException."""
    return [f"{verb} {kind.PLURAL}" for verb in verbs if not cluster.may(verb, kind.GROUP, kind.PLURAL, user)]


def _runner(cluster: KubernetesClient) -> str:
    """Return the name of the steps' service account."""
    if cluster.in_pod:
        api = client.AuthenticationV1Api(cluster.core.api_client)
        review = cluster.call(lambda: api.create_self_subject_review(client.V1SelfSubjectReview()))
        return str(review.status.user_info.username).rpartition(":")[2]
    try:
        names = [server["metadata"]["name"] for server in _pipeline_servers(cluster)]
    except client.ApiException as error:
        if error.status == 404:
            return RUNNER
        names = []
    return f"{RUNNER}-{names[0] if names else 'dspa'}"


def _runtime(cluster: KubernetesClient) -> Finding:
    """Check the ClusterTrainingRuntime that a TrainJob would use."""
    try:
        name = trainjob.find_runtime(cluster)
    except client.ApiException as error:
        if error.status != 403:
            raise
        return _unread("runtime", error.status, ASK_CLUSTER_ADMIN)
    if name is None:
        names = " and no ".join(trainjob.RUNTIMES)
        return Finding("runtime", BLOCKS, f"there is no ClusterTrainingRuntime {names}",
                       "enable the component trainer: oc edit datasciencecluster")  # fmt: skip
    return Finding("runtime", OK, f"{name} is available, and will be used")


def _volumes(cluster: KubernetesClient, recipe: Recipe) -> Iterator[Finding]:
    claims, num_nodes = recipe.cluster, recipe.resources.num_nodes
    mount_paths = {
        claims.data_claim: MOUNTS["data_dir"],
        claims.models_claim: MOUNTS["models_dir"],
        claims.workspace_claim: MOUNTS["workspace_dir"],
    }
    for name, path in mount_paths.items():
        check = f"volume {name}"
        claim = _read(cluster, cluster.core.read_namespaced_persistent_volume_claim, name)
        if isinstance(claim, int):
            yield _unread(check, claim, "oc apply -k deploy/")
            continue
        modes, phase = claim.spec.access_modes or [], claim.status.phase
        size = (claim.status.capacity or claim.spec.resources.requests or {}).get("storage", "?")
        if phase == "Lost":
            yield Finding(check, BLOCKS, "has lost its volume", f"oc delete pvc {name}; oc apply -k deploy/")
        elif num_nodes > 1 and "ReadWriteMany" not in modes:
            message = f"is {', '.join(modes)}, and {num_nodes} nodes need ReadWriteMany"
            yield Finding(check, BLOCKS, message, "give it a class with ReadWriteMany in deploy/")
        elif "ReadWriteMany" not in modes and HOSTNAME not in recipe.resources.node_selector:
            node = (claim.metadata.annotations or {}).get(SELECTED_NODE, "NAME (oc get nodes)")
            message = f"is {', '.join(modes)}: steps and training wait forever if they are scheduled on different nodes"
            one_node = f"-p 'resources.node_selector={{{HOSTNAME}: {node}}}'"
            fix = f"put all on one node with {one_node}, or give it a class with ReadWriteMany in deploy/"
            yield Finding(check, BLOCKS, message, fix)
        else:
            free = f", {shutil.disk_usage(path).free / GIGABYTE:.0f} GB free" if Path(path).is_dir() else ""
            yield Finding(check, OK, f"{phase}, {size}, {', '.join(modes)}{free}")


def _queue(cluster: KubernetesClient, recipe: Recipe, groups: Sequence[client.V1APIGroup]) -> Iterator[Finding]:
    name = recipe.resources.queue
    kueue = next((group for group in groups if group.name == "kueue.x-k8s.io"), None)
    if not name:
        if kueue:
            yield Finding("queue", WARNING, "the cluster has Kueue, and the run names no queue",
                          "oc get localqueue; then -p queue=NAME")  # fmt: skip
        return
    version = kueue.versions[0].version if kueue else "v1beta1"
    queue = _read(cluster, lambda name, namespace: cluster.custom.get_namespaced_custom_object(
        "kueue.x-k8s.io", version, namespace, "localqueues", name), name)  # fmt: skip
    if queue == 404 and not kueue:
        yield Finding(f"queue {name}", WARNING, "the cluster has no Kueue, so the job does not queue", "-p queue=")
    elif isinstance(queue, int):
        yield _unread(f"queue {name}", queue, "oc get localqueue; then -p queue=NAME")
    else:
        yield Finding(f"queue {name}", OK, "the LocalQueue is available")


def _quota(cluster: KubernetesClient, recipe: Recipe) -> Iterator[Finding]:
    """Check that the job's pods fit next to the step that waits for them, and that no container is too large.

    Needing more than the limit blocks; needing more than is free now is a warning.
    """
    resources, num_nodes = recipe.resources, recipe.resources.num_nodes
    needs = {  # of one pod of the job, and of the step, by the names of quotas
        "pods": ("1", "1"),
        "requests.cpu": (resources.cpu_request, resources.step_cpu_request),
        "cpu": (resources.cpu_request, resources.step_cpu_request),
        "limits.cpu": (resources.cpu, resources.step_cpu),
        "requests.memory": (resources.memory_request, resources.step_memory_request),
        "memory": (resources.memory_request, resources.step_memory_request),
        "limits.memory": (resources.memory, resources.step_memory),
    }
    if resources.gpu:
        needs[f"requests.{resources.gpu}"] = str(resources.ranks_per_node), "0"
    quotas = _read(cluster, lambda _, namespace: cluster.core.list_namespaced_resource_quota(namespace), "")
    if isinstance(quotas, int):
        yield _unread("quota", quotas, f"oc get resourcequota -n {cluster.namespace}")
        return
    short: dict[str, str] = {}  # message → status
    for quota in quotas.items:
        if quota.spec and (quota.spec.scopes or quota.spec.scope_selector):  # applies to some pods, maybe not to ours
            continue
        hard, used = quota.status.hard or {}, quota.status.used or {}
        for name, (per_pod, per_step) in needs.items():
            if name not in hard:
                continue
            need, limit = num_nodes * parse_quantity(per_pod) + parse_quantity(per_step), parse_quantity(hard[name])
            if need > limit - parse_quantity(used.get(name, "0")):
                step = "" if per_step == "0" else f" and {per_step} for the step"
                message = f"{name}: {num_nodes} x {per_pod}{step} needed, {used.get(name, '0')} of {hard[name]} used"
                short[message] = BLOCKS if need > limit else WARNING
    if short:
        yield Finding("quota", BLOCKS if BLOCKS in short.values() else WARNING, "; ".join(short),
                      "free some, ask for more, or lower -p num_nodes= and resources.*")  # fmt: skip
    else:
        yield Finding("quota", OK, f"room for {num_nodes} pods" if quotas.items else "the project has none")
    yield from _limit_ranges(cluster, recipe)


def _limit_ranges(cluster: KubernetesClient, recipe: Recipe) -> Iterator[Finding]:
    """Check the largest container that the project allows. Not its defaults: all containers of tailtune have limits.

    An account that may not read limit ranges is not a finding: they are rare.
    """
    ranges = _read(cluster, lambda _, namespace: cluster.core.list_namespaced_limit_range(namespace), "")
    if isinstance(ranges, int):
        return
    for limit in (each for item in ranges.items for each in item.spec.limits if each.type in ("Container", "Pod")):
        for resource in ("cpu", "memory"):
            asked = max(getattr(recipe.resources, resource), getattr(recipe.resources, f"step_{resource}"),
                        key=parse_quantity)  # fmt: skip
            largest = (limit.max or {}).get(resource)
            if largest and parse_quantity(asked) > parse_quantity(largest):
                message = f"a {limit.type.lower()} may have at most {largest} of {resource}, and {asked} are asked for"
                fix = f"lower -p resources.{resource}= and resources.step_{resource}=, or ask for more"
                yield Finding("limit range", BLOCKS, message, fix)


def _secrets(cluster: KubernetesClient, recipe: Recipe) -> Iterator[Finding]:
    """Check names and keys; values are not read. A missing secret does not stop a run: access may not need it."""
    names = recipe.cluster
    secrets = (
        ("hf_secret", names.hf_secret, "token", "gated or private models and data sets", False),
        ("s3_secret", names.s3_secret, "AWS_ACCESS_KEY_ID", "data on S3", recipe.data.source.startswith("s3://")),
        ("ca_secret", names.ca_secret, "ca-bundle.crt", "servers with certificates of your own", False),
    )
    for parameter, name, key, purpose, needed in secrets:
        check = f"secret {name}"
        create = (
            f"oc create secret generic NAME --from-file={key}=FILE -n {cluster.namespace}; then -p {parameter}=NAME"
        )
        secret = _read(cluster, cluster.core.read_namespaced_secret, name)
        if secret == 404:
            yield Finding(
                check, WARNING if needed else OK, f"not found; needed for {purpose}", create if needed else ""
            )
        elif isinstance(secret, int):
            yield _unread(check, secret, create)
        elif key not in (secret.data or {}):
            yield Finding(check, WARNING, f"has no key {key}, so it is of no use for {purpose}", create)
        else:
            yield Finding(check, OK, f"found, with key {key}")


def _images(cluster: KubernetesClient, images: Sequence[str], is_openshift: bool) -> Iterator[Finding]:
    """Check the images in OpenShift's own registry. Others cannot be checked before a pod pulls them.

    A name without a registry is that of an image in the run's own project, if its image stream has a local look-up.
    """
    for image in images:
        path = image.removeprefix(INTERNAL_REGISTRY)
        is_short = "/" not in image
        namespace, _, name = (cluster.namespace, "", image) if is_short else path.partition("/")
        stream = name.partition(":")[0]
        check = f"image {stream.rpartition('/')[2]}"
        if (path == image and not is_short) or "/" in name or "@" in name or ":" not in name:
            yield Finding(check, OK, f"{image}: not checked; only tagged images in the cluster's own registry can be")
            continue
        if not is_openshift:
            option = "-p pipeline_image=… -p trainer_image=…" if cluster.in_pod else "--image-registry REGISTRY/PROJECT"
            status = WARNING if cluster.in_pod else BLOCKS  # the nodes may have it, as they have that of this step
            yield Finding(check, status, f"{image} names no registry of this cluster, which is not OpenShift", option)
            continue
        tag = _read(cluster, lambda name, namespace: cluster.custom.get_namespaced_custom_object(
            "image.openshift.io", "v1", namespace, "imagestreamtags", name), name, namespace)  # fmt: skip
        if tag == 404:
            build = f"oc start-build {stream} --from-repo=. --follow -n {namespace}"
            yield Finding(check, BLOCKS, "is not built", build)
        elif isinstance(tag, int):
            yield _unread(check, tag, f"oc get istag -n {namespace}")
        elif is_short and not (tag.get("lookupPolicy") or {}).get("local"):
            yield Finding(check, BLOCKS, f"pods do not find it as {name}: its image stream has no local look-up",
                          f"oc set image-lookup {stream} -n {namespace}")  # fmt: skip
        else:
            yield Finding(check, OK, f"{name} is in project {namespace}")


def _read(cluster: KubernetesClient, read: Callable[[str, str], Any], name: str, namespace: str | None = None) -> Any:
    """Return `read(name, namespace)`, or the status 4xx with which the API refuses it."""
    try:
        return cluster.call(lambda: read(name, namespace or cluster.namespace))
    except client.ApiException as error:
        if 400 <= error.status < 500:
            return error.status
        raise


def _unread(check: str, status: int, fix: str) -> Finding:
    if status == 404:
        return Finding(check, BLOCKS, "does not exist", fix)
    return Finding(check, UNKNOWN, "this account is not allowed to read it: not checked", fix)
