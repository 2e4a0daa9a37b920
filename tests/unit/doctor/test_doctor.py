"""What the doctor finds, on this machine and on a cluster, and the fixes that it gives."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import dashboard_server
import pytest
import requests
from click.testing import CliRunner, Result
from kubernetes_server import Server, cluster

from tailtune import __version__, images
from tailtune.cli import main
from tailtune.doctor import findings, local
from tailtune.doctor.examine import refuse_blocked
from tailtune.errors import UserError
from tailtune.recipe.load import load_recipe


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with cluster(tmp_path / "server") as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_a_cluster_that_is_set_up_has_no_blocking_finding(server: Server) -> None:
    result = invoke()
    assert result.exit_code == 0, result.output
    for words in ("Kubernetes v1.31.5, project lyric-professor", "PyTorchJob is available",
                  "may create, follow and delete training jobs", "volume workspace-pvc",
                  "Bound, 20Gi, ReadWriteMany", "torch 2."):  # fmt: skip
        assert words in result.output
    assert "✗" not in result.output and server.token not in result.output


SECRET = ("secrets", "lyric-professor/huggingface-token")


def forbid(server: Server, resource: str) -> None:
    server.allowed = [(verb, group, name) for verb, group, name in server.allowed if name != resource]


def quota(server: Server, hard: str, used: str) -> None:
    server.allowed.append(("list", "", "resourcequotas"))
    name = "requests.nvidia.com/gpu"
    status = {"hard": {name: hard, "limits.cpu": "100"}, "used": {name: used, "limits.cpu": "76"}}
    server.objects["resourcequotas", "lyric-professor/gpus"] = {"status": status}


def allow_images(server: Server) -> None:
    server.allowed.append(("get", "image.openshift.io", "imagestreamtags"))


def allow_servers(server: Server) -> None:
    server.allowed.append(("list", "datasciencepipelinesapplications.opendatahub.io", "*"))


@pytest.mark.parametrize(
    ("fault", "arguments", "message", "fix"),
    [
        (lambda s: s.claims.discard("workspace-pvc"), [], "does not exist", "oc apply -k deploy/"),
        (lambda s: setattr(s, "access_mode", "ReadWriteOnce"), [], "4 nodes need ReadWriteMany", "in deploy/"),
        (lambda s: s.operators.clear(), [], "no PyTorchJob and no TrainJob", "oc edit datasciencecluster"),
        (lambda s: s.install_trainer(only=True), ["-p", "resources.job_kind=pytorchjob"], "has no PyTorchJob",
         "trainingoperator"),
        (lambda s: (s.install_trainer(only=True), s.allowed.remove(("patch", "trainer.kubeflow.org", "trainjobs"))), [],
         "is not allowed to patch trainjobs", "components/trainjob"),
        (lambda s: (s.install_trainer(only=True), s.trainer.runtimes.clear()), [],
         "there is no ClusterTrainingRuntime torch-distributed and no torch-distributed-cpu", "component trainer"),
        (lambda s: (s.install_trainer(only=True),
                    s.allowed.remove(("get", "trainer.kubeflow.org", "clustertrainingruntimes"))), [],
         "this account is not allowed to read it: not checked", "oc apply -k deploy/cluster-admin/"),
        (lambda s: setattr(s, "allowed", s.allowed[1:]), [], "is not allowed to create pytorchjobs",
         "oc policy add-role-to-user edit -z pipeline-runner-dspa -n lyric-professor"),
        (lambda s: setattr(s, "token", "another"), [], "the cluster refuses the token", "oc login"),
        (lambda s: forbid(s, "pods/log"), [], "is not allowed to get pods/log in lyric-professor",
         "oc policy add-role-to-user edit"),
        (lambda s: None, ["-p", "queue=team"], "this account is not allowed to read it: not checked", ""),
        (lambda s: (s.allowed.append(("get", "kueue.x-k8s.io", "*")), s.groups.append("kueue.x-k8s.io")),
         ["-p", "queue=team"], "does not exist", "oc get localqueue; then -p queue=NAME"),
        (lambda s: s.allowed.append(("get", "kueue.x-k8s.io", "*")), ["-p", "queue=team"], "has no Kueue", "-p queue="),
        (lambda s: quota(s, "3", "0"), [], "requests.nvidia.com/gpu: 4 x 1 needed, 0 of 3 used", "lower -p num_nodes="),
        (lambda s: quota(s, "8", "6"), [], "requests.nvidia.com/gpu: 4 x 1 needed, 6 of 8 used", "lower -p num_nodes="),
        (lambda s: None, ["-p", "data_source=s3://bucket/rows.jsonl"], "not found; needed for data on S3",
         "--from-file=AWS_ACCESS_KEY_ID=FILE -n lyric-professor; then -p s3_secret=NAME"),
        (lambda s: s.objects.update({SECRET: {"data": {"HF_TOKEN": "eA=="}}}), [],
         "has no key token, so it is of no use", "then -p hf_secret=NAME"),
        (allow_images, [], "is not built",
         "oc start-build tailtune-trainer --from-repo=. --follow -n lyric-professor"),
        (allow_servers, [], "project lyric-professor has none that is ready", "Configure pipeline server"),
        (lambda s: s.groups.append("kueue.x-k8s.io"), [], "the run names no queue", "-p queue=NAME"),
    ],
    ids=["volume", "access mode", "no operator", "another operator", "permission for TrainJob", "runtime",
         "runtime not readable", "permission", "token", "logs", "queue not readable", "no such queue", "no Kueue",
         "quota too small", "quota in use", "no credentials", "secret without its key", "image not built",
         "no pipeline server", "no queue named"],
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


def test_a_read_write_once_volume_is_a_warning_for_one_node(server: Server) -> None:
    server.access_mode = "ReadWriteOnce"
    result = invoke("-p", "num_nodes=1")
    assert result.exit_code == 0 and "if they are scheduled on different nodes" in result.output


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
    allow_images(server)
    quota(server, "8", "4")
    server.objects |= {
        SECRET: {"data": {"token": "c2VjcmV0"}},
        ("imagestreamtags", f"lyric-professor/tailtune-trainer:{__version__}"): {"metadata": {}},
        ("imagestreamtags", f"lyric-professor/tailtune-pipeline:{__version__}"): {"metadata": {}},
    }
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


def test_the_runners_permissions_are_checked_if_the_account_is_allowed_to_ask(server: Server) -> None:
    assert "permissions                may" in invoke().output and server.reviewed is None
    server.allowed.append(("create", "authorization.k8s.io", "localsubjectaccessreviews"))
    assert "permissions of the runner  may" in invoke().output
    assert server.reviewed == "system:serviceaccount:lyric-professor:pipeline-runner-dspa"


@pytest.mark.parametrize(
    ("version", "blocks", "words"),
    [("2.16.1", False, "version 2.16.1; 2.14.3 or newer is needed"), ("2.5.0", True, "version 2.5.0"),
     ("", False, "does not report its version; 2.14.3 or newer is needed"),
     ("unknown", False, "does not report its version")],
)  # fmt: skip
def test_the_pipeline_server_must_read_the_compiled_files(
    server: Server, version: str, blocks: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard = dashboard_server.Server()
    dashboard.version, dashboard.token = version, server.token
    allow_servers(server)
    server.objects["datasciencepipelinesapplications", "lyric-professor/dspa"] = {
        "status": {"components": {"apiServer": {"externalUrl": dashboard.url}}}
    }
    result = invoke()
    assert words in result.output and (result.exit_code == 1) == blocks
    dashboard.close()
    assert "does not answer: ConnectionError" in invoke().output

    def refuse(*args: object, **kwargs: object) -> None:
        raise requests.exceptions.SSLError("certificate verify failed: self-signed certificate in certificate chain")

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
    allow_images(server)
    refuse_blocked(load_recipe("survival"), images=(images.TRAINER.replace(":0", "@sha256:0"), "quay.io/me/a:1"))


def test_other_registries_are_not_checked(server: Server) -> None:
    allow_images(server)
    assert "quay.io/me/tailtune-trainer" in invoke("--image-registry", "quay.io/me").output
