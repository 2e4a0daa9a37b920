"""The pipeline's command line and what it compiles to."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import pipeline
import pipeline_cli
from tailtune import __version__
from tailtune.recipe.load import (
    PARAMETERS,
    list_recipes,
    load_recipe,
    parse_parameters,
    with_environment,
    with_local_overlay,
    with_overrides,
)

ROOT = Path(pipeline.__file__).parent
STEPS = {
    "root": {"exit-handler-1", "stop-jobs"},
    "exit-handler-1": {"resolve-recipe", "fetch-model", "fetch-dataset", "write-parquet", "train-stage",
                       "evaluate-model", "promotion-gate", "write-report", "condition-2"},
    "condition-2": {"fail-if-rejected"},
}  # fmt: skip
"""Group → its tasks."""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(pipeline_cli.main, list(arguments))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("compiled") / "survival.yaml"
    pipeline_cli.compile_recipe(load_recipe("survival"), path)
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def specification(compiled: str) -> dict[str, Any]:
    return next(yaml.safe_load_all(compiled))


@pytest.fixture
def compiled_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """compiled/ in a directory that a test may change."""
    monkeypatch.setattr(pipeline_cli, "ROOT", tmp_path)
    monkeypatch.setattr(pipeline_cli, "COMPILED", tmp_path / "compiled")
    return shutil.copytree(ROOT / "compiled", tmp_path / "compiled")


# -- compiled files ----------------------------------------------------------------------------------


def test_compiling_twice_gives_the_same_bytes(compiled: str, tmp_path: Path) -> None:
    pipeline_cli.compile_recipe(load_recipe("survival"), tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text(encoding="utf-8") == compiled


def test_the_committed_files_are_current() -> None:
    result = invoke("--check")
    assert result.exit_code == 0 and result.stdout == ""


def test_a_drifted_file_is_shown(compiled_copy: Path) -> None:
    path = compiled_copy / "survival.yaml"
    path.write_text(path.read_text().replace("seed: int [Default: 42.0]", "seed: int [Default: 43.0]"))
    result = invoke("--check")
    assert result.exit_code == 1
    assert "--- compiled/survival.yaml" in result.stdout
    assert "-#    seed: int [Default: 43.0]\n+#    seed: int [Default: 42.0]" in result.stdout


def test_a_missing_and_an_orphaned_file_are_shown(compiled_copy: Path) -> None:
    (compiled_copy / "survival.yaml").rename(compiled_copy / "old.yaml")
    result = invoke("--check")
    assert result.exit_code == 1
    assert "old.yaml: no recipe of this name\n" in result.stdout
    assert "+++ recompiled" in result.stdout


def test_compiling_repairs_a_drift(compiled_copy: Path, compiled: str) -> None:
    (compiled_copy / "survival.yaml").write_text("")
    result = invoke()
    assert result.stdout.splitlines() == [f"compiled/{name}.yaml" for name in list_recipes()]
    assert (compiled_copy / "survival.yaml").read_text(encoding="utf-8") == compiled


def test_compiled_files_do_not_depend_on_the_machine(compiled: str, specification: dict[str, Any]) -> None:
    """They contain no path of this checkout, no project or registry, and no image tag that may change its content."""
    assert "lyric-professor" not in compiled and "image-registry" not in compiled
    assert ":latest" not in compiled
    assert str(ROOT) not in compiled and str(Path.home()) not in compiled
    assert json.loads(inputs(specification)["recipe"]["defaultValue"])["local"] == {}


def inputs(specification: dict[str, Any]) -> dict[str, Any]:
    return specification["root"]["inputDefinitions"]["parameters"]


def test_the_images_are_parameters_of_the_run(specification: dict[str, Any]) -> None:
    """One file serves every project and registry; the defaults are image streams of the run's own project."""
    for name, executor in specification["deploymentSpec"]["executors"].items():
        image = "trainer" if name in ("exec-evaluate-model", "exec-write-report") else "pipeline"
        expected = f"{{{{$.inputs.parameters['pipelinechannel--{image}_image']}}}}"
        assert executor["container"]["image"] == expected, name
    for image in ("pipeline", "trainer"):
        assert inputs(specification)[f"{image}_image"]["defaultValue"] == f"tailtune-{image}:{__version__}"


