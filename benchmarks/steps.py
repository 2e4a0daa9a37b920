"""Times every step of a finished local run once more, each alone, as Kubeflow Pipelines' executor runs it.

    make demo && python benchmarks/steps.py runs/demo

The commands are those of compiled/survival.yaml, with the Python of this process. Nothing has to be done, so this is
what a step costs when a run is started again. `stop-jobs` needs a cluster, and `fail-if-rejected` a rejected model.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pipeline import parameter_values
from tailtune.run import Run, local_directories

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("resolve-recipe", "fetch-dataset", "fetch-model", "write-parquet", "train-stage", "evaluate-model",
         "promotion-gate", "write-report")  # fmt: skip
ALONE = {"Python alone": "pass", "Python and KFP's executor": "import kfp.dsl.executor_main"}
REPEATS = 3


def executor_input(component: dict[str, Any], values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the launcher of Kubeflow Pipelines gives a step: values of its inputs, and where its outputs go."""
    outputs = component.get("outputDefinitions", {})
    artifacts = {
        name: {"artifacts": [{"name": name, "type": kind["artifactType"], "uri": str(folder / name), "metadata": {}}]}
        for name, kind in outputs.get("artifacts", {}).items()
    }
    parameters = {name: {"outputFile": str(folder / name)} for name in outputs.get("parameters", {})}
    return {
        "inputs": {"parameterValues": {name: values[name] for name in component["inputDefinitions"]["parameters"]}},
        "outputs": {"parameters": parameters, "artifacts": artifacts, "outputFile": str(folder / "outputs.json")},
    }


def show(name: str, command: list[str], environment: dict[str, str]) -> None:
    """Print the medians of the repetitions, after a warm-up: seconds, and CPU seconds of all processes."""
    seconds, cpu_seconds = [], []
    for _ in range(REPEATS + 1):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, env=environment, cwd=ROOT, capture_output=True)
        seconds.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"| {name} | {statistics.median(seconds[1:]):.1f} | {statistics.median(cpu_seconds[1:]):.1f} |", flush=True)


@click.command()
@click.argument("directory", type=click.Path(exists=True, path_type=Path))
def main(directory: Path) -> None:
    specification = next(yaml.safe_load_all((ROOT / "compiled" / "survival.yaml").read_text(encoding="utf-8")))
    text = (directory / "workspace" / "run.json").read_text(encoding="utf-8")
    run = Run.from_json(text)
    (source,) = (path for path in run.raw_dir.iterdir() if path.name != "manifest.json")
    values = {**parameter_values(run.recipe), **local_directories(directory.resolve()), "recipe": run.recipe.to_json(),
              "run_name": run.name, "job_id": "", "local": True, "run": text, "source": str(source), "may_end": False,
              "data_dir": str(run.parquet_dir), "tuned_model_dir": str(run.best_model_dir),
              "evaluation": str(run.evaluation_path)}  # fmt: skip
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "_KFP_RUNTIME": "true"}
    print("| step | seconds | CPU seconds |\n|---|---:|---:|")
    for name, program in ALONE.items():
        show(name, [sys.executable, "-c", program], environment)
    for name in STEPS:
        container = specification["deploymentSpec"]["executors"][f"exec-{name}"]["container"]
        own = values | (local_directories(directory.resolve()) if name == "resolve-recipe" else {})
        with tempfile.TemporaryDirectory() as folder:
            given = json.dumps(executor_input(specification["components"][f"comp-{name}"], own, Path(folder)))
            command = [part.replace("{{$}}", given) for part in container["command"] + container["args"]]
            show(name, command, environment)


if __name__ == "__main__":
    main()
