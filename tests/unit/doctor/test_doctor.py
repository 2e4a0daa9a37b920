"""What the doctor finds, on this machine and on a cluster, and the fixes that it gives."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import dashboard_server
import pytest
import requests
from click.testing import CliRunner, Result
from kubernetes_server import ADMIN_ROLE, EDIT_ROLE, EVERYBODY, RUNNER_ROLE, Server, cluster

from tailtune import __version__
from tailtune.cli import main
from tailtune.doctor import cluster as cluster_doctor
from tailtune.doctor import findings, local
from tailtune.doctor.examine import examine, refuse_blocked
from tailtune.errors import UserError
from tailtune.jobs import kubernetes
from tailtune.recipe.load import load_recipe


def add_image(server: Server, name: str, project: str = "lyric-professor", local: bool = True) -> None:
    tag = {"metadata": {}, "lookupPolicy": {"local": local}}
    server.objects["imagestreamtags", f"{project}/{name}:{__version__}"] = tag


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A cluster with deploy/cluster-admin, and a login as an administrator of the project."""
    with cluster(tmp_path / "server") as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        running.log_in(*ADMIN_ROLE)
        running.apply_cluster_admin()
        yield running


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_a_cluster_that_is_set_up_has_no_blocking_finding(server: Server) -> None:
    result = invoke()
    assert result.exit_code == 0, result.output
    for words in ("Kubernetes v1.31.5, project lyric-professor", "PyTorchJob is available",
                  "pipeline-runner-dspa may create, follow and delete training jobs",
                  "you may see and delete training jobs", "volume workspace-pvc",
                  "Bound, 20Gi, ReadWriteMany", "torch 2."):  # fmt: skip
        assert words in result.output
    assert "✗" not in result.output and server.token not in result.output


SECRET = ("secrets", "lyric-professor/huggingface-token")


def forbid(server: Server, resource: str) -> None:
    """Take a right from the runner."""
    server.allowed = [(verb, group, name) for verb, group, name in server.allowed if name != resource]


def allow(server: Server, *rights: tuple[str, str, str]) -> None:
    """Give rights to the person."""
    assert server.person is not None
    server.person += rights


def quota(server: Server, hard: str, used: str) -> None:
    name = "requests.nvidia.com/gpu"
    status = {"hard": {name: hard, "limits.cpu": "100"}, "used": {name: used, "limits.cpu": "74"}}
    server.objects["resourcequotas", "lyric-professor/gpus"] = {"status": status}


def without_cluster_admin(server: Server, *role: tuple[str, str, str]) -> None:
    """A cluster on which nobody has applied deploy/cluster-admin, and a login with this role."""
    server.allowed = [*EVERYBODY, *RUNNER_ROLE]
    server.log_in(*role)


SERVERS = ("list", "datasciencepipelinesapplications.opendatahub.io", "datasciencepipelinesapplications")
QUEUES = ("get", "kueue.x-k8s.io", "localqueues")
CLUSTER_ADMIN = "an administrator of the cluster: oc apply -k deploy/cluster-admin/"


