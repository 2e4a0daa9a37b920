"""Run one step in a container, with the command that the compiled pipeline gives the platform; for images/try."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

NAME = "resolve-recipe"
pipeline = next(yaml.safe_load_all((Path(__file__).parent / "compiled" / "survival.yaml").read_text()))
pipeline_parameters = pipeline["root"]["inputDefinitions"]["parameters"]
container = pipeline["deploymentSpec"]["executors"][f"exec-{NAME}"]["container"]
names = pipeline["components"][f"comp-{NAME}"]["inputDefinitions"]["parameters"]
values = {name: pipeline_parameters[name]["defaultValue"] for name in names if name in pipeline_parameters}
# the platform writes 8.0 as 8
values = {
    name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in values.items()
}
with tempfile.TemporaryDirectory() as directory:
    output_file = Path(directory, "executor.json")
    executor_input = {
        "inputs": {"parameterValues": {**values, "job_id": "a-job", "run_name": "a-run"}},
        "outputs": {"parameters": {"Output": {"outputFile": f"{directory}/output"}}, "outputFile": str(output_file)},
    }
    args = [json.dumps(executor_input) if arg == "{{$}}" else arg for arg in container["args"]]
    step = subprocess.run([*container["command"], *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if step.returncode:
        sys.exit(step.stdout)
    run = json.loads(json.loads(output_file.read_text())["parameterValues"]["Output"])
print(f"{NAME}: run {run['name']}, {run['models_dir']}")