def test_the_tasks_and_the_branches(specification: dict[str, Any]) -> None:
    assert {group: set(tasks(specification, group)) for group in STEPS} == STEPS
    end = tasks(specification, "root")["stop-jobs"]
    assert end["dependentTasks"] == ["exit-handler-1"], "it runs last"
    assert end["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED", "and also when the rest has failed"
    steps = tasks(specification, "exit-handler-1")
    assert "dependentTasks" not in steps["resolve-recipe"]
    for name in ("fetch-dataset", "fetch-model"):  # side by side
        assert steps[name]["dependentTasks"] == ["resolve-recipe"]
    assert set(steps["write-parquet"]["dependentTasks"]) == {"fetch-dataset", "resolve-recipe"}
    assert set(steps["train-stage"]["dependentTasks"]) >= {"fetch-model", "write-parquet"}
    assert "promotion-gate" in steps["write-report"]["dependentTasks"]
    rejected = steps["condition-2"]
    assert rejected["taskInfo"]["name"] == "rejected" and "write-report" in rejected["dependentTasks"]
    condition = rejected["triggerPolicy"]["condition"]
    assert condition == "inputs.parameter_values['pipelinechannel--promotion-gate-Output'] == 'fail'"


def test_only_a_run_that_may_end_without_new_data_has_a_condition_for_it(
    specification: dict[str, Any], compiled_copy: Path, tmp_path: Path
) -> None:
    """Each condition is one more pod to wait for."""
    survival = load_recipe("survival")
    wanted = with_overrides(survival, {"data.skip_unchanged": True})
    assert pipeline_cli.compiled_file(survival, survival, tmp_path) == compiled_copy / "survival.yaml"
    path = pipeline_cli.compiled_file(survival, wanted, tmp_path)
    assert path == tmp_path / "survival.yaml"
    with_condition = next(yaml.safe_load_all(path.read_text()))
    steps = tasks(with_condition, "exit-handler-1")
    assert set(steps["condition-2"]["dependentTasks"]) >= {"fetch-model", "write-parquet"}
    new_data = steps["condition-2"]["triggerPolicy"]["condition"]
    assert new_data == "inputs.parameter_values['pipelinechannel--write-parquet-Output'] != ''"
    assert {"train-stage", "write-report", "condition-3"} <= tasks(with_condition, "condition-2").keys()
    for compiled, may_end in ((specification, False), (with_condition, True)):
        inputs_of_step = tasks(compiled, "exit-handler-1")["write-parquet"]["inputs"]["parameters"]
        assert inputs_of_step["may_end"]["runtimeValue"]["constant"] is may_end


def tasks(specification: dict[str, Any], group: str) -> dict[str, Any]:
    component = specification["root"] if group == "root" else specification["components"][f"comp-{group}"]
    return dict(component["dag"]["tasks"])


def test_every_parameter_that_a_task_or_its_pod_takes_is_one_of_its_group(
    compiled: str, specification: dict[str, Any]
) -> None:
    """The server's driver fails otherwise, when the run comes to the task: kubeflow/pipelines,
    backend/src/v2/driver/resolve.go, "parent DAG does not have input parameter"."""
    platform = list(yaml.safe_load_all(compiled))[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    components = specification["components"]
    for group, component in [("root", specification["root"]), *components.items()]:
        has = component.get("inputDefinitions", {}).get("parameters", {}).keys()
        for name, task in component.get("dag", {}).get("tasks", {}).items():
            taken = list(task.get("inputs", {}).get("parameters", {}).values())
            pod = platform.get(components[task["componentRef"]["name"]].get("executorLabel"), {})
            taken += [volume["pvcNameParameter"] for volume in pod.get("pvcMount", [])]
            taken += [volume["secretNameParameter"] for volume in pod.get("secretAsVolume", [])]
            missing = {each["componentInputParameter"] for each in taken if "componentInputParameter" in each} - has
            assert not missing, f"{name} in {group}"


def test_the_parameters_default_to_the_recipe(specification: dict[str, Any]) -> None:
    survival = load_recipe("survival")
    defaults = {name: inputs(specification)[name]["defaultValue"] for name in PARAMETERS}
    assert defaults == pipeline.parameter_values(survival)
    assert inputs(specification)["learning_rate"]["parameterType"] == "NUMBER_DOUBLE"
    assert inputs(specification)["num_nodes"]["parameterType"] == "NUMBER_INTEGER"


def test_every_step_mounts_the_three_volumes_by_the_runs_own_claims(
    compiled: str, specification: dict[str, Any]
) -> None:
    platform = list(yaml.safe_load_all(compiled))[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    without = {"exec-stop-jobs", "exec-resolve-recipe"}  # a missing volume must not block them
    steps = specification["deploymentSpec"]["executors"].keys() - without
    assert platform.keys() == steps
    for executor in platform.values():
        mounts = {m["mountPath"]: m["pvcNameParameter"]["componentInputParameter"].removeprefix("pipelinechannel--")
                  for m in executor["pvcMount"]}  # fmt: skip
        assert mounts == {"/shared/data": "training_data_pvc", "/shared/models": "trained_models_pvc",
                          "/shared/workspace": "workspace_pvc"}  # fmt: skip


def test_only_the_steps_that_fetch_see_the_secrets_as_files(compiled: str, specification: dict[str, Any]) -> None:
    platform = list(yaml.safe_load_all(compiled))[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for name, executor in specification["deploymentSpec"]["executors"].items():
        secrets = {s["mountPath"]: (s["secretNameParameter"]["componentInputParameter"], s["optional"])
                   for s in platform.get(name, {}).get("secretAsVolume", [])}  # fmt: skip
        environment = {e["name"]: e["value"] for e in executor["container"].get("env", [])}
        if name not in ("exec-fetch-dataset", "exec-fetch-model", "exec-train-stage"):
            assert not secrets and not environment
            continue
        assert secrets == {
            f"/etc/tailtune/{kind}": (f"pipelinechannel--{kind}_secret", True) for kind in ("hf", "s3", "ca")
        }
        assert environment == {"HF_TOKEN_PATH": "/etc/tailtune/hf/token", "TAILTUNE_S3_SECRET_DIR": "/etc/tailtune/s3",
                               "TAILTUNE_CA_FILE": "/etc/tailtune/ca/ca-bundle.crt"}  # fmt: skip


def container_resources(compiled: str) -> dict[str, dict[str, Any]]:
    """CPU, memory and accelerator of each step."""
    executors = next(yaml.safe_load_all(compiled))["deploymentSpec"]["executors"]
    return {
        name.removeprefix("exec-"): executor["container"].get("resources", {}) for name, executor in executors.items()
    }


def test_pages_and_metrics_are_artifacts_that_the_dashboard_shows(specification: dict[str, Any]) -> None:
    shown = {
        (step.removeprefix("comp-"), name): artifact["artifactType"]["schemaTitle"]
        for step, component in specification["components"].items()
        for name, artifact in component.get("outputDefinitions", {}).get("artifacts", {}).items()
    }
    assert shown == {
        ("write-parquet", "facts"): "system.Metrics", ("write-parquet", "note"): "system.Markdown",
        ("train-stage", "summary"): "system.Metrics", ("evaluate-model", "metrics"): "system.Metrics",
        ("promotion-gate", "page"): "system.Markdown", ("promotion-gate", "verdict"): "system.Artifact",
        ("write-report", "report"): "system.HTML",
    }  # fmt: skip


def test_every_step_asks_for_cpu_and_memory(compiled: str) -> None:
    """A quota may demand it, and a small default limit would kill a step that imports torch."""
    resources = load_recipe("survival").resources
    for step, asked in container_resources(compiled).items():
        models = step in ("evaluate-model", "write-report")
        values = (asked["resourceCpuRequest"], asked["resourceCpuLimit"], asked["resourceMemoryRequest"],
                  asked["resourceMemoryLimit"])  # fmt: skip
        assert values == (
            (resources.cpu_request, resources.cpu, resources.memory_request, resources.memory)
            if models
            else (resources.step_cpu_request, resources.step_cpu, resources.step_memory_request, resources.step_memory)
        ), step
        gpu = "{{$.inputs.parameters['pipelinechannel--gpu']}}" if models else None
        assert asked.get("accelerator", {}).get("resourceType") == gpu, step


def test_nodes_and_queue_are_those_of_the_training_job_for_every_step(tmp_path: Path) -> None:
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    placement = {"resources.tolerations": [toleration], "resources.node_selector": {"pool": "a"}, "queue": "tailtune"}
    recipe = with_overrides(load_recipe("survival"), placement)
    pipeline_cli.compile_recipe(recipe, tmp_path / "placed.yaml")
    specification, platform = yaml.safe_load_all((tmp_path / "placed.yaml").read_text())
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert executors.keys() == specification["deploymentSpec"]["executors"].keys()
    for step, executor in executors.items():
        assert executor["tolerations"] == [toleration], step
        assert executor["nodeSelector"] == {"labels": {"pool": "a"}}, step
        labels = executor.get("podMetadata", {}).get("labels")
        assert labels == (None if step == "exec-stop-jobs" else {"kueue.x-k8s.io/queue-name": "tailtune"}), step


def test_the_resources_of_a_stage_are_those_of_its_job_alone(compiled: str, tmp_path: Path) -> None:
    own = {"memory": "40Gi", "cpu": 12, "queue": "large", "node_selector": {"pool": "b"}}
    recipe = with_overrides(load_recipe("survival"), {"stages.0.resources": own})
    pipeline_cli.compile_recipe(recipe, tmp_path / "own.yaml")
    text = (tmp_path / "own.yaml").read_text()
    assert container_resources(text) == container_resources(compiled)
    platforms = [list(yaml.safe_load_all(each))[1] for each in (text, compiled)]
    assert platforms[0] == platforms[1]


def test_steps_that_may_lose_their_node_are_retried(specification: dict[str, Any]) -> None:
    everything = {name: task for group in STEPS for name, task in tasks(specification, group).items()}
    retried = {name for name, task in everything.items() if task.get("retryPolicy", {}).get("maxRetryCount")}
    longest = load_recipe("survival").resources.deadline_seconds * 3
    assert all(int(everything[name]["retryPolicy"]["backoffMaxDuration"].rstrip("s")) > longest for name in retried)
    assert retried == {"fetch-dataset", "fetch-model", "train-stage"}
    assert not any(task.get("cachingOptions", {}).get("enableCache") for task in everything.values())


def test_compile_time(tmp_path: Path) -> None:
    """Under 3 s on an idle laptop; a busy machine gets more time."""
    program = (
        "import sys; from pathlib import Path; import pipeline_cli; from tailtune.recipe.load import load_recipe\n"
        "pipeline_cli.compile_recipe(load_recipe('survival'), Path(sys.argv[1]))\n"
        "print('torch' in sys.modules)"
    )
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path / "survival.yaml")], cwd=ROOT,
                            capture_output=True, text=True, check=True)  # fmt: skip
    seconds = time.monotonic() - start
    print(f"compiled in {seconds:.1f} s")
    assert seconds < 10
    assert result.stdout == "False\n", "compiling needs no torch"


# -- the command line --------------------------------------------------------------------------------


def test_list() -> None:
    lines = invoke("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == list_recipes()
    assert load_recipe("survival").description in lines[list_recipes().index("survival")]
    assert all(name in lines[-1] for name in PARAMETERS)


def dry_run(*arguments: str) -> dict[str, Any]:
    result = invoke("--dry-run", *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "", "only the JSON is printed"
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("pair", "path", "expected"),
    [
        ("epochs=2", "stages.0.trainer.num_train_epochs", 2),
        ("epochs=0.5", "stages.0.trainer.num_train_epochs", 0.5),
        ("learning_rate=3e-4", "stages.0.trainer.learning_rate", 0.0003),
        ("stages.0.trainer.warmup_steps=10", "stages.0.trainer.warmup_steps", 10),
        ("stages.0.trainer.weight_decay=0.1", "stages.0.trainer.weight_decay", 0.1),
        ("stages.0.train_weights.head=false", "stages.0.train_weights.head", False),
        ("data.max_rows=100", "data.max_rows", 100),
        ("data.sha256=null", "data.sha256", None),
        ("demo.questions=['How?', 'Why?']", "demo.questions", ["How?", "Why?"]),
        ("gate.2.threshold=0.5", "gate.2.threshold", 0.5),
        ("model_revision=a=b", "model.revision", "a=b"),
        ("prompt.system=Answer: briefly", "prompt.system", "Answer: briefly"),
        ("prompt.user={full-question}", "prompt.user", "{full-question}"),
    ],
)
def test_dry_run_shows_typed_values(pair: str, path: str, expected: Any) -> None:
    value: Any = dry_run("-p", pair)["recipe"]
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    assert value == expected and type(value) is type(expected)


def test_dry_run_shows_parameters_as_the_dashboard_would() -> None:
    shown = dry_run("-p", "epochs=2", "-p", "resources.num_nodes=3")
    assert shown["parameters"]["epochs"] == 2.0 and shown["parameters"]["num_nodes"] == 3
    assert dry_run()["recipe"] == json.loads(load_recipe("survival").to_json())


def test_dry_run_shows_the_resources_of_every_job() -> None:
    shown = dry_run("-p", "stages.0.resources.memory=80Gi", "-p", "num_nodes=2")
    resources = shown["recipe"]["resources"]
    assert shown["jobs"] == {"sft": {**resources, "memory": "80Gi"}} and resources["memory"] == "20Gi"
    assert shown["jobs"]["sft"]["num_nodes"] == 2


def test_dry_run_with_local_shows_the_overlay() -> None:
    assert dry_run()["parameters"]["base_model"] == "HuggingFaceTB/SmolLM3-3B"
    assert dry_run("--local")["parameters"]["base_model"] == "small"
    assert dry_run("--local", "-p", "base_model=owner/name")["parameters"]["base_model"] == "owner/name"


def test_paths_in_parameters_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.csv").write_text("")
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    shown = dry_run("--local", "-p", "data_source=rows.csv", "-p", "base_model=small")["parameters"]
    assert shown["data_source"] == str(tmp_path / "rows.csv")
    assert shown["base_model"] == "small", "the word, not the directory"
    assert dry_run("-p", "data_source=hf://datasets/a/b")["parameters"]["data_source"] == "hf://datasets/a/b"


# -- precedence: recipe < local overlay < -p < environment -------------------------------------------

KEY = "stages.0.trainer.learning_rate"


@pytest.mark.parametrize(
    ("local", "parameters", "environment", "expected"),
    [
        pytest.param(False, [], {}, 5e-5, id="recipe"),
        pytest.param(True, [], {}, 1e-3, id="overlay over recipe"),
        pytest.param(False, ["learning_rate=2e-4"], {}, 2e-4, id="parameter over recipe"),
        pytest.param(True, ["learning_rate=2e-4"], {}, 2e-4, id="parameter over overlay"),
        pytest.param(True, [f"{KEY}=2e-4"], {}, 2e-4, id="dotted key over overlay"),
        pytest.param(True, [f"{KEY}=2e-4", "learning_rate=3e-4"], {}, 3e-4, id="the later parameter"),
        pytest.param(False, [], {"LEARNING_RATE": "7e-5"}, 7e-5, id="environment over recipe"),
        pytest.param(True, ["learning_rate=2e-4"], {"LEARNING_RATE": "7e-5"}, 7e-5, id="environment over all"),
        pytest.param(True, ["learning_rate=2e-4"], {"LEARNING_RATE": ""}, 2e-4, id="empty variable is none"),
        pytest.param(True, ["learning_rate=2e-4"], {"EPOCHS": "9"}, 2e-4, id="another variable"),
    ],
)
def test_precedence(local: bool, parameters: list[str], environment: dict[str, str], expected: float) -> None:
    recipe = load_recipe("survival")
    recipe = with_local_overlay(recipe) if local else recipe
    recipe = with_environment(with_overrides(recipe, parse_parameters(parameters)), environment)
    assert recipe.stages[0].trainer["learning_rate"] == expected
