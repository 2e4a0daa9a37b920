"""Texts of a recipe stay what they are on their way through a pipeline server, whatever they look like."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from conftest import tiny_recipe
from kfp.local.placeholder_utils import replace_placeholders

import pipeline_cli
from tailtune.errors import UserError
from tailtune.recipe.load import parse_recipe
from tailtune.run import Run

TEXTS = [
    "Name {{$.pipeline_job_name}} end",
    "{{$.inputs.parameters[0]}}",
    "{{$.inputs.parameters['recipe']}}",
    "{{$}}",
    "{{{$}}}",
    "a\\{{$}}",
    '"{{$.json_escape[1]}}"',
    "{{workflow.name}} {{=sprig.env('HOME')}} {{inputs.parameters.pod-name}}",
    "{{channel:task=;name=run;type=STRING;}}",
    "$(HOME) $$(HOME) ${HOME} $.x",
    "look into /kfp-workspace or {{$.workspace_path}}",
    r"{ {$}} \u007b\u007b$}} \/ \\",
]


def received(**parameters: Any) -> dict[str, Any]:
    """What the program of a local step reads of its parameters."""
    executor_input = {"inputs": {"parameterValues": parameters}, "outputs": {"outputFile": "/out.json"}}
    command = replace_placeholders(
        ["--executor_input", "{{$}}"], executor_input, "the-job", "the-task", "/the-root", "the-id"
    )
    return dict(json.loads(command[1])["inputs"]["parameterValues"])


@pytest.mark.parametrize("text", TEXTS)
def test_no_placeholder_is_replaced_on_the_way_through_the_steps(text: str, make_run: Callable[..., Run]) -> None:
    recipe = tiny_recipe(**{"prompt.system": text})
    arrived = parse_recipe(received(recipe=recipe.to_json(), local=True)["recipe"])
    assert arrived == recipe
    run = make_run("mine").model_copy(update={"recipe": arrived})
    assert Run.from_json(received(run=run.to_json())["run"]) == run


@pytest.mark.parametrize("text", TEXTS)
def test_a_compiled_pipeline_contains_no_placeholder_of_a_recipe(text: str, tmp_path: Path) -> None:
    recipe = tiny_recipe(**{"prompt.system": text})
    pipeline_cli.compile_recipe(recipe, tmp_path / "pipeline.yaml")
    [definition, *_] = yaml.safe_load_all((tmp_path / "pipeline.yaml").read_text(encoding="utf-8"))
    default = definition["root"]["inputDefinitions"]["parameters"]["recipe"]["defaultValue"]
    assert not [each for each in ("{{", "$", "/kfp-workspace") if each in default]
    assert parse_recipe(default).prompt.system == text


def test_the_printed_recipe_can_be_pasted_as_the_parameter() -> None:
    result = CliRunner().invoke(pipeline_cli.main, ["--dry-run", "-p", "prompt.system={{$}} $(HOME)"])
    assert "{{" not in result.stdout and "$" not in result.stdout
    assert json.loads(result.stdout)["recipe"]["prompt"]["system"] == "{{$}} $(HOME)"


@pytest.mark.parametrize("key", ["base_model", "model_revision", "data_source", "gpu", "queue"])
@pytest.mark.parametrize("found", ["{{", "$(", "$$", "/kfp-workspace"])
def test_a_text_that_is_a_parameter_of_its_own_has_no_placeholder(key: str, found: str) -> None:
    with pytest.raises(UserError) as error:
        tiny_recipe(**{key: f"a/{found}x"})
    assert f"contains '{found}', which pipeline servers replace; use a name without it" in str(error.value)
