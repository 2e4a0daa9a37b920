"""What the tests on a cluster share: the commands, as subprocesses, and the training job of a run."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client

from pipeline_server import ENDED, PipelineServer
from tailtune.jobs.job import PIPELINE_RUN_LABEL
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.objects import JOB_KINDS, Jobs

ROOT = Path(__file__).resolve().parents[1]
RUN_SECONDS = float(os.environ.get("TAILTUNE_TEST_RUN_SECONDS", "3600"))
"""How long a tiny run may take, from the queue to its report."""
POLL_SECONDS = float(os.environ.get("TAILTUNE_TEST_POLL_SECONDS", "10"))
LONGER = ("-p", "stages.0.trainer.max_steps=1000")
"""For runs that something happens to during the training: on two cores, it takes one to ten minutes."""
RESUMED = "train: resuming from checkpoint-"


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in the project's root. Its output is printed, and shown if the test fails."""
    done = subprocess.run(arguments, cwd=ROOT, env=_environment(), text=True, capture_output=True)
    print(f"$ {' '.join(arguments)}\n{done.stdout}{done.stderr}status {done.returncode}")
    return done


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def pipeline(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return command(sys.executable, "pipeline.py", *arguments)


def tailtune(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return command(sys.executable, "-c", "from tailtune.cli import main; main()", *arguments)


def wait_for(condition: Callable[[], Any], seconds: float = RUN_SECONDS) -> Any:
    """Return the first true value of `condition()`."""
    give_up_at = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < give_up_at, f"not within {seconds:.0f} s"
        time.sleep(POLL_SECONDS)
    return result


def submit(name: str, *arguments: str) -> str:
    """Start a run and return its id."""
    done = pipeline("--submit", "--run-name", name, *arguments)
    assert done.returncode == 0, done.stderr
    return re.split(r"[/\s]", done.stdout.strip())[-1]  # the run's address ends in its id


def assert_succeeds(server: PipelineServer, run: str) -> None:
    """Wait for the run's end."""
    state = wait_for(lambda: (state := server.get_run(run).state) in ENDED and state)
    assert state == "SUCCEEDED", pipeline("--status", run).stdout


def runs_of_schedule(server: PipelineServer, name: str) -> list[Any]:
    schedule_ids = [schedule.recurring_run_id for schedule in server.schedules() if schedule.display_name == name]
    return [run for run in server.runs() if run.recurring_run_id in schedule_ids]


class FollowedLog:
    """The lines of `pipeline.py --logs RUN --follow`, as they arrive. The `with` block ends when the run does."""

    def __init__(self, run: str) -> None:
        self.lines: list[str] = []
        arguments = [sys.executable, "pipeline.py", "--logs", run, "--follow"]
        self._process = subprocess.Popen(arguments, cwd=ROOT, env=_environment(), text=True, stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT)  # fmt: skip
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            print(line, end="")

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)

    def wait_until_a_checkpoint_is_complete(self) -> None:
        """The first evaluation is followed by a checkpoint, which is complete long before the second evaluation."""
        wait_for(lambda: self.count(" eval_loss ") >= 2 or self._has_ended())

    def wait_until_training_resumes(self) -> None:
        wait_for(lambda: self.count(RESUMED) or self._has_ended())

    def _has_ended(self) -> bool:
        assert self._process.poll() is None, "the run has ended, or its log can no longer be read"
        return False

    def __enter__(self) -> "FollowedLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        status = self._process.wait(RUN_SECONDS)
        self._thread.join()
        assert kind or status == 0


@dataclass(frozen=True)
class TrainingJob:
    """The training job that a pipeline run had when this was made."""

    jobs: Jobs
    name: str
    uid: str

    def is_the_same(self) -> bool:
        """Whether the job exists and was not replaced by another one."""
        manifest = self.jobs.get(self.name)
        return manifest is not None and manifest["metadata"]["uid"] == self.uid

    def is_training(self) -> bool:
        manifest = self.jobs.get(self.name)
        return manifest is not None and self.jobs.kind.state(manifest)[0] == "running"

    def first_pod(self) -> Any:
        """The pod of node 0; None while there is none."""
        return next(iter(self.jobs.pods(self.name)), None)


def training_job(cluster: KubernetesClient, run: str) -> TrainingJob | None:
    """Return the job of a pipeline run; None while there is none."""
    for kind in JOB_KINDS.values():
        jobs = Jobs(cluster, kind)
        try:
            found = jobs.find(f"{PIPELINE_RUN_LABEL}={run}")
        except client.ApiException as error:
            if error.status not in (403, 404):  # a kind that the cluster does not have, or that this person may not see
                raise
            continue
        if found:
            return TrainingJob(jobs, found[0]["metadata"]["name"], found[0]["metadata"]["uid"])
    return None
