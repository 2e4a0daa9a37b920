"""deploy/: what `oc apply -k` would send, checked without a cluster, and the training pods that run next to it."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from admission import violations
from http_server import Refused, check_fields
from kubernetes.client import ApiClient, models

import tailtune
from tailtune.doctor.cluster import RUNNER
from tailtune.jobs.job import Job
from tailtune.jobs.pods import pod_template
from tailtune.jobs.train_step import make_job
from tailtune.recipe.schema import ClusterNames
from tailtune.run import Run

Manifest = dict[str, Any]
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: ten times as fast
ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OWN_PROJECT, KUBERNETES = DEPLOY / "overlays/own-project", DEPLOY / "overlays/kubernetes"

# ---- the part of kustomize that deploy/ uses --------------------------------------------------------

KEYS = {"apiVersion", "kind", "resources", "components", "labels", "patches", "transformers"}
CLUSTER_SCOPED = ("ClusterRole", "ClusterRoleBinding")


def kustomization(folder: Path) -> str:
    return (folder / "kustomization.yaml").read_text()


def documents(path: Path) -> list[Manifest]:
    return list(yaml.load_all(path.read_text(), Loader=LOADER))


def references(folder: Path) -> Iterator[Path]:
    """Every file that a kustomization refers to, including itself."""
    yield folder / "kustomization.yaml"
    parsed = yaml.load(kustomization(folder), Loader=LOADER)
    for entry in [*parsed.get("resources", []), *parsed.get("components", [])]:
        path = (folder / entry).resolve()
        yield from references(path) if path.is_dir() else [path]


def render(folder: Path, earlier: Sequence[Manifest] = ()) -> list[Manifest]:
    """What `kustomize build` would print for the folder. Features that are not implemented here are refused.

    A component also changes the manifests of what is listed before it, which are `earlier`.
    """
    parsed = yaml.load(kustomization(folder), Loader=LOADER)
    assert set(parsed) <= KEYS
    manifests = list(earlier)
    for entry in parsed.get("resources", []):
        path = (folder / entry).resolve()
        manifests += render(path) if path.is_dir() else documents(path)
    for entry in parsed.get("components", []):
        manifests = render((folder / entry).resolve(), manifests)
    for patch in parsed.get("patches", []):
        for manifest in of_kind(manifests, patch["target"]["kind"]):
            if patch["target"].get("name") in (None, manifest["metadata"]["name"]):
                for operation in yaml.safe_load(patch["patch"]):
                    change(manifest, operation)
    for labels in parsed.get("labels", []):
        assert set(labels) == {"pairs"}  # selectors stay as they are
        for manifest in manifests:
            manifest["metadata"].setdefault("labels", {}).update(labels["pairs"])
    for text in parsed.get("transformers", []):
        transformer = yaml.safe_load(text)
        kind = transformer["kind"], transformer["setRoleBindingSubjects"]
        assert kind == ("NamespaceTransformer", "allServiceAccounts")
        for manifest in manifests:
            named = [subject for subject in manifest.get("subjects", []) if subject["kind"] == "ServiceAccount"]
            for place in [*([manifest["metadata"]] if manifest["kind"] not in CLUSTER_SCOPED else []), *named]:
                place["namespace"] = transformer["metadata"]["namespace"]
    return manifests


def change(manifest: Any, operation: Manifest) -> None:
    """Apply an operation of a JSON patch."""
    *parents, key = operation["path"].strip("/").split("/")
    for parent in parents:
        manifest = manifest[int(parent) if isinstance(manifest, list) else parent]
    assert operation["op"] == "add" or (operation["op"] == "replace" and key in manifest)
    manifest[key] = operation["value"]


PROJECTS = {
    DEPLOY: ("lyric-professor", "ocs-storagecluster-cephfs", "pipeline-runner-dspa"),
    OWN_PROJECT: ("own-project", "efs-sc", "pipeline-runner-dspa"),
    KUBERNETES: ("kubeflow", "nfs-client", "pipeline-runner"),
}
"""What an administrator of a project applies, with its name, its storage class and the service account of the steps."""
PIPELINE_SERVERS = [DEPLOY / "components/pipeline-server" / store for store in ("s3", "minio")]
ENTRIES = [*PROJECTS, *(folder / "cluster-admin" for folder in PROJECTS), DEPLOY / "base", *PIPELINE_SERVERS]
"""Every folder that `oc apply -k` is given."""


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(request.param)


everywhere = pytest.mark.parametrize("manifests", ENTRIES, indirect=True, ids=name_of)
in_projects = pytest.mark.parametrize("folder", PROJECTS, ids=name_of)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl renders kustomizations; it is not installed")
@pytest.mark.parametrize("folder", ENTRIES, ids=name_of)
def test_kubectl_renders_the_same(folder: Path) -> None:
    process = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr

    def order(manifest: Manifest) -> tuple[str, str]:
        return manifest["kind"], manifest["metadata"]["name"]

    assert sorted(yaml.safe_load_all(process.stdout), key=order) == sorted(render(folder), key=order)


# ---- files ------------------------------------------------------------------------------------------


def test_every_file_is_used_and_every_reference_exists() -> None:
    used = {path for entry in ENTRIES for path in references(entry)}
    used.add(DEPLOY / "inspect-pod.yaml")  # applied by itself
    assert used == {path for path in DEPLOY.rglob("*") if path.is_file()}


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_document_has_a_kind_and_no_image_is_tagged_latest(path: Path) -> None:
    assert all(document["apiVersion"] and document["kind"] for document in documents(path))
    assert ":latest" not in path.read_text()


# ---- fields -----------------------------------------------------------------------------------------

RBAC = "rbac.authorization.k8s.io/v1"
PIPELINE_SERVER = "DataSciencePipelinesApplication"
MODELS = {
    ("v1", "PersistentVolumeClaim"): "V1PersistentVolumeClaim",
    ("v1", "ServiceAccount"): "V1ServiceAccount",
    ("networking.k8s.io/v1", "NetworkPolicy"): "V1NetworkPolicy",
    (RBAC, "Role"): "V1Role",
    (RBAC, "RoleBinding"): "V1RoleBinding",
    (RBAC, "ClusterRole"): "V1ClusterRole",
    (RBAC, "ClusterRoleBinding"): "V1ClusterRoleBinding",
}
QUANTITIES = {"cpu": str, "memory": str}
DESCRIPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    # field → type or fields; `!` marks a required one
    ("image.openshift.io/v1", "ImageStream"): {"tags!": [{"name!": str}], "lookupPolicy": {"local!": bool}},
    ("build.openshift.io/v1", "BuildConfig"): {
        "source!": {"type!": str, "binary!": {}},
        "strategy!": {
            "type!": str,
            "dockerStrategy!": {"dockerfilePath!": str, "buildArgs": [{"name!": str, "value!": str}]},
        },
        "output!": {"to!": {"kind!": str, "name!": str}},
        "resources": {"requests": QUANTITIES, "limits": QUANTITIES},
        "completionDeadlineSeconds": int,
        "successfulBuildsHistoryLimit": int,
        "failedBuildsHistoryLimit": int,
    },
    ("kueue.x-k8s.io/v1beta1", "LocalQueue"): {"clusterQueue!": str},
    # opendatahub-io/data-science-pipelines-operator, api/v1/dspipeline_types.go
    ("datasciencepipelinesapplications.opendatahub.io/v1", "DataSciencePipelinesApplication"): {
        "dspVersion": str,
        "objectStorage!": {
            "externalStorage": {
                "host!": str,
                "bucket!": str,
                "scheme!": str,
                "region": str,
                "s3CredentialsSecret!": {"secretName!": str, "accessKey!": str, "secretKey!": str},
            },
            "minio": {"image!": str, "pvcSize": str},
        },
    },
}
"""The fields that deploy/ uses of kinds that the `kubernetes` package does not model."""


def check_description(value: Any, description: Any, path: str) -> None:
    """Raise Refused for a field that is unknown, missing, or of another type."""
    if isinstance(description, list):
        if not isinstance(value, list) or not value:
            raise Refused(422, f"{path}: must be a list that is not empty")
        for i, item in enumerate(value):
            check_description(item, description[0], f"{path}[{i}]")
    elif isinstance(description, dict):
        if not isinstance(value, dict):
            raise Refused(422, f"{path}: must be an object")
        fields = {name.rstrip("!"): inner for name, inner in description.items()}
        for name in value:
            if name not in fields:
                raise Refused(400, f"{path}.{name}: unknown field")
            check_description(value[name], fields[name], f"{path}.{name}")
        for name in description:
            if name.endswith("!") and name.rstrip("!") not in value:
                raise Refused(422, f"{path}.{name.rstrip('!')}: Required value")
    elif not isinstance(value, description):
        raise Refused(422, f"{path}: Invalid value: {value!r}: must be {description.__name__}")


def check_manifest(manifest: Manifest) -> None:
    kind = manifest["apiVersion"], manifest["kind"]
    if kind in MODELS:
        check_fields(manifest, MODELS[kind], [models])
        ApiClient().deserialize(SimpleNamespace(data=json.dumps(manifest)), MODELS[kind])  # required fields
        return
    if set(manifest) != {"apiVersion", "kind", "metadata", "spec"}:
        raise Refused(400, f"{kind[1]}: has {sorted(manifest)}")
    check_fields(manifest["metadata"], "V1ObjectMeta", [models], "metadata")
    check_description(manifest["spec"], DESCRIPTIONS[kind], "spec")


@everywhere
def test_all_fields_are_known_and_none_is_missing(manifests: list[Manifest]) -> None:
    assert manifests
    for manifest in manifests:
        check_manifest(manifest)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("PersistentVolumeClaim", lambda m: m["spec"].update(storageClass="x"), "unknown field"),
        ("NetworkPolicy", lambda m: m["spec"].pop("podSelector"), "must not be `None`"),
        ("RoleBinding", lambda m: m["roleRef"].pop("name"), "must not be `None`"),
        ("BuildConfig", lambda m: m["spec"]["strategy"]["dockerStrategy"].update(dockerfile="x"), "unknown field"),
        ("ImageStream", lambda m: m["spec"]["tags"][0].update(name=0.1), "must be str"),
        ("LocalQueue", lambda m: m["spec"].clear(), "Required value"),
        (PIPELINE_SERVER, lambda m: m["spec"].update(storage={}), "unknown field"),
        (PIPELINE_SERVER, lambda m: m["spec"]["objectStorage"]["minio"].pop("image"), "Required value"),
    ],
    ids=["claim", "policy", "binding", "build", "stream", "queue", "server", "server without image"],
)
def test_the_field_check_refuses(kind: str, change: Callable[[Manifest], None], message: str) -> None:
    folders = (OWN_PROJECT, OWN_PROJECT / "cluster-admin", PIPELINE_SERVERS[-1])
    manifest = of_kind([manifest for folder in folders for manifest in render(folder)], kind)[0]
    change(manifest)
    with pytest.raises((Refused, ValueError), match=message):
        check_manifest(manifest)


@everywhere
def test_every_object_has_the_standard_labels_and_a_unique_name(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        labels = manifest["metadata"]["labels"]
        for name in AGGREGATED:
            labels.pop(name, None)
        assert labels.pop("app.kubernetes.io/component")
        assert labels == {"app.kubernetes.io/name": "tailtune", "app.kubernetes.io/part-of": "tailtune",
                          "app.kubernetes.io/managed-by": "kustomize"}  # fmt: skip
    assert len({(m["kind"], m["metadata"]["name"]) for m in manifests}) == len(manifests)


# ---- the objects ------------------------------------------------------------------------------------


def test_an_administrator_of_a_project_applies_only_what_they_may_create() -> None:
    """Roles and queues are left to an administrator of the cluster; the base has no kind that only OpenShift has."""
    kubernetes = {"PersistentVolumeClaim", "NetworkPolicy", "ServiceAccount"}
    for folder in (DEPLOY / "base", KUBERNETES):
        assert {manifest["kind"] for manifest in render(folder)} == kubernetes
    for folder in (DEPLOY, OWN_PROJECT):
        assert {manifest["kind"] for manifest in render(folder)} == {*kubernetes, "ImageStream", "BuildConfig"}


@in_projects
def test_a_project_of_any_name_needs_its_name_on_one_line(folder: Path) -> None:
    project, _, runner = PROJECTS[folder]
    lines = [line.strip() for path in folder.rglob("*.yaml") for line in path.read_text().splitlines()]
    settings = [line for line in lines if not line.startswith("#")]
    assert settings.count(f"namespace: {project}") == 1
    if folder == DEPLOY:
        assert sum(project in line for line in lines) == 1
    manifests = render(folder) + render(folder / "cluster-admin")
    assert {m["metadata"]["namespace"] for m in manifests if m["kind"] not in CLUSTER_SCOPED} == {project}
    [binding] = of_kind(manifests, "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": runner, "namespace": project}]


@in_projects
def test_the_claims_are_those_of_the_recipes_and_several_nodes_can_write(folder: Path) -> None:
    claims = of_kind(render(folder), "PersistentVolumeClaim")
    expected = ClusterNames()
    assert {c["metadata"]["name"] for c in claims} == {
        expected.data_claim, expected.models_claim, expected.workspace_claim,
    }  # fmt: skip
    for claim in claims:
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        assert claim["spec"]["storageClassName"] == PROJECTS[folder][1]


def test_a_pipeline_server_has_one_store_and_the_account_that_deploy_names() -> None:
    """The operator takes externalStorage where both are given: controllers/dspipeline_params.go, SetupObjectParams."""
    for folder, store in zip(PIPELINE_SERVERS, ("externalStorage", "minio"), strict=True):
        [server] = of_kind(render(folder), PIPELINE_SERVER)
        assert set(server["spec"]["objectStorage"]) == {store}
        assert f"{RUNNER}-{server['metadata']['name']}" == PROJECTS[DEPLOY][2]
        assert "namespace" not in server["metadata"]  # that of the login


def test_the_images_are_built_and_found_by_their_short_names() -> None:
    manifests = render(DEPLOY)
    outputs = [build["spec"]["output"]["to"] for build in of_kind(manifests, "BuildConfig")]
    assert {to["kind"] for to in outputs} == {"ImageStreamTag"}
    built = {f"tailtune-{image}:{tailtune.__version__}" for image in ("pipeline", "trainer")}
    streams = of_kind(manifests, "ImageStream")
    tags = {f"{stream['metadata']['name']}:{tag['name']}" for stream in streams for tag in stream["spec"]["tags"]}
    assert tags == {to["name"] for to in outputs} == built
    assert all(stream["spec"]["lookupPolicy"] == {"local": True} for stream in streams)
    [pod] = documents(DEPLOY / "inspect-pod.yaml")
    assert {container["image"] for container in pod["spec"]["containers"]} <= built  # in any project


@pytest.mark.parametrize("folder", [DEPLOY, OWN_PROJECT], ids=name_of)
def test_builds_read_their_containerfile_from_the_repositorys_root(folder: Path) -> None:
    for build in of_kind(render(folder), "BuildConfig"):
        source, strategy = build["spec"]["source"], build["spec"]["strategy"]
        assert (source["type"], strategy["type"]) == ("Binary", "Docker") and "contextDir" not in source
        image = build["metadata"]["name"].removeprefix("tailtune-")
        assert strategy["dockerStrategy"]["dockerfilePath"] == f"images/{image}/Containerfile"
        arguments = {argument["name"] for argument in strategy["dockerStrategy"].get("buildArgs", [])}
        assert arguments == ({"BASE_IMAGE"} if folder == OWN_PROJECT and image == "trainer" else set())


LAUNCH = {"create", "delete", "get", "list", "patch"}
CLEAN_UP = {"delete", "get", "list", "watch"}
AGGREGATED = {f"rbac.authorization.k8s.io/aggregate-to-{role}": "true" for role in ("edit", "admin")}


def granted(role: Manifest) -> dict[str, set[str]]:
    return {
        f"{group}/{resource}": set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_roles_grant_exactly_what_is_needed() -> None:
    roles = of_kind(render(DEPLOY / "cluster-admin"), "Role", "ClusterRole")
    assert {role["metadata"]["name"]: granted(role) for role in roles} == {
        "tailtune-runner": {
            "kubeflow.org/pytorchjobs": LAUNCH, "trainer.kubeflow.org/trainjobs": LAUNCH,
            "/pods": {"get", "list"}, "/pods/log": {"get"}, "/events": {"list"},
            "/serviceaccounts": {"get"}, "/limitranges": {"list"}, "/resourcequotas": {"list"},
            "kueue.x-k8s.io/localqueues": {"get"}, "image.openshift.io/imagestreamtags": {"get"},
            "argoproj.io/workflows": {"list"},
        },
        "tailtune-training-jobs": {
            "kubeflow.org/pytorchjobs": CLEAN_UP, "trainer.kubeflow.org/trainjobs": CLEAN_UP,
        },
        "tailtune-training-runtimes": {"trainer.kubeflow.org/clustertrainingruntimes": {"get", "list"}},
    }  # fmt: skip


def test_every_role_reaches_somebody_and_projects_do_not_take_roles_from_each_other() -> None:
    ours, theirs = (render(folder / "cluster-admin") for folder in (DEPLOY, OWN_PROJECT))
    bound = {binding["roleRef"]["name"] for binding in of_kind(ours, "RoleBinding", "ClusterRoleBinding")}
    roles = {role["metadata"]["name"]: role["metadata"]["labels"] for role in of_kind(ours, "Role", "ClusterRole")}
    assert bound | {name for name, labels in roles.items() if AGGREGATED.items() <= labels.items()} == set(roles)
    assert of_kind(ours, *CLUSTER_SCOPED) == of_kind(theirs, *CLUSTER_SCOPED)  # applying the second changes nothing


def test_the_optional_queue_refers_to_the_default_cluster_queue() -> None:
    [queue] = of_kind(render(OWN_PROJECT / "cluster-admin"), "LocalQueue")
    assert (queue["metadata"]["name"], queue["spec"]) == ("tailtune", {"clusterQueue": "default"})


# ---- the training pods ------------------------------------------------------------------------------


@pytest.fixture
def job(make_run: Callable[..., Run]) -> Job:
    run = make_run().model_copy(update={"local": False})
    job = make_job(run, run.parquet_dir, run.base_model_dir, run.models_dir / "recipe.json")
    assert job.pod is not None
    return replace(job, pod=replace(job.pod, queue="tailtune"))


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    assert set(selector) == {"matchLabels"}
    return selector["matchLabels"].items() <= labels.items()


def test_the_network_policy_lets_only_training_pods_reach_training_pods(job: Job) -> None:
    [policy] = of_kind(render(DEPLOY), "NetworkPolicy")
    spec, labels = policy["spec"], pod_template(job, "pytorch")["metadata"]["labels"]
    assert selects(spec["podSelector"], labels)
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"} and spec["egress"] == [{}]
    [rule] = spec["ingress"]
    assert set(rule) == {"from"}  # all ports
    [peer] = rule["from"]
    assert set(peer) == {"podSelector"} and peer["podSelector"] == spec["podSelector"]  # of this project
    for build in of_kind(render(DEPLOY), "BuildConfig"):  # its pods get its labels
        assert not selects(spec["podSelector"], build["metadata"]["labels"])
    assert not selects(spec["podSelector"], {**labels, "app.kubernetes.io/component": "step"})


@pytest.mark.parametrize("container", ["pytorch", "node"])
def test_training_pods_pass_the_restricted_pod_security_standard(job: Job, container: str) -> None:
    template = pod_template(job, container)
    check_fields(template, "V1PodTemplateSpec", [models])
    assert violations(template) == []
    assert "runAsUser" not in json.dumps(template)  # OpenShift assigns each project its own range


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=name_of)
def test_pods_of_deploy_pass_the_restricted_pod_security_standard(path: Path) -> None:
    for document in documents(path):
        assert "template" not in (document.get("spec") or {}), "a template of a pod, which would not be checked here"
        if document["kind"] == "Pod":
            check_fields(document, "V1Pod", [models])
            assert violations(document) == []
            assert "runAsUser" not in json.dumps(document)


CONTEXT = ("spec", "containers", 0, "securityContext")


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("spec", "hostNetwork"), True, "hostNetwork"),
        (("spec", "hostPID"), True, "hostPID"),
        (("spec", "volumes"), [{"name": "disk", "hostPath": {"path": "/"}}], "volume disk"),
        (("spec", "volumes"), [{"name": "disk", "nfs": {"server": "s", "path": "/"}}], "volume disk"),
        (("spec", "containers", 0, "ports"), [{"containerPort": 1, "hostPort": 1}], "hostPort"),
        (("spec", "securityContext", "runAsUser"), 0, "runAsUser"),
        (("spec", "securityContext", "sysctls"), [{"name": "kernel.msgmax", "value": "1"}], "sysctls"),
        ((*CONTEXT, "runAsUser"), 0, "runAsUser"),
        ((*CONTEXT, "runAsNonRoot"), False, "runAsNonRoot"),
        ((*CONTEXT, "privileged"), True, "privileged"),
        ((*CONTEXT, "allowPrivilegeEscalation"), None, "allowPrivilegeEscalation"),
        ((*CONTEXT, "capabilities"), {"drop": ["KILL"]}, "capabilities.drop"),
        ((*CONTEXT, "capabilities"), {"drop": ["ALL"], "add": ["IPC_LOCK"]}, "capabilities.add"),
        ((*CONTEXT, "seccompProfile"), {"type": "Unconfined"}, "seccompProfile"),
        ((*CONTEXT, "seLinuxOptions"), {"type": "spc_t"}, "seLinuxOptions"),
        ((*CONTEXT, "appArmorProfile"), {"type": "Unconfined"}, "appArmorProfile"),
        ((*CONTEXT, "procMount"), "Unmasked", "procMount"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_pod_check_finds_each_violation(job: Job, path: tuple[str | int, ...], value: Any, expected: str) -> None:
    template = pod_template(job, "pytorch")
    container: Any = template
    for part in path[:-1]:
        container = container[part]
    container[path[-1]] = value
    assert violations(template) == [expected]


@pytest.mark.parametrize("kind", ["initContainers", "ephemeralContainers"])
def test_the_pod_check_covers_every_container(job: Job, kind: str) -> None:
    template = pod_template(job, "pytorch")
    template["spec"][kind] = [{"name": "other", "image": "registry/other:1"}]
    assert violations(template) == ["allowPrivilegeEscalation", "capabilities.drop", "runAsNonRoot"]
