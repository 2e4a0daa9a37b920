"""What would stop a run of a recipe in a project on a cluster. Only reads."""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
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
from tailtune.recipe.schema import Recipe, Resources
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
ON_KUBERNETES = (
    (r"enable the component trainingoperator, or trainer: .*", "install the Training Operator or Kubeflow Trainer"),
    (r"enable the component trainer: .*", "install the runtimes of Kubeflow Trainer"),
    (r"apply -k deploy/cluster-admin/", "apply -k deploy/overlays/kubernetes/cluster-admin"),
    (r"apply -k deploy/$", "apply -k deploy/overlays/kubernetes"),
    (r"deploy/project/", "deploy/overlays/kubernetes/project/"),
    (r"\boc (?=[a-z])", "kubectl "),
)
"""What to write instead of fixes for OpenShift, in order: patterns and replacements."""
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
    found = chain(
        _pipeline_server(cluster, is_openshift),
        _training_jobs(cluster, recipe),
        _volumes(cluster, recipe),
        _queue(cluster, recipe, groups),
        _quota(cluster, recipe),
        _secrets(cluster, recipe),
        _images(cluster, images, is_openshift),
    )
    yield from found if is_openshift else map(_for_kubernetes, found)


def _for_kubernetes(finding: Finding) -> Finding:
    """The finding with the fix for a cluster that is not OpenShift."""
    fix = finding.fix
    for pattern, plain in ON_KUBERNETES:
        fix = re.sub(pattern, plain, fix)
    return replace(finding, fix=fix)


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
                      "oc apply -k deploy/components/pipeline-server/s3/, or dashboard: the project, Pipelines, "
                      "Configure pipeline server; then oc get dspa")  # fmt: skip
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
        may_list_runs = cluster.may("list", "argoproj.io", "workflows", user)
    except client.ApiException as error:
        if user is None or error.status != 403:
            raise
        kind, refused, may_list_runs = installed[0], None, True
    yield Finding("training job", OK, f"{kind.KIND} is available")
    check = "permissions of the runner"
    remedy = f"{ASK_CLUSTER_ADMIN}, with {cluster.namespace} and {runner} in deploy/project/kustomization.yaml"
    if refused is None:
        yield Finding(check, UNKNOWN, f"you are not allowed to ask about {runner}; the first step of a run checks them")
    elif refused:
        yield Finding(check, BLOCKS, f"{runner} is not allowed to {', '.join(refused)} in {cluster.namespace}", remedy)
    else:
        yield Finding(check, OK, f"{runner} may create, follow and delete training jobs")
    if not may_list_runs:
        yield Finding(check, WARNING, f"{runner} is not allowed to list workflows in {cluster.namespace}: a second run "
                      "of a name is not refused, and the drain of a step ends its training", remedy)  # fmt: skip
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
    claims, jobs = recipe.cluster, [recipe.resources_of(stage) for stage in recipe.stages]
    num_nodes = max(job.num_nodes for job in jobs)
    pinned_to = {each.node_selector.get(HOSTNAME) for each in (recipe.resources, *jobs)}
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
        elif "ReadWriteMany" not in modes and (None in pinned_to or len(pinned_to) > 1):
            node = (claim.metadata.annotations or {}).get(SELECTED_NODE, "NAME (oc get nodes)")
            message = f"is {', '.join(modes)}: steps and training wait forever if they are scheduled on different nodes"
            keys = {"resources.node_selector", *(recipe.resource_key(i, "node_selector") for i in range(len(jobs)))}
            one_node = " ".join(f"-p '{key}={{{HOSTNAME}: {node}}}'" for key in sorted(keys))
            fix = f"put all on one node with {one_node}, or give it a class with ReadWriteMany in deploy/"
            yield Finding(check, BLOCKS, message, fix)
        else:
            free = f", {shutil.disk_usage(path).free / GIGABYTE:.0f} GB free" if Path(path).is_dir() else ""
            yield Finding(check, OK, f"{phase}, {size}, {', '.join(modes)}{free}")


