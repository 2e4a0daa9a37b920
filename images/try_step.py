"""For images/try, in a container: run a step with the very command that the compiled pipeline gives the platform."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

NAME = "resolve-recipe"
pipeline = next(yaml.safe_load_all((Path(__file__).parent / "compiled" / "survival.yaml").read_text()))
given = pipeline["root"]["inputDefinitions"]["parameters"]
container = pipeline["deploymentSpec"]["executors"][f"exec-{NAME}"]["container"]
asked = pipeline["components"][f"comp-{NAME}"]["inputDefinitions"]["parameters"]
defaults = {name: given[name]["defaultValue"] for name in asked if name in given}
# the platform writes 8.0 as 8
values = {name: int(one) if isinstance(one, float) and one.is_integer() else one for name, one in defaults.items()}
with tempfile.TemporaryDirectory() as folder:
    told = Path(folder, "executor.json")
    executor_input = {
        "inputs": {"parameterValues": {**values, "job_id": "a-job", "run_name": "a-run"}},
        "outputs": {"parameters": {"Output": {"outputFile": f"{folder}/output"}}, "outputFile": str(told)},
    }
    args = [json.dumps(executor_input) if one == "{{$}}" else one for one in container["args"]]
    done = subprocess.run([*container["command"], *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    run = json.loads(json.loads(told.read_text())["parameterValues"]["Output"])
print(f"{NAME}: run {run['name']}, {run['models_dir']}")
