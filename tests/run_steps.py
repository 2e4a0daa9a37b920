"""Runs what the pipeline's server is asked to run, as far as a training job is concerned, on both test servers.

Each step is a process with the runner's rights, in a pod as Argo makes it: `fetch-dataset` takes the directories,
`train-stage` is the train step with the real launcher, `stop-jobs` the exit handler. The other steps are left out. The
ranks of a job count steps instead of training, but keep what `tailtune.train` promises: a key in each checkpoint, no
step twice, nothing saved after another run has taken over, and a model that is complete or absent.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dashboard_server
import kubernetes_server
import yaml
from kubernetes_server import StepPod
from launchers import signal_step, start_launcher
from operators import now

from tailtune.manifest import write_manifest
from tailtune.recipe.load import PARAMETERS, parse_recipe, with_overrides
from tailtune.run import DATA_FILE, Run

LIGHT_TORCHRUN = Path(__file__).resolve().parent / "light_torchrun"
STEPS = ("fetch-dataset", "train-stage")
COMPILED = Path(__file__).resolve().parents[1] / "compiled" / "survival.yaml"
TRAINER = "counting_trainer"
COUNT = """
import os, sys, time
from pathlib import Path
from tailtune.files import write_json
from tailtune.manifest import publish, read_manifest
from tailtune.owner import refuse_if_taken_over
from tailtune.recipe.schema import Recipe
from tailtune.training_key import CHECKPOINT_KEY, refuse_other_checkpoints, training_key

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
recipe = Recipe.model_validate_json(Path(options["--recipe"]).read_text())
output = Path(os.environ["OUTPUT_DIR"])
key = training_key(recipe, recipe.stages[0], Path(os.environ["DATA_DIR"]), Path(options["--model-dir"]))
owner = Path(os.environ["TAILTUNE_OWNER_FILE"]), os.environ["TAILTUNE_PIPELINE_RUN"]
trainer = recipe.stages[0].trainer
num_steps = max(8, int(trainer.get("max_steps", trainer["num_train_epochs"])) // 16)
while os.environ["RANK"] != "0" and not read_manifest(output / "best_model", key):
    time.sleep(0.1)
if os.environ["RANK"] != "0":
    sys.exit()
refuse_other_checkpoints(output / "checkpoints", key)
done = max((int(path.parent.name[11:]) for path in output.glob("checkpoints/checkpoint-*/complete.json")), default=0)
if done:
    (output / "hold").unlink(missing_ok=True)
    print(f"tailtune | train: resuming from checkpoint-{done}, next step is {done + 1}", flush=True)
for number in range(done + 1, num_steps + 1):
    time.sleep(0.05)
    while number > num_steps / 2 and (output / "hold").exists():
        time.sleep(0.05)
    with (output / "steps").open("a") as file:
        file.write(f"{number}\\n")
    if number % (num_steps // 8) == 0:
        print(f"tailtune | train: step {number}/{num_steps} eval_loss 1.0000", flush=True)
        refuse_if_taken_over(*owner)
        write_json(output / f"checkpoints/checkpoint-{number}/{CHECKPOINT_KEY}", key)
        write_json(output / f"checkpoints/checkpoint-{number}/complete.json", {})
refuse_if_taken_over(*owner)
with publish(output / "best_model", key, {}) as partial:
    (partial / "weights").write_text(str(num_steps))
"""
"""Counts 16 steps, or epochs, as one, and evaluates eight times. After half of the steps it waits while there is a file
`hold`, unless it has resumed."""
STEP = f"""
import sys
from dataclasses import replace
from tailtune.jobs import follow, train_step
from tailtune.jobs.cleanup import end_of_run
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.log import step
from tailtune.resolve import claim_directories
from tailtune.run import Run

follow.POLL_SECONDS = 0.2
name, run, path_of_job = sys.argv[1], Run.from_json(sys.argv[2]), sys.argv[3]
with step(name):
    if name == "fetch-dataset":
        claim_directories(run)
    elif name == "train-stage":
        job = train_step.make_job(run, run.parquet_dir, run.base_model_dir, run.models_dir / "recipe.json")
        job = replace(job, module="{TRAINER}", environment={{**job.environment, "PYTHONPATH": path_of_job}})
        train_step.make_job = lambda *arguments: job
        train_step.train_stage(run, run.parquet_dir, run.base_model_dir)
    else:
        end_of_run(KubernetesClient(), run.pipeline_run)
"""


class RunningStep(StepPod):
    """A pod whose container `main` is a process."""

    def __init__(
        self, kubernetes: kubernetes_server.Server, run: Run, step: str, attempt: int, path_of_job: str
    ) -> None:
        super().__init__(run.pipeline_run, step, attempt, [], phase="Running")
        self._pods = kubernetes.pods_of_steps
        self._pods.append(self)
        self._process = start_launcher(
            kubernetes, STEP, step, run.to_json(), path_of_job, KUBECONFIG=str(kubernetes.runner_kubeconfig),
            KFP_POD_NAME=self.name, KUBERNETES_SERVICE_HOST="set as in a pod, but without a token",
        )  # fmt: skip

    def wait(self) -> bool:
        """Show the step's output in the pod's log until its end, and return whether it has succeeded."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self.changed:
                self.lines[0].append(f"{now()} {line.rstrip()}")
                self.changed.notify_all()
        code = self._process.wait()
        with self.changed:
            for status in self.manifest["status"]["containerStatuses"]:
                status["state"] = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
            self.manifest["status"]["phase"] = "Failed" if code else "Succeeded"
            self.changed.notify_all()
        return code == 0

    def stop(self) -> None:
        """Stop the step as Argo does when its run is terminated."""
        if self._process.poll() is None:
            signal_step(self._process)

    def evict(self, grace_seconds: float | None = None) -> None:
        """Delete the pod, as a drained node does."""
        self.deleted.set()
        self.stop()
        self._process.wait()
        self._pods.remove(self)


def _retry_policy(step: str) -> tuple[int, float]:
    """How often the compiled pipeline repeats a step, and after how many seconds for the first time."""
    spec, _ = yaml.safe_load_all(COMPILED.read_text())
    tasks = [each.get("dag", {}).get("tasks", {}) for each in spec["components"].values()]
    (policy,) = (each[step]["retryPolicy"] for each in tasks if step in each)
    return policy["maxRetryCount"], float(policy["backoffDuration"].removesuffix("s"))


class Runs:
    """Runs every run that the pipeline's server starts, on this cluster; the volumes are directories in `folder`.

    A training stops after half of its steps until `may_finish(run)`, or until it resumes. Only the jobs of runs whose
    names end in one of `restarted` use torch's own torchrun.
    """

    def __init__(self, kubernetes: kubernetes_server.Server, pipelines: dashboard_server.Server, folder: Path,
                 may_finish: Callable[[dict[str, Any]], bool], restarted: tuple[str, ...]) -> None:  # fmt: skip
        self.kubernetes, self.pipelines, self.folder = kubernetes, pipelines, folder
        self.may_finish, self.restarted = may_finish, restarted
        folder.mkdir()
        (folder / f"{TRAINER}.py").write_text(COUNT)
        self._pods: dict[str, RunningStep] = {}
        """The pod of each run's present step."""
        self._ended: dict[str, threading.Event] = {}
        """By run: set when it is terminated."""
        self._stopped: set[str] = set()
        """Runs whose exit handler has run."""
        self._threads: list[threading.Thread] = []
        self._num_retries, self._retry_seconds = _retry_policy("train-stage")
        pipelines.on_run, pipelines.on_terminate, pipelines.on_lose = self.start, self.terminate, self.lose
        pipelines.on_retry = lambda run: self.start(pipelines.runs[run])

    def start(self, run: dict[str, Any]) -> None:
        identity = run["run_id"]
        run["state"] = "RUNNING"
        ended = self._ended[identity] = threading.Event()
        self.kubernetes.terminated.discard(identity)
        self.kubernetes.workflows[identity] = "Running"
        self._threads.append(threading.Thread(target=self._execute, args=(run, ended), daemon=True))
        self._threads[-1].start()

    def wait(self) -> None:
        """Wait for the ends of all runs."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Stop all steps that still run."""
        for identity in list(self._pods):  # runs still start steps meanwhile
            self.terminate(identity)

    def terminate(self, identity: str) -> None:
        self.kubernetes.terminated.add(identity)
        self._ended[identity].set()
        if pod := self._pods.get(identity):
            pod.stop()

    def lose(self, identity: str) -> None:
        """End the run without its exit handler, because its workflow is deleted; for the server it is in progress."""
        del self.kubernetes.workflows[identity]
        self._ended[identity].set()
        self._pods[identity].stop()

    def _execute(self, entry: dict[str, Any], ended: threading.Event) -> None:
        run = self._resolve(entry)
        released = self._hold(entry, run)
        phases = self.pipelines.steps.setdefault(run.pipeline_run, {})
        for step in STEPS:
            if phases.get(step) != "Succeeded":
                phases[step] = "Running"
                phases[step] = self._run_step(run, step, ended)
            if phases[step] != "Succeeded":
                break
        released.set()
        succeeded = list(phases.values()) == ["Succeeded"] * len(STEPS)
        if run.pipeline_run not in self.kubernetes.workflows:
            return
        if not succeeded and run.pipeline_run not in self._stopped:  # else there is nothing to stop
            # not again after a retry: kubeflow/pipelines, backend/src/common/util/workflow.go, GenerateRetryExecution
            self._stopped.add(run.pipeline_run)
            self._start_step(run, "stop-jobs", 1).wait()
        self.kubernetes.workflows[run.pipeline_run] = "Succeeded" if succeeded else "Failed"
        if not ended.is_set():
            entry["state"] = "SUCCEEDED" if succeeded else "FAILED"
        elif entry["state"] == "CANCELING":
            entry["state"] = "FAILED"
            entry["state_history"].append({"state": "CANCELING"})

    def _run_step(self, run: Run, step: str, ended: threading.Event) -> str:
        """Run a step, again after some time if it fails, and return Argo's phase."""
        for attempt in range(1, self._num_retries + 2):
            pod = self._start_step(run, step, attempt)
            if pod.wait():
                return "Succeeded"
            if pod.deleted.is_set():  # argo, workflow/controller/operator.go: `pod deleted`, which is not tried again
                return "Error"
            if attempt > self._num_retries or ended.wait(self._retry_seconds):
                break
        return "Failed"

    def _start_step(self, run: Run, step: str, attempt: int) -> RunningStep:
        path = [] if run.name.endswith(self.restarted) else [str(LIGHT_TORCHRUN)]
        pod = RunningStep(self.kubernetes, run, step, attempt, os.pathsep.join([*path, str(self.folder)]))
        self._pods[run.pipeline_run] = pod
        return pod

    def _hold(self, entry: dict[str, Any], run: Run) -> threading.Event:
        """Hold the training until it may finish, or the event that is returned is set."""
        hold, released = run.models_dir / "hold", threading.Event()
        hold.touch()

        def release() -> None:
            while not self.may_finish(entry) and not released.wait(0.1):
                pass
            hold.unlink(missing_ok=True)

        threading.Thread(target=release, daemon=True).start()
        return released

    def _resolve(self, entry: dict[str, Any]) -> Run:
        """What the first steps leave on the volumes."""
        parameters = entry["runtime_config"]["parameters"]
        recipe = with_overrides(parse_recipe(parameters["recipe"]), {name: parameters[name] for name in PARAMETERS})
        name = parameters["run_name"] or entry["run_id"]
        directories = {f"{each}_dir": self.folder / each / name for each in ("data", "models", "workspace")}
        run = Run(name=name, recipe=recipe, local=False, pipeline_run=entry["run_id"], **directories)
        for directory, file in ((run.parquet_dir, DATA_FILE), (run.base_model_dir, "weights")):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / file).write_text("the same in every run")
            write_manifest(directory, {}, {})
        return run
