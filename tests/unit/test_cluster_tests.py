"""The tests in tests/cluster, run against the tests' own servers, so that they keep working without a cluster."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dashboard_server import dashboard
from http_server import NAMESPACE
from kubernetes_server import EDIT_ROLE, cluster
from run_steps import Runs

ROOT = Path(__file__).resolve().parents[2]


def run_pytest(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-v", *arguments, "tests/cluster"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, text=True, capture_output=True)


def test_without_a_cluster_they_are_skipped_with_a_reason() -> None:
    done = run_pytest()
    assert done.returncode == 0 and "11 skipped" in done.stdout and "oc login, then pytest --cluster" in done.stdout


@pytest.mark.slow
def test_they_pass_on_a_cluster_without_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(tmp_path / "server") as kubernetes, dashboard() as pipelines:
        kubernetes.log_in(*EDIT_ROLE)
        kubernetes.apply_cluster_admin()
        kubernetes.faults.refused_evictions = 1

        def may_finish(run: dict[str, Any]) -> bool:
            """Whether the test has done what it does during this run."""
            name = run["display_name"]
            if "recurring_run_id" in run:  # until only its own schedule is left, disabled; or until it is ended
                left = [(each["display_name"][-8:], each["status"]) for each in pipelines.recurring.values()]
                return left == [("-changed", "DISABLED")]
            if name.endswith("-twice"):  # until the other run is ended
                return any(pipelines.runs[other]["display_name"] == name for other in pipelines.terminated)
            if name.endswith("-drained"):  # until the run is tried again
                return {"state": "FAILED"} in run["state_history"]
            return not name.endswith(("-cancelled", "-rank", "-node"))

        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
        volumes = tmp_path / "volumes"
        # as in the default installation: else each submission imports TRL and torch, to check trainer arguments
        (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError(name='transformers')")
        with closing(Runs(kubernetes, pipelines, volumes, may_finish, restarted=("-rank", "-node"))) as runs:
            done = run_pytest("--cluster", TAILTUNE_ENDPOINT=pipelines.url, TAILTUNE_NAMESPACE=NAMESPACE,
                              TAILTUNE_TOKEN=pipelines.token, TAILTUNE_TEST_POLL_SECONDS="0.2",
                              TAILTUNE_TEST_RUN_SECONDS="300", PYTHONPATH=str(tmp_path),
                              PATH=str(Path(sys.executable).parent))  # fmt: skip
            assert done.returncode == 0, done.stdout
            runs.wait()
    assert "10 passed" in done.stdout and "neither oc nor kubectl is installed" in done.stdout
    assert len(pipelines.terminated) == 4 and not pipelines.recurring and not pipelines.lost
    assert not kubernetes.faults.refused_evictions, "the eviction was asked for again"
    assert all(run["runtime_config"]["parameters"]["gpu"] == "" for run in pipelines.runs.values())
    repeated = {}
    for path in volumes.glob("models/*/steps"):
        steps = path.read_text().split()
        repeated[path.parent.name.rpartition("-")[2]] = len(steps) - len(set(steps))
    assert repeated["drained"] == repeated["twice"] == 0, "nothing was trained twice"
    assert max(repeated.values()) <= 1000 // 16 // 8, "resumed from the last checkpoint"