@pytest.mark.parametrize(
    ("fault", "arguments", "message", "fix"),
    [
        (lambda s: s.claims.discard("workspace-pvc"), [], "does not exist", "oc apply -k deploy/"),
        (lambda s: setattr(s, "access_mode", "ReadWriteOnce"), [], "4 nodes need ReadWriteMany", "in deploy/"),
        (lambda s: s.operators.clear(), [], "no PyTorchJob and no TrainJob", "oc edit datasciencecluster"),
        (lambda s: s.install_trainer(only=True), ["-p", "resources.job_kind=pytorchjob"], "has no PyTorchJob",
         "trainingoperator"),
        (lambda s: (s.install_trainer(only=True), s.allowed.remove(("patch", "trainer.kubeflow.org", "trainjobs"))), [],
         "pipeline-runner-dspa is not allowed to patch trainjobs", CLUSTER_ADMIN),
        (lambda s: (s.install_trainer(only=True), s.trainer.runtimes.clear()), [],
         "there is no ClusterTrainingRuntime torch-distributed and no torch-distributed-cpu", "component trainer"),
        (lambda s: (s.install_trainer(only=True),
                    s.person.remove(("get", "trainer.kubeflow.org", "clustertrainingruntimes"))), [],
         "this account is not allowed to read it: not checked", CLUSTER_ADMIN),
        (lambda s: s.allowed.remove(("create", "kubeflow.org", "pytorchjobs")), [],
         "pipeline-runner-dspa is not allowed to create pytorchjobs in lyric-professor",
         f"{CLUSTER_ADMIN}, with lyric-professor and pipeline-runner-dspa in deploy/project/kustomization.yaml"),
        (lambda s: setattr(s, "token", "another"), [], "the cluster refuses the token", "oc login"),
        (lambda s: forbid(s, "pods/log"), [], "is not allowed to get pods/log in lyric-professor", CLUSTER_ADMIN),
        (lambda s: None, ["-p", "queue=team"], "this account is not allowed to read it: not checked", ""),
        (lambda s: (allow(s, QUEUES), s.groups.append("kueue.x-k8s.io")),
         ["-p", "queue=team"], "does not exist", "oc get localqueue; then -p queue=NAME"),
        (lambda s: allow(s, QUEUES), ["-p", "queue=team"], "has no Kueue", "-p queue="),
        (lambda s: quota(s, "3", "0"), [], "requests.nvidia.com/gpu: 4 x 1 needed, 0 of 3 used", "lower -p num_nodes="),
        (lambda s: quota(s, "8", "6"), [], "requests.nvidia.com/gpu: 4 x 1 needed, 6 of 8 used", "lower -p num_nodes="),
        (lambda s: None, ["-p", "data_source=s3://bucket/rows.jsonl"], "not found; needed for data on S3",
         "--from-file=AWS_ACCESS_KEY_ID=FILE -n lyric-professor; then -p s3_secret=NAME"),
        (lambda s: s.objects.update({SECRET: {"data": {"HF_TOKEN": "eA=="}}}), [],
         "has no key token, so it is of no use", "then -p hf_secret=NAME"),
        (lambda s: s.objects.clear(), [], "is not built",
         "oc start-build tailtune-trainer --from-repo=. --follow -n lyric-professor"),
        (lambda s: allow(s, SERVERS), [], "lyric-professor has none that is ready",
         "oc apply -k deploy/components/pipeline-server/s3/, or dashboard"),
        (lambda s: s.groups.append("kueue.x-k8s.io"), [], "the run names no queue", "-p queue=NAME"),
        (lambda s: forbid(s, "workflows"), [], "is not allowed to list workflows in lyric-professor: a second run of a",
         CLUSTER_ADMIN),
        (lambda s: (s.groups.remove("image.openshift.io"), s.claims.discard("workspace-pvc")), [], "does not exist",
         "kubectl apply -k deploy/overlays/kubernetes"),
        (lambda s: (s.groups.remove("image.openshift.io"), forbid(s, "pods/log")), [], "not allowed to get pods/log",
         "kubectl apply -k deploy/overlays/kubernetes/cluster-admin, with lyric-professor and pipeline-runner-dspa in "
         "deploy/overlays/kubernetes/project/kustomization.yaml"),
        (lambda s: (s.groups.remove("image.openshift.io"), s.operators.clear()), [], "no PyTorchJob and no TrainJob",
         "install the Training Operator or Kubeflow Trainer"),
    ],
    ids=["volume", "access mode", "no operator", "another operator", "permission for TrainJob", "runtime",
         "runtime not readable", "permission", "token", "logs", "queue not readable", "no such queue", "no Kueue",
         "quota too small", "quota in use", "no credentials", "secret without its key", "image not built",
         "no pipeline server", "no queue named", "workflows", "volume on Kubernetes", "permission on Kubernetes",
         "no operator on Kubernetes"],
)  # fmt: skip
def test_a_finding_reports_the_fault_and_its_fix(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Server], None],
    arguments: list[str],
    message: str,
    fix: str,
) -> None:
    fault(server)
    result = invoke(*arguments, "--json")
    faults = [finding for finding in json.loads(result.output) if finding["status"] != "ok"]
    assert any(message in finding["message"] and fix in finding["fix"] for finding in faults), faults
    assert result.exit_code == any(finding["status"] == "blocks" for finding in faults)


@pytest.mark.parametrize("runtime", ["torch-distributed", "torch-distributed-cpu"])
def test_one_runtime_is_enough_for_a_trainjob(server: Server, runtime: str) -> None:
    server.install_trainer(only=True)
    server.trainer.runtimes = {runtime}
    for arguments in ([], ["-p", "resources.gpu="]):
        result = invoke(*arguments)
        assert result.exit_code == 0 and f"{runtime} is available, and will be used" in result.output