def _queue(cluster: KubernetesClient, recipe: Recipe, groups: Sequence[client.V1APIGroup]) -> Iterator[Finding]:
    kueue = next((group for group in groups if group.name == "kueue.x-k8s.io"), None)
    for name in sorted({each.queue for each in (recipe.resources, *map(recipe.resources_of, recipe.stages))}):
        if name:
            yield _queue_named(cluster, name, kueue)
        elif kueue:
            yield Finding("queue", WARNING, "the cluster has Kueue, and the run names no queue",
                          "oc get localqueue; then -p queue=NAME")  # fmt: skip


def _queue_named(cluster: KubernetesClient, name: str, kueue: client.V1APIGroup | None) -> Finding:
    version = kueue.versions[0].version if kueue else "v1beta1"
    queue = _read(cluster, lambda name, namespace: cluster.custom.get_namespaced_custom_object(
        "kueue.x-k8s.io", version, namespace, "localqueues", name), name)  # fmt: skip
    if queue == 404 and not kueue:
        return Finding(f"queue {name}", WARNING, "the cluster has no Kueue, so the job does not queue", "-p queue=")
    if isinstance(queue, int):
        return _unread(f"queue {name}", queue, "oc get localqueue; then -p queue=NAME")
    return Finding(f"queue {name}", OK, "the LocalQueue is available")


def _quota(cluster: KubernetesClient, recipe: Recipe) -> Iterator[Finding]:
    """Check that a job's pods fit next to the step that waits for them, and that no container is too large.

    Of the stages' jobs, which run one after the other, and a step that loads models, the one that needs most counts.
    Needing more than the limit blocks; needing more than is free now is a warning.
    """
    resources, jobs = recipe.resources, [recipe.resources_of(stage) for stage in recipe.stages]
    waiting = _pod_needs(resources, "step_")
    alternatives = [(job.num_nodes, _pod_needs(job, num_gpus=job.ranks_per_node), waiting) for job in jobs]
    alternatives.append((1, _pod_needs(resources, num_gpus=1), {}))
    quotas = _read(cluster, lambda _, namespace: cluster.core.list_namespaced_resource_quota(namespace), "")
    if isinstance(quotas, int):
        yield _unread("quota", quotas, f"oc get resourcequota -n {cluster.namespace}")
        return
    short: dict[str, str] = {}  # message → status
    counted: set[str] = set()
    for quota in quotas.items:
        if quota.spec and (quota.spec.scopes or quota.spec.scope_selector):  # applies to some pods, maybe not to ours
            continue
        hard, used = quota.status.hard or {}, quota.status.used or {}
        counted |= {name for name in hard if name in waiting and name.endswith(("cpu", "memory"))}
        for name in hard:
            if not any(name in pod for _, pod, _ in alternatives):
                continue
            need, number, per_pod, per_step = max(
                (number * parse_quantity(pod.get(name, "0")) + parse_quantity(step.get(name, "0")), number,
                 pod.get(name, "0"), step.get(name, "0"))
                for number, pod, step in alternatives
            )  # fmt: skip
            limit = parse_quantity(hard[name])
            if need > limit - parse_quantity(used.get(name, "0")):
                step = "" if per_step == "0" else f" and {per_step} for the step"
                message = f"{name}: {number} x {per_pod}{step} needed, {used.get(name, '0')} of {hard[name]} used"
                short[message] = BLOCKS if need > limit else WARNING
    if short:
        yield Finding("quota", BLOCKS if BLOCKS in short.values() else WARNING, "; ".join(short),
                      "free some, ask for more, or lower -p num_nodes= and resources.*")  # fmt: skip
    else:
        num_pods = max(job.num_nodes for job in jobs)
        yield Finding("quota", OK, f"room for {num_pods} pods" if quotas.items else "the project has none")
    yield from _limit_ranges(cluster, recipe, counted)


