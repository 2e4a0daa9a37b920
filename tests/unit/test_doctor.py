"""What the doctor finds, here and on a cluster, and what it says to do."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kubernetes_server import Server, cluster

from tailtune import doctor
from tailtune.cli import main


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with cluster(tmp_path / "server") as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_nothing_stops_a_run_on_a_cluster_that_is_set_up(server: Server) -> None:
    result = invoke()
    assert result.exit_code == 0, result.output
    for words in ("Kubernetes v1.31.5, project lyric-professor", "PyTorchJob is there", "may create, follow and delete",
                  "volume workspace-pvc", "Bound, 20Gi, ReadWriteMany", "torch 2."):  # fmt: skip
        assert words in result.output
    assert "✗" not in result.output and server.token not in result.output


@pytest.mark.parametrize(
    ("fault", "arguments", "message", "fix"),
    [
        (lambda s: s.claims.discard("workspace-pvc"), [], "does not exist", "oc apply -k deploy/"),
        (lambda s: setattr(s, "access_mode", "ReadWriteOnce"), [], "4 nodes need ReadWriteMany", "set -p num_nodes=1"),
        (lambda s: setattr(s, "groups", ["apps"]), [], "no PyTorchJob and no TrainJob", "oc edit datasciencecluster"),
        (lambda s: s.groups.remove("kubeflow.org"), ["-p", "resources.job_kind=pytorchjob"], "has no PyTorchJob",
         "trainingoperator"),
        (lambda s: (s.install_trainer(only=True), s.allowed.remove(("patch", "trainer.kubeflow.org", "trainjobs"))), [],
         "may not patch trainjobs", "components/trainjob"),
        (lambda s: (s.install_trainer(only=True), s.trainer.runtimes.remove("torch-distributed")), [],
         "no ClusterTrainingRuntime torch-distributed", "component trainer"),
        (lambda s: (s.install_trainer(only=True),
                    s.allowed.remove(("get", "trainer.kubeflow.org", "clustertrainingruntimes"))), [],
         "torch-distributed may not be read", "oc apply -k deploy/cluster-admin/"),
        (lambda s: setattr(s, "allowed", s.allowed[1:]), [], "may not create pytorchjobs",
         "oc policy add-role-to-user edit -z pipeline-runner-dspa -n lyric-professor"),
        (lambda s: setattr(s, "token", "another"), [], "the cluster refuses the token", "oc login"),
        (lambda s: None, ["-p", "queue=team"], "LocalQueue team may not be read", "oc apply -k deploy/"),
        (lambda s: s.groups.append("kueue.x-k8s.io"), [], "the run names no queue", "-p queue=NAME"),
    ],
    ids=["volume", "access mode", "no operator", "another operator", "permission for TrainJob", "runtime",
         "runtime not readable", "permission", "token", "queue not readable", "no queue named"],
)  # fmt: skip
def test_a_finding_names_what_is_wrong_and_the_fix(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Server], None],
    arguments: list[str],
    message: str,
    fix: str,
) -> None:
    fault(server)
    result = invoke(*arguments, "--json")
    findings = [one for one in json.loads(result.output) if one["status"] != "ok"]
    assert any(message in one["message"] and fix in one["fix"] for one in findings), findings
    assert result.exit_code == any(one["status"] == "blocks" for one in findings)


def test_a_cluster_with_trainjob_alone_will_do(server: Server) -> None:
    server.install_trainer(only=True)
    result = invoke()
    assert (
        result.exit_code == 0 and "TrainJob is there" in result.output and "torch-distributed is there" in result.output
    )


def test_one_node_is_content_with_a_volume_for_one_node(server: Server) -> None:
    server.access_mode = "ReadWriteOnce"
    assert invoke("-p", "num_nodes=1").exit_code == 0


def test_no_cluster_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = invoke()
    assert result.exit_code == 1 and "✗ login" in result.output and "log in with oc login" in result.output
    assert invoke("--local").exit_code == 0


def test_other_packages_than_needed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["torch>=99", "nothing-of-this-name", 'ruff; extra == "dev"']
    )
    (packages,) = [one for one in doctor.local_findings() if one.check == "packages"]
    assert packages.status == doctor.BLOCKS and "needed >=99; nothing-of-this-name is missing" in packages.message
    assert "ruff" not in packages.message