def test_read_write_once_volumes_need_one_node_for_all_steps(server: Server) -> None:
    server.access_mode = "ReadWriteOnce"
    result = invoke("-p", "num_nodes=1")
    assert result.exit_code == 1 and "wait forever if they are scheduled on different nodes" in result.output
    assert "-p 'resources.node_selector={kubernetes.io/hostname: node-7}'" in result.output
    pinned = invoke("-p", "num_nodes=1", "-p", "resources.node_selector={kubernetes.io/hostname: node-7}")
    assert pinned.exit_code == 0 and "Bound, 20Gi, ReadWriteOnce" in pinned.output


def test_the_step_that_waits_needs_room_beside_the_job(server: Server) -> None:
    status = {"hard": {"pods": "5", "limits.cpu": "24"}, "used": {"pods": "1", "limits.cpu": "0"}}
    server.objects["resourcequotas", "lyric-professor/pods"] = {"status": status}
    output = invoke().output
    assert "pods: 4 x 1 and 1 for the step needed, 1 of 5 used" in output
    assert "limits.cpu: 4 x 6 and 2 for the step needed, 0 of 24 used" in output, "the job alone would fit"


@pytest.mark.parametrize(("largest", "blocks"), [("16Gi", True), ("20Gi", False)])
def test_a_container_must_not_be_larger_than_the_project_allows(server: Server, largest: str, blocks: bool) -> None:
    limit = {"type": "Container", "max": {"memory": largest}, "default": {"memory": "512Mi"}}
    server.objects["limitranges", "lyric-professor/sizes"] = {"spec": {"limits": [limit]}}
    result = invoke()
    message = "a container may have at most 16Gi of memory, and 20Gi are asked for"
    assert (message in result.output) is blocks and (result.exit_code == 1) is blocks


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("Container", "min", "200m", "must request at least 200m of cpu, and 100m are requested"),
        ("Container", "min", "100m", ""),
        ("Container", "maxLimitRequestRatio", "10", "cpu limit may be at most 10 times its request: 2 for 100m"),
        ("Container", "maxLimitRequestRatio", "20", ""),
        ("Pod", "min", "200m", ""),  # there are sidecars
        ("Pod", "maxLimitRequestRatio", "10", ""),
    ],
)
def test_a_container_must_request_as_much_as_the_project_demands(
    server: Server, kind: str, field: str, value: str, message: str
) -> None:
    limit = {"type": kind, field: {"cpu": value}}
    server.objects["limitranges", "lyric-professor/sizes"] = {"spec": {"limits": [limit]}}
    result = invoke()
    assert ("limit range" in result.output) is (result.exit_code == 1) is bool(message) and message in result.output
    assert ("raise -p resources.step_cpu_request=" in result.output) is bool(message)


def test_what_a_stage_asks_for_is_checked_as_well(server: Server) -> None:
    status = {"hard": {"limits.memory": "90Gi", "requests.nvidia.com/gpu": "9"}, "used": {}}
    server.objects["resourcequotas", "lyric-professor/sizes"] = {"status": status}
    assert invoke().exit_code == 0, "4 x 20Gi and 4Gi fit"
    own = invoke("-p", "stages.0.resources.memory=30Gi", "-p", "stages.0.resources.ranks_per_node=3")
    assert own.exit_code == 1
    assert "limits.memory: 4 x 30Gi and 4Gi for the step needed, 0 of 90Gi used" in own.output
    assert "requests.nvidia.com/gpu: 4 x 3 needed, 0 of 9 used" in own.output
    larger = invoke("-p", "resources.memory=95Gi", "-p", "stages.0.resources.memory=16Gi")
    assert "limits.memory: 1 x 95Gi needed" in larger.output, "a step that loads models"
    limit = {"type": "Container", "max": {"memory": "24Gi"}}
    server.objects["limitranges", "lyric-professor/sizes"] = {"spec": {"limits": [limit]}}
    own = invoke("-p", "stages.0.resources.memory=30Gi")
    assert "at most 24Gi of memory, and 30Gi are asked for" in own.output
    assert "lower -p stages.0.resources.memory=, or ask for more" in own.output


