"""The tests in tests/cluster, run against the tests' own servers, so that they keep working without a cluster."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dashboard_server import dashboard
from http_server import NAMESPACE
from kubernetes_server import cluster
from launchers import MODULES, make_job

from tailtune.jobs import pytorchjob
from tailtune.jobs.job import job_name
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.objects import Jobs

ROOT = Path(__file__).resolve().parents[2]


def run_pytest(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-v", *arguments, "tests/cluster"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, text=True, capture_output=True)


def test_without_a_cluster_they_are_skipped_with_a_reason() -> None:
    done = run_pytest()
    assert done.returncode == 0 and "6 skipped" in done.stdout and "oc login, then pytest --cluster" in done.stdout


@pytest.mark.slow
def test_they_pass_on_a_cluster_without_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pod_long.py").write_text(MODULES["long"])
    with cluster(tmp_path / "server", PYTHONPATH=str(tmp_path)) as kubernetes, dashboard() as pipelines:
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))

        def start(run: dict[str, Any]) -> None:
            """Create the job of a running pipeline run, as its train step does."""
            if run["display_name"].endswith("-cancelled"):
                labels = {"tailtune.io/run": run["display_name"], "app.kubernetes.io/managed-by": "tailtune"}
                job = make_job("long", name=job_name(run["display_name"], "sft"), labels=labels)
                Jobs(KubernetesClient(), pytorchjob).create(job)

        pipelines.on_run = start
        done = run_pytest("--cluster", TAILTUNE_ENDPOINT=pipelines.url, TAILTUNE_NAMESPACE=NAMESPACE,
                          TAILTUNE_TOKEN=pipelines.token, TAILTUNE_TEST_POLL_SECONDS="0.2",
                          PATH=str(Path(sys.executable).parent))  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout and "neither oc nor kubectl is installed" in done.stdout
    assert len(pipelines.terminated) == 3 and not kubernetes.jobs and not pipelines.recurring
    assert all(run["runtime_config"]["parameters"]["gpu"] == "" for run in pipelines.runs.values())
