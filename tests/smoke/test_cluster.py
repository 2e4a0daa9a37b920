"""The train step on a cluster: the survival recipe in two pods, over HTTP, with real training in the pods."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_recipe
from kubernetes_server import Server, cluster
from launchers import start_launcher, wait_until
from safetensors.torch import load_file

from tailtune.jobs import trainjob
from tailtune.jobs.train_step import train_stage
from tailtune.run import Run

EPOCHS = {"stages.0.trainer.num_train_epochs": 12}
NUM_STEPS = 132
LAUNCH = """
import sys
from pathlib import Path
from tailtune.jobs import follow
from tailtune.jobs.train_step import train_stage
from tailtune.log import step
from tailtune.run import Run
follow.POLL_SECONDS = 0.3
with step("train"):
    train_stage(Run.from_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with cluster(tmp_path / "server", OMP_NUM_THREADS="1") as running:
        yield running


def make_run(folder: Path, *, local: bool, **overrides: Any) -> Run:
    nodes = (1, 2) if local else (2, 1)
    recipe = tiny_recipe(**EPOCHS, **{"resources.num_nodes": nodes[0], "resources.ranks_per_node": nodes[1],
                                      "resources.gpu": ""}, **overrides)  # fmt: skip
    # on a volume, each run has its own directory
    return Run(name="demo", recipe=recipe, local=local, data_dir=folder / "data" / "demo",
               models_dir=folder / "models" / "demo", workspace_dir=folder / "workspace" / "demo")  # fmt: skip


def start(run: Run, prepared: Path, server: Server) -> "subprocess.Popen[str]":
    return start_launcher(server, LAUNCH, run.to_json(), str(prepared / "data"), str(prepared / "base"))


def num_steps_logged(server: Server) -> int:
    lines = [line for pods in list(server.pods.values()) for pod in pods for start in pod.lines for line in start]
    return sum("train: step" in line for line in lines)


@pytest.fixture(scope="module")
def local_weights(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = make_run(tmp_path_factory.mktemp("local"), local=True)
    train_stage(run, prepared / "data", prepared / "base")
    return load_file(run.best_model_dir / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_survival_trains_in_two_pods_to_the_same_weights(
    server: Server, prepared: Path, tmp_path: Path, local_weights: dict[str, Any], kind: str
) -> None:
    server.install_trainer()
    run = make_run(tmp_path, local=False, **{"resources.job_kind": kind})
    server.faults.drop_streams = [11, 3, 40, 0, 25, 60]
    process = start(run, prepared, server)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert re.search(r"^\[rank \d\] tailtune \| train: step \d+/\d+ loss .* ETA", err, re.MULTILINE), err
    shown = re.findall(r"train: step \d+/.*", err)
    assert len(shown) == len(set(shown)) > 10, "each line once"
    assert shown == sorted(shown, key=lambda line: int(re.findall(r"\d+", line)[0])), "and in order"
    assert json.loads((run.models_dir / "training_summary.json").read_text())["world_size"] == 2
    tuned = load_file(run.best_model_dir / "model.safetensors")
    assert max((tuned[name] - local_weights[name]).abs().max().item() for name in tuned) <= 1e-5
    (job,) = server.jobs.values()
    if kind == "trainjob":
        status = json.loads(job["metadata"]["annotations"][trainjob.PROGRESS_ANNOTATION])
        assert status["progressPercentage"] == 100 and status["totalSteps"] == NUM_STEPS
        assert set(status["trainMetrics"]) == {"loss", "learning_rate", "grad_norm", "tokens_per_second"}
    assert not any(pod.process.poll() is None for pods in server.pods.values() for pod in pods)
    kept = "".join(path.read_text() for path in sorted((run.workspace_dir / "logs").iterdir()))
    assert {line for line in kept.splitlines() if "train: step" in line} == {f"[rank 0] tailtune | {x}" for x in shown}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker-0", "master-0"])
def test_a_pod_that_dies_restarts_and_the_training_resumes(
    server: Server, prepared: Path, tmp_path: Path, local_weights: dict[str, Any], victim: str
) -> None:
    run = make_run(tmp_path, local=False, **{"stages.0.trainer.save_steps": 20, "stages.0.trainer.eval_steps": 20})
    process = start(run, prepared, server)
    wait_until(lambda: list((run.models_dir / "checkpoints").glob("checkpoint-*/complete.json")))
    next(pod for pods in server.pods.values() for pod in pods if pod.role == victim).signal(signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "train: resuming from checkpoint-" in err
    summary = json.loads((run.models_dir / "training_summary.json").read_text())
    assert summary["resumed_from_steps"] and summary["num_steps"] == NUM_STEPS


@pytest.mark.slow
def test_a_step_that_is_cancelled_during_training_leaves_nothing_behind(
    server: Server, prepared: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path, local=False)
    launcher = start(run, prepared, server)
    wait_until(lambda: num_steps_logged(server))
    processes = [pod.process for pods in server.pods.values() for pod in pods]
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 1 and "was stopped by signal 15 and deleted" in err
    wait_until(lambda: not server.jobs)
    assert all(process is None or process.poll() is not None for process in processes)
    assert not run.best_model_dir.exists()