def test_the_queue_and_the_nodes_of_a_stage_are_checked_as_well(server: Server) -> None:
    allow(server, QUEUES)
    server.groups.append("kueue.x-k8s.io")
    missing = invoke("-p", "queue=team", "-p", "stages.0.resources.queue=large")
    assert "queue team" in missing.output and "queue large" in missing.output
    server.access_mode = "ReadWriteOnce"
    pinned = "resources.node_selector={kubernetes.io/hostname: node-7}"
    elsewhere = invoke("-p", "num_nodes=1", "-p", pinned, "-p", f"stages.0.{pinned.replace('7', '8')}")
    assert f"put all on one node with -p '{pinned}' -p 'stages.0.{pinned}'" in elsewhere.output
    same = invoke("-p", "num_nodes=1", "-p", pinned, "-p", f"stages.0.{pinned}")
    assert "ReadWriteOnce" in same.output and "put all on one node" not in same.output
    several = invoke("-p", "num_nodes=1", "-p", pinned, "-p", "stages.0.resources.num_nodes=2")
    assert "is ReadWriteOnce, and 2 nodes need ReadWriteMany" in several.output


def test_a_quota_needs_defaults_for_the_containers_that_argo_adds_to_a_step(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hard = {"limits.cpu": "99", "memory": "999Gi"}
    server.objects["resourcequotas", "lyric-professor/q"] = {"status": {"hard": hard}}
    result = invoke()
    assert result.exit_code == 0
    assert "a quota counts limits.cpu, memory, and the project has no defaults" in result.output
    limit = {"type": "Container", "default": {"cpu": "1"}, "defaultRequest": {"memory": "64Mi"}}
    server.objects["limitranges", "lyric-professor/sizes"] = {"spec": {"limits": [limit]}}
    assert "a quota counts" not in invoke().output
    server.objects.pop(("limitranges", "lyric-professor/sizes"))
    in_a_pod(server, monkeypatch)  # which has been admitted
    assert "a quota counts" not in "".join(each.message for each in examine(load_recipe("survival")))


def test_a_missing_cluster_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = invoke()
    assert result.exit_code == 1 and "✗ login" in result.output and "log in with oc login" in result.output
    assert invoke("--local").exit_code == 0


def test_missing_and_outdated_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        local.metadata, "requires", lambda name: ["torch>=99", "nothing-of-this-name", 'ruff; extra == "dev"']
    )
    (packages,) = [finding for finding in local.local_findings() if finding.check == "packages"]
    assert packages.status == findings.BLOCKS and "needed >=99; nothing-of-this-name is missing" in packages.message
    assert "ruff" not in packages.message


def test_secrets_are_reported_without_their_content(server: Server) -> None:
    quota(server, "8", "4")
    server.objects[SECRET] = {"data": {"token": "c2VjcmV0"}}
    result = invoke()
    assert result.exit_code == 0 and "✗" not in result.output, result.output
    for words in ("found, with key token", "room for 4 pods",
                  f"tailtune-trainer:{__version__} is in project lyric-professor",
                  "not found; needed for data on S3"):  # fmt: skip
        assert words in result.output
    assert "c2VjcmV0" not in result.output and "secret\n" not in result.output


def test_a_cluster_with_only_trainjob_is_enough(server: Server) -> None:
    server.install_trainer(only=True)
    result = invoke()
    assert result.exit_code == 0, result.output
    assert "TrainJob is available" in result.output and "torch-distributed is available" in result.output


# ---- permissions ------------------------------------------------------------------------------------


def statuses(*arguments: str) -> dict[str, str]:
    return {finding["check"]: finding["status"] for finding in json.loads(invoke("--json", *arguments).output)}


@pytest.mark.parametrize("trainjob", [False, True])
def test_applying_deploy_cluster_admin_grants_what_the_doctor_misses(server: Server, trainjob: bool) -> None:
    if trainjob:
        server.install_trainer(only=True)
    without_cluster_admin(server, *ADMIN_ROLE)
    before = invoke()
    jobs = "trainjobs" if trainjob else "pytorchjobs"
    assert before.exit_code == 1
    every_verb = ", ".join(f"{verb} {jobs}" for verb in cluster_doctor.VERBS)
    assert f"pipeline-runner-dspa is not allowed to {every_verb} in lyric-professor" in before.output
    assert f"! your permissions           you are not allowed to list {jobs}, delete {jobs}" in before.output
    assert before.output.count(CLUSTER_ADMIN) == 2 + trainjob  # the runner, the person, the runtime
    server.apply_cluster_admin()
    after = invoke()
    assert after.exit_code == 0 and CLUSTER_ADMIN not in after.output, after.output
    assert {statuses()[check] for check in ("permissions of the runner", "your permissions")} == {"ok"}