def _pod_needs(resources: Resources, prefix: str = "", *, num_gpus: int = 0) -> dict[str, str]:
    """What a pod takes of quotas, by their names."""
    cpu, cpu_request, memory, memory_request = (
        getattr(resources, prefix + name) for name in ("cpu", "cpu_request", "memory", "memory_request")
    )
    return {
        "pods": "1", "requests.cpu": cpu_request, "cpu": cpu_request, "limits.cpu": cpu,
        "requests.memory": memory_request, "memory": memory_request, "limits.memory": memory,
        **({f"requests.{resources.gpu}": str(num_gpus)} if resources.gpu and num_gpus else {}),
    }  # fmt: skip


def _limit_ranges(cluster: KubernetesClient, recipe: Recipe, counted: Collection[str]) -> Iterator[Finding]:
    """Check the containers of the steps and of the job, and the defaults for what quotas count (`limits.cpu`).

    All containers of tailtune have requests and limits. Those that Argo adds to a step have none on OpenShift AI
    (data-science-pipelines-operator, config/internal/workflow-controller/configmap.yaml.tmpl), and where a quota counts
    them, the API server refuses the pod. A step that runs has been admitted. An account that may not read limit ranges
    is not a finding: they are rare. Source of the rules: kubernetes, plugin/pkg/admission/limitranger/admission.go,
    PodValidateLimitFunc.
    """
    ranges = _read(cluster, lambda _, namespace: cluster.core.list_namespaced_limit_range(namespace), "")
    if isinstance(ranges, int):
        return
    defaults: set[str] = set()
    for limit in (each for item in ranges.items for each in item.spec.limits if each.type == "Container"):
        for name in {**(limit.default or {}), **(limit.default_request or {})}:
            defaults |= {f"requests.{name}", name}
        defaults |= {f"limits.{name}" for name in limit.default or {}}
    if (missing := sorted(set(counted) - defaults)) and not cluster.in_pod:
        yield Finding("limit range", WARNING,
                      f"a quota counts {', '.join(missing)}, and the project has no defaults for containers: the pods "
                      "of all steps are refused, unless Argo is set up to give its own containers resources",
                      "ask for a LimitRange with default and defaultRequest of type Container")  # fmt: skip
    for limit in (each for item in ranges.items for each in item.spec.limits if each.type in ("Container", "Pod")):
        for resource, (limit_key, most), (request_key, request) in recipe.container_sizes():
            kind = limit.type.lower()
            largest, smallest, ratio = (
                (values or {}).get(resource) for values in (limit.max, limit.min, limit.max_limit_request_ratio)
            )
            if limit.type == "Pod":  # the sidecars of a step count as well
                smallest = ratio = None
            if largest and parse_quantity(most) > parse_quantity(largest):
                message = f"a {kind} may have at most {largest} of {resource}, and {most} are asked for"
                yield Finding("limit range", BLOCKS, message, f"lower -p {limit_key}=, or ask for more")
            if smallest and parse_quantity(request) < parse_quantity(smallest):
                message = f"a {kind} must request at least {smallest} of {resource}, and {request} are requested"
                yield Finding("limit range", BLOCKS, message, f"raise -p {request_key}=")
            if ratio and parse_quantity(most) > parse_quantity(request) * parse_quantity(ratio):
                message = f"a {kind}'s {resource} limit may be at most {ratio} times its request: {most} for {request}"
                yield Finding("limit range", BLOCKS, message, f"raise -p {request_key}=")


def _secrets(cluster: KubernetesClient, recipe: Recipe) -> Iterator[Finding]:
    """Check names and keys; values are not read. A missing secret does not stop a run: access may not need it."""
    names = recipe.cluster
    needs_s3 = any(source.startswith("s3://") for source in recipe.data.all_sources)
    secrets = (
        ("hf_secret", names.hf_secret, "token", "gated or private models and data sets", False),
        ("s3_secret", names.s3_secret, "AWS_ACCESS_KEY_ID", "data on S3", needs_s3),
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