def test_who_can_only_submit_is_told_what_still_works(server: Server) -> None:
    without_cluster_admin(server, *EDIT_ROLE)
    result = invoke()
    assert result.exit_code == 0, "nothing that is known would stop a run"
    assert statuses()["permissions of the runner"] == "unknown"
    assert "you are not allowed to ask about pipeline-runner-dspa; the first step of a run checks them" in result.output
    assert "submitting, watching and `pipeline.py --cancel` work" in result.output
    assert statuses()["your permissions"] == "warning"
    server.apply_cluster_admin()
    assert statuses()["your permissions"] == "ok"


@pytest.mark.parametrize("command", [["gc"], ["cancel", "mine"]])
def test_gc_and_cancel_say_who_lacks_which_right(server: Server, command: list[str]) -> None:
    without_cluster_admin(server, *EDIT_ROLE)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert 'User "alice" cannot list resource "pytorchjobs"' in result.output
    assert result.output.endswith(f"; {CLUSTER_ADMIN}\n") and "oc whoami" not in result.output
    server.apply_cluster_admin()
    assert CliRunner().invoke(main, command).exit_code == 0


@pytest.mark.parametrize(
    ("prepare", "runner"),
    [
        (lambda s: None, "pipeline-runner-dspa"),  # a person who is not allowed to see pipeline servers
        (lambda s: allow(s, SERVERS), "pipeline-runner-dspa"),
        (lambda s: (allow(s, SERVERS), s.objects.update({
            ("datasciencepipelinesapplications", "lyric-professor/mine"): {"metadata": {"name": "mine"}}})),
         "pipeline-runner-mine"),
        (lambda s: (allow(s, SERVERS), s.groups.remove(SERVERS[1])), "pipeline-runner"),
    ],
    ids=["unknown", "no server", "another name", "Kubeflow Pipelines"],
)  # fmt: skip
def test_the_runner_is_named_after_the_pipeline_server(
    server: Server, prepare: Callable[[Server], None], runner: str
) -> None:
    prepare(server)
    invoke()
    assert server.reviewed == f"system:serviceaccount:lyric-professor:{runner}"


def in_a_pod(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a step of a run: it has the runner's token."""
    server.person = None
    folder = server.kubeconfig.parent
    (folder / "token").write_text(server.token)
    (folder / "namespace").write_text("lyric-professor")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "as in a pod")
    monkeypatch.setattr(kubernetes, "SERVICE_ACCOUNT", folder)
    login = kubernetes.config.load_kube_config
    in_cluster = partial(login, str(server.kubeconfig))
    monkeypatch.setattr(kubernetes.config, "load_incluster_config", in_cluster)


def test_a_step_checks_its_own_account(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_pod(server, monkeypatch)
    refuse_blocked(load_recipe("survival"))
    assert server.reviewed is None
    server.allowed.remove(("delete", "kubeflow.org", "pytorchjobs"))
    with pytest.raises(UserError) as error:
        refuse_blocked(load_recipe("survival"))
    assert error.value.problem == (
        "permissions of the runner: pipeline-runner-dspa is not allowed to delete pytorchjobs in lyric-professor"
    )
    assert error.value.remedy.startswith(CLUSTER_ADMIN)


# ---- images -----------------------------------------------------------------------------------------

SHORT = f"tailtune-trainer:{__version__}"


def image_finding(image: str) -> findings.Finding:
    return next(each for each in examine(load_recipe("survival"), images=(image,)) if each.check.startswith("image "))


def test_a_short_image_name_is_that_of_an_image_stream_with_a_local_look_up(server: Server) -> None:
    server.objects.clear()
    finding = image_finding(SHORT)
    assert (finding.status, finding.message) == ("blocks", "is not built") and "-n lyric-professor" in finding.fix
    add_image(server, "tailtune-trainer", project="another")
    assert image_finding(SHORT).message == "is not built"
    add_image(server, "tailtune-trainer", local=False)
    finding = image_finding(SHORT)
    assert finding.status == "blocks" and "has no local look-up" in finding.message
    assert finding.fix == "oc set image-lookup tailtune-trainer -n lyric-professor"
    assert image_finding(f"{cluster_doctor.INTERNAL_REGISTRY}lyric-professor/{SHORT}").status == "ok"
    add_image(server, "tailtune-trainer")
    finding = image_finding(SHORT)
    assert (finding.status, finding.message) == ("ok", f"{SHORT} is in project lyric-professor")


@pytest.mark.parametrize("image", [SHORT, f"{cluster_doctor.INTERNAL_REGISTRY}lyric-professor/{SHORT}"])
def test_without_openshift_an_image_needs_a_registry(
    server: Server, monkeypatch: pytest.MonkeyPatch, image: str
) -> None:
    server.groups = ["kubeflow.org", "authorization.k8s.io"]
    finding = image_finding(image)
    assert (finding.status, finding.fix) == ("blocks", "--image-registry REGISTRY/PROJECT")
    assert image_finding(f"quay.io/me/{SHORT}").status == "ok"
    in_a_pod(server, monkeypatch)
    finding = image_finding(image)  # the nodes may have it, as they have that of the step
    assert (finding.status, finding.fix) == ("warning", "-p pipeline_image=… -p trainer_image=…")


# ---- the pipeline server ----------------------------------------------------------------------------


def test_a_cluster_without_openshift_ai_needs_no_pipeline_server_of_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(server, SERVERS)
    server.groups.remove(SERVERS[1])
    assert "enable the aipipelines component" in invoke().output
    server.groups = ["kubeflow.org", "authorization.k8s.io"]
    assert statuses("--image-registry", "quay.io/me")["pipeline server"] == "unknown"
    in_a_pod(server, monkeypatch)
    server.allowed.append(SERVERS)
    for groups in ([], [SERVERS[1]]):  # a run has a server, whether or not OpenShift AI reports one
        server.groups = ["kubeflow.org", "authorization.k8s.io", *groups]
        refuse_blocked(load_recipe("survival"))


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [("2.16.1", "ok", "version 2.16.1; 2.14.3 or newer is needed"), ("2.5.0", "blocks", "version 2.5.0"),
     ("", "unknown", "does not report its version; 2.14.3 or newer is needed"),
     ("unknown", "unknown", "does not report its version")],
)  # fmt: skip
def test_the_pipeline_server_must_read_the_compiled_files(
    server: Server, version: str, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard = dashboard_server.Server()
    dashboard.version, dashboard.token = version, server.token
    allow(server, SERVERS)
    server.objects["datasciencepipelinesapplications", "lyric-professor/dspa"] = {
        "metadata": {"name": "dspa"},
        "status": {"components": {"apiServer": {"externalUrl": dashboard.url}}},
    }
    assert words in invoke().output and statuses()["pipeline server"] == status
    dashboard.close()
    assert "does not answer: ConnectionError" in invoke().output

    connect = kubernetes.KubernetesClient._connect

    def connect_with_ca(self: kubernetes.KubernetesClient) -> None:
        connect(self)
        self.configuration.ssl_ca_cert = "the CA of the cluster's API"  # of no use for the router's certificate

    def refuse(*args: object, verify: object, **kwargs: object) -> None:
        assert verify is True
        raise requests.exceptions.SSLError("certificate verify failed: self-signed certificate in certificate chain")

    monkeypatch.setattr(kubernetes.KubernetesClient, "_connect", connect_with_ca)
    monkeypatch.setattr(requests, "get", refuse)
    untrusted = invoke().output
    assert "is not trusted here" in untrusted and "TAILTUNE_CA_FILE" in untrusted


def test_the_first_step_of_a_run_fails_with_the_blocking_finding_and_its_fix(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    server.claims.discard("workspace-pvc")
    server.access_mode = "ReadWriteOnce"
    with pytest.raises(UserError) as error:
        refuse_blocked(load_recipe("survival"))
    assert str(error.value) == (
        "volume training-data-pvc: is ReadWriteOnce, and 4 nodes need ReadWriteMany (2 more above); "
        "give it a class with ReadWriteMany in deploy/"
    )
    server.claims.add("workspace-pvc")
    server.access_mode = "ReadWriteMany"
    refuse_blocked(load_recipe("survival"))


def test_scoped_quotas_and_images_without_a_tag_do_not_block(server: Server) -> None:
    quota(server, "0", "0")
    server.objects["resourcequotas", "lyric-professor/gpus"]["spec"] = {"scopes": ["BestEffort"]}
    server.objects[SECRET] = {"data": {"HF_TOKEN": "eA=="}}
    refuse_blocked(load_recipe("survival"), images=(f"{SHORT[:-6]}@sha256:0", "quay.io/me/a:1"))


def test_other_registries_are_not_checked(server: Server) -> None:
    assert "quay.io/me/tailtune-trainer" in invoke("--image-registry", "quay.io/me").output
