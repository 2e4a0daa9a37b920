"""Recipes: what a file, an override and an environment variable become. Bad ones: test_bad_inputs.py."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pipeline import parameter_values
from tailtune.config import fill_template, template_fields
from tailtune.errors import UserError
from tailtune.recipe.load import (
    BUILT_IN,
    ENVIRONMENT,
    PARAMETERS,
    list_recipes,
    load_recipe,
    parse_parameters,
    parse_recipe,
    parse_value,
    parse_yaml,
    value_at,
    with_environment,
    with_local_overlay,
    with_overrides,
)
from tailtune.recipe.schema import Data, Prompt, Recipe

SURVIVAL = load_recipe("survival")


@pytest.mark.parametrize("name", list_recipes())
def test_every_built_in_recipe_is_sound_also_with_its_overlay(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    with_local_overlay(recipe)


def test_recipes_and_components_import_without_torch() -> None:
    program = (
        "import sys, tailtune.recipe, tailtune.run, components.train_stage, components.evaluate_model\n"
        "print([name for name in ('torch', 'transformers', 'trl', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_json_loses_nothing() -> None:
    text = SURVIVAL.to_json()
    assert parse_recipe(text) == SURVIVAL
    assert parse_recipe(text).to_json() == text


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SURVIVAL.seed = 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", 2),
        ("2.0", 2.0),
        ("5e-5", 5e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-1_000", -1000),
        ("true", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ("{a: 1}", {"a": 1}),
        ("{}", {}),
        ("'2'", "2"),
        ("off", "off"),
        ("no", "no"),
        ("True", True),
        ("text", "text"),
        ("a: b: c", "a: b: c"),
        ("{question}", "{question}"),
        ("Answer: briefly", "Answer: briefly"),
        ("hf://datasets/a/b@main/c.csv", "hf://datasets/a/b@main/c.csv"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("12:30:45", "12:30:45"),
        ("1:30", "1:30"),
        ("190:20:30.15", "190:20:30.15"),
        ("0o17", "0o17"),
        ("010", "010"),
        ("0x1F", "0x1F"),
        ("0b1", "0b1"),
        ("0", 0),
        ("2024-10-01", "2024-10-01"),
        ("2024-13-01", "2024-13-01"),
        ("=", "="),
        ("{{question}}", "{{question}}"),
        ("[" * 5000, "[" * 5000),
        ("!!int 3", "!!int 3"),
        ("", ""),
        (" ", " "),
    ],
)
def test_values_are_typed_as_in_yaml(text: str, expected: Any) -> None:
    value = parse_value(text)
    assert value == expected and type(value) is type(expected)


def test_off_is_a_word_in_parameters_and_files(tmp_path: Path) -> None:
    """In YAML 1.1 it would be false, and the switch of the tail training would refuse it."""
    by_parameter = with_overrides(load_recipe("survival"), parse_parameters(["stages.0.tail.mode=off"]))
    assert by_parameter.stages[0].tail.mode == "off"
    text = yaml.safe_dump(by_parameter.model_dump(mode="json")).replace("mode: 'off'", "mode: off")
    assert "mode: off\n" in text
    (tmp_path / "mine.yaml").write_text(text)
    assert load_recipe(tmp_path / "mine.yaml").stages[0].tail.mode == "off"


def test_pairs_split_at_the_first_equals_sign_and_the_last_one_counts() -> None:
    assert parse_parameters(["a=b=c", " epochs = 2", "epochs=3"]) == {"a": "b=c", "epochs": 3}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"s3_secret": "my.store"}, "cluster.s3_secret"), ({"training_data_pvc": "a" * 64}, "cluster.data_claim")],
)
def test_names_that_no_volume_can_have_are_refused(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_overrides(load_recipe("survival"), overrides)


TEXTS = (
    "base_model", "model_revision", "data_source", "gpu", "queue", "pipeline_image", "trainer_image",
    "training_data_pvc", "trained_models_pvc", "workspace_pvc", "hf_secret", "s3_secret", "ca_secret",
)  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        *((name, 2, path) for name, path in PARAMETERS.items() if name not in TEXTS),
        ("queue", "team", "resources.queue"),
        ("trainer_image", "quay.io/me/trainer@sha256:0", "cluster.trainer_image"),
        ("workspace_pvc", "my-volume", "cluster.workspace_claim"),
        ("base_model", "owner/name", "model.base_model"),
        ("model_revision", "v1", "model.revision"),
        ("data_source", "rows.csv", "data.source"),
        ("gate.1.threshold", 0.5, "gate.1.threshold"),
        ("demo.questions", ["Why?"], "demo.questions"),
        ("demo.questions.0", "Why?", "demo.questions.0"),
        ("stages.0.trainer.new_argument", 1, "stages.0.trainer.new_argument"),
        ("data.columns.topic", "{topic}", "data.columns.topic"),
        ("hardware.precision", "fp32", "hardware.precision"),
    ],
)  # fmt: skip
def test_an_override_reaches_its_key_and_leaves_the_recipe(key: str, value: Any, path: str) -> None:
    before = SURVIVAL.to_json()
    assert value_at(with_overrides(SURVIVAL, {key: value}), path) == value
    assert SURVIVAL.to_json() == before


def test_an_override_is_checked_like_the_file() -> None:
    with pytest.raises(UserError, match=r"recipe with resources.num_nodes: resources.num_nodes: .* \(got 0\)"):
        with_overrides(SURVIVAL, {"resources.num_nodes": 0})


def test_no_override_is_the_same_object() -> None:
    assert with_overrides(SURVIVAL, {}) is SURVIVAL


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_environment_variables_win(variable: str) -> None:
    recipe = with_environment(SURVIVAL, {variable: "3", "HOME": "/", "SEED": "9"})
    assert value_at(recipe, PARAMETERS[ENVIRONMENT[variable]]) == 3
    assert recipe.seed == SURVIVAL.seed


def test_a_bad_environment_variable_is_refused() -> None:
    with pytest.raises(UserError, match="num_train_epochs must be a finite number above 0, found 'many'"):
        with_environment(SURVIVAL, {"EPOCHS": "many"})


def test_settings_in_the_environment_of_the_ranks_become_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The training key is made of the recipe: a variable that only the ranks saw would not be part of it."""
    caplog.set_level("INFO", "tailtune")
    raw = SURVIVAL.model_dump(mode="json")
    raw["resources"]["environment"] = {"EPOCHS": 7, "NCCL_IB_DISABLE": 1, "BATCH_SIZE": ""}
    (tmp_path / "own.json").write_text(json.dumps(raw))
    recipe = load_recipe(tmp_path / "own.json")
    assert recipe.stages[0].trainer["num_train_epochs"] == 7
    assert recipe.resources.environment == {"NCCL_IB_DISABLE": "1"}
    before = SURVIVAL.stages[0].trainer["per_device_train_batch_size"]
    assert recipe.stages[0].trainer["per_device_train_batch_size"] == before, "an empty variable is none"
    assert "recipe: EPOCHS=7 in resources.environment is the setting epochs" in caplog.messages
    changed = with_overrides(recipe, {"resources.environment.LEARNING_RATE": 1e-5, "epochs": 2})
    assert changed.stages[0].trainer["learning_rate"] == 1e-5 and changed.stages[0].trainer["num_train_epochs"] == 2
    assert changed.resources.environment == {"NCCL_IB_DISABLE": "1"}


def test_a_setting_and_a_variable_with_different_values_are_refused() -> None:
    """As when a recipe is edited in the dashboard, whose form sets every parameter as well."""
    edited = parse_recipe(SURVIVAL.model_copy(update={
        "resources": SURVIVAL.resources.model_copy(update={"environment": {"EPOCHS": "9"}})
    }).to_json())  # fmt: skip
    with pytest.raises(UserError, match=r"epochs is 3, but EPOCHS in resources.environment is 9; set only epochs"):
        with_overrides(edited, {"epochs": 3})
    for overrides in ({"epochs": 9.0}, {"seed": 1}, {}):
        recipe = with_overrides(edited, overrides)
        assert recipe.stages[0].trainer["num_train_epochs"] == 9 and not recipe.resources.environment


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("HF_TOKEN", "no place for secrets; hf_secret and s3_secret name those that are mounted as files"),
        ("AWS_SECRET_ACCESS_KEY", "no place for secrets"),
        ("AWS_ACCESS_KEY_ID", "no place for secrets"),
        ("wandb_api_key", "no place for secrets"),
        ("DB_PASSWORD_FILE", "no place for secrets"),
        *(
            (name, "no place for secrets")
            for name in (
                "HFTOKEN",
                "OPENAI_APIKEY",
                "DB_PASS",
                "MYSQL_PWD",
                "GITHUB_PAT",
                "secret_word",
                "PROXY_AUTH",
                "SENTRY_DSN",
                "SESSION_COOKIE",
                "AZURE_CREDENTIAL_X",
                "PRIVATE_KEY_PEM",
                "KEY",
            )
        ),
        ("LOCAL_RANK", "torchrun and the operator set it; use resources.num_nodes and resources.ranks_per_node"),
        ("WORLD_SIZE", "torchrun and the operator set it"),
        ("MASTER_ADDR", "torchrun and the operator set it"),
        ("PET_NNODES", "torchrun and the operator set it"),
        ("OUTPUT_DIR", "tailtune sets it; leave it out"),
        ("TAILTUNE_OWNER_FILE", "tailtune sets it; leave it out"),
    ],
)
def test_some_variables_are_not_for_recipes(name: str, why: str) -> None:
    with pytest.raises(UserError) as error:
        with_overrides(SURVIVAL, {f"resources.environment.{name}": "hunter2"})
    assert f"resources.environment: {name} cannot be set here: " in str(error.value) and why in str(error.value)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("value", [["hunter2"], {"a": "hunter2"}, "hunter2"])
def test_the_value_of_a_refused_variable_is_not_shown(value: Any) -> None:
    """A value of a wrong type is: the name counts first."""
    with pytest.raises(UserError, match="HF_TOKEN cannot be set here") as error:
        with_overrides(SURVIVAL, {"resources.environment": {"HF_TOKEN": value}})
    assert "hunter2" not in str(error.value)


def test_a_variable_may_be_an_address_without_a_login() -> None:
    good = {"HTTPS_PROXY": "http://proxy:3128"}
    assert with_overrides(SURVIVAL, {"resources.environment": good}).resources.environment == good
    with pytest.raises(UserError, match="HTTPS_PROXY cannot be set here: its address has a login") as error:
        with_overrides(SURVIVAL, {"resources.environment": {"HTTPS_PROXY": "http://u:hunter2@proxy:3128"}})
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("name", ["hub_token", "push_to_hub_token"])
def test_a_trainer_has_no_token(name: str) -> None:
    with pytest.raises(
        UserError, match=f"trainer.{name} cannot be set here: a recipe is no place for secrets"
    ) as error:
        with_overrides(SURVIVAL, {f"stages.0.trainer.{name}": "hunter2"})
    assert "hunter2" not in str(error.value)


def test_other_variables_are_for_recipes() -> None:
    names = ("NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "PAD_TOKEN_ID", "HF_TOKEN_PATH", "NCCL_IB_PKEY", "RANKS", "KEYS")
    recipe = with_overrides(SURVIVAL, {"resources.environment": dict.fromkeys(names, 1.5)})
    assert recipe.resources.environment == dict.fromkeys(names, "1.5")


# -- resources of a stage ---------------------------------------------------------------------------


def test_a_stage_has_the_recipes_resources_except_for_its_own(tmp_path: Path) -> None:
    own = {"num_nodes": 2, "cpu": 8, "node_selector": {"pool": "b"}}
    shared = {"resources.node_selector": {"pool": "a", "disk": "ssd"}, "resources.step_memory": "2Gi"}
    given = with_overrides(SURVIVAL, {**shared, "stages.0.resources": own})
    (tmp_path / "own.json").write_text(given.to_json())
    for recipe in (given, load_recipe(tmp_path / "own.json"), Recipe.model_validate_json(given.model_dump_json())):
        job = recipe.resources_of(recipe.stages[0])
        assert (job.num_nodes, job.cpu, job.node_selector) == (2, "8", {"pool": "b"}), "a mapping as a whole"
        same = {name for name in job.model_fields_set | {*type(job).model_fields} if name not in own}
        assert {name: getattr(job, name) for name in same} == {name: getattr(recipe.resources, name) for name in same}
        assert recipe.resources.cpu == SURVIVAL.resources.cpu, "the steps keep theirs"
        assert recipe.model_dump(mode="json")["stages"][0]["resources"] == {**own, "cpu": "8"}
    assert value_at(SURVIVAL, "stages.0.resources") == {}
    assert SURVIVAL.resources_of(SURVIVAL.stages[0]) == SURVIVAL.resources


def test_parameters_reach_single_resources_of_a_stage() -> None:
    pairs = ["stages.0.resources.deadline_seconds=60", "stages.0.resources.environment.NCCL_DEBUG=WARN"]
    stage = with_overrides(SURVIVAL, parse_parameters(pairs)).stages[0]
    assert stage.resources.deadline_seconds == 60 and stage.resources.environment == {"NCCL_DEBUG": "WARN"}
    recipe = with_overrides(SURVIVAL, parse_parameters([*pairs, "stages.0.resources={}"]))
    assert recipe.resources_of(recipe.stages[0]) == SURVIVAL.resources


def test_a_run_parameter_does_not_change_a_stage_that_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tailtune")
    recipe = with_overrides(SURVIVAL, {"stages.0.resources.num_nodes": 3, "num_nodes": 4, "queue": "team"})
    assert not caplog.messages, "4 is what the recipe has: nobody asked for another number"
    recipe = with_overrides(recipe, {"num_nodes": 2, "queue": "other"})
    job = recipe.resources_of(recipe.stages[0])
    assert (recipe.resources.num_nodes, job.num_nodes, job.queue) == (2, 3, "other")
    assert caplog.messages == ["recipe: num_nodes does not change stages.0, which has its own resources.num_nodes"]
    assert recipe.resource_key(0, "num_nodes") == "stages.0.resources.num_nodes"
    assert recipe.resource_key(0, "queue") == "resources.queue"


@pytest.mark.parametrize(
    ("template", "fields", "filled"),
    [
        ("{answer}", ["answer"], "A"),
        ("For {topic}, {full-question}?", ["topic", "full-question"], "For T, Q?"),
        ("{topic}{topic}", ["topic", "topic"], "TT"),
        ("{{{topic}}}", ["topic"], "{T}"),
        ("plain", [], "plain"),
        ("{number}", ["number"], "3"),
    ],
)
def test_templates(template: str, fields: list[str], filled: str) -> None:
    row = {"answer": "A", "topic": "T", "full-question": "Q", "number": 3}
    assert template_fields(template) == fields
    assert fill_template(template, row) == filled


def test_values_are_not_templates() -> None:
    assert fill_template("{answer}", {"answer": "{topic} 100 %s"}) == "{topic} 100 %s"


def test_merged_yaml_keys_may_be_overridden() -> None:
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}")["b"] == {"x": 1, "y": 3}


def test_paths_are_relative_to_the_recipe_file(tmp_path: Path) -> None:
    raw = SURVIVAL.model_dump(mode="json")
    raw["data"]["source"] = "./rows.csv"
    raw["model"]["base_model"] = "../model"
    raw["local"] = {"data_source": "samples/few.jsonl", "prompt.system": "./not/a/path"}
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine.json").write_text(json.dumps(raw))
    recipe = load_recipe(folder / "mine.json")
    assert recipe.data.source == str(folder / "rows.csv")
    assert recipe.model.base_model == str(tmp_path / "model")
    assert recipe.local == {"data_source": str(folder / "samples/few.jsonl"), "prompt.system": "./not/a/path"}


OWN_VALIDATION = {"data.validation_source": "v.jsonl", "data.split_by": None, "data.validation_share": None}
MESSAGES = {"data.columns": {"turns": "{messages}"}, "data.split_by": "turns", "prompt.user": None,
            "prompt.assistant": None, "prompt.messages": "turns"}  # fmt: skip


def test_several_sources_and_own_validation_rows() -> None:
    recipe = with_overrides(SURVIVAL, {"data_source": ["a.jsonl", "b/"], **OWN_VALIDATION})
    assert recipe.data.all_sources == ["a.jsonl", "b/", "v.jsonl"]
    assert parameter_values(recipe)["data_source"] == '["a.jsonl", "b/"]', "KFP's parameter is a text"
    again = with_overrides(SURVIVAL, {"data_source": parameter_values(recipe)["data_source"]})
    assert again.data.source == recipe.data.source
    assert parse_parameters(["data_source=[a.jsonl, b/]"]) == {"data_source": ["a.jsonl", "b/"]}


@pytest.mark.parametrize("glob", ["[ab]*.jsonl", "[!a]/**/*.csv", "[0-9]"])
def test_a_glob_may_begin_with_a_bracket(glob: str) -> None:
    source = with_overrides(SURVIVAL, {"data_source": glob}).data.source
    assert source == (glob if glob != "[0-9]" else ["0-9"]), "a text that ends with its bracket is a list"


def test_the_validation_share_is_a_tenth_unless_there_are_own_validation_rows() -> None:
    data = {"source": "x", "columns": {"a": "{a}"}}
    assert Data(**data, split_by="a").validation_share == 0.1
    assert Data(**data, validation_source="v").validation_share is None


def test_a_recipe_of_conversations() -> None:
    recipe = with_overrides(SURVIVAL, {**MESSAGES, "prompt.system": None})
    assert recipe.prompt == Prompt(messages="turns")
    assert parse_recipe(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data.validation_source": "v.jsonl"},
         r"data: validation_source and split_by are both given, but validation_source leaves nothing to split; remove "
         r"split_by and validation_share, or set null"),
        ({**OWN_VALIDATION, "data.validation_share": 0.2}, r"validation_source and validation_share are both given"),
        ({"data.split_by": None}, r"data: split_by is missing; add it, or a validation_source"),
        ({"data.validation_share": None}, r"data: validation_share is missing; add it"),
        ({**OWN_VALIDATION, "data.columns.is_validation": "{a}"}, r"columns.is_validation is tailtune's own"),
        ({"data_source": []}, r"data.source: give one source, or a list of them, each a text"),
        ({"data_source": ["a", 5]}, r"data.source: give one source, or a list of them, each a text"),
        ({"data_source": "[a"}, r"data.source: is not a list; write \[\"first.jsonl\""),
        ({"data.optional_columns": ["tpic"]}, r"data: optional_columns names 'tpic', which columns does not use"),
        ({"data_source": '["a", "b"'}, r"data.source: is not a list; write \[\"first.jsonl\""),
        ({"data.optional_columns": ["answer"]},
         r"data.columns.answer, which prompt.assistant uses, consists only of data.optional_columns, so it could be"),
        ({"prompt.messages": "answer"}, r"prompt: messages and user are both given; keep messages, or user and"),
        ({"prompt.user": None}, r"prompt: user is missing; add it, or give messages, a column of conversations"),
        ({"prompt.system": None}, r"prompt: system is missing; add it$"),
        ({**MESSAGES, "prompt.messages": "chat"}, r"prompt.messages is 'chat', which data.columns does not define; it"),
        ({**MESSAGES, "data.columns": {"turns": "Chat: {messages}"}},
         r"data.columns.turns is 'Chat: {messages}', but a conversation is one column as it is; write for example "
         r"'{messages}'"),
    ],
)  # fmt: skip
def test_data_and_prompt_that_do_not_fit_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_overrides(SURVIVAL, overrides)


def test_the_examples_in_the_documentation_are_sound() -> None:
    text = (BUILT_IN.parents[1] / "docs" / "data.md").read_text()
    examples = re.findall(r"(?m)^    data:\n(?:    .*\n)+", text)
    assert len(examples) == 5
    for example in examples:
        given = parse_yaml(textwrap.dedent(example))
        raw = parse_yaml((BUILT_IN / "survival.yaml").read_text())
        if "columns" in given["data"] and "prompt" not in given:
            given["data"]["columns"] |= raw["data"]["columns"]
        if "validation_source" in given["data"]:
            del raw["data"]["split_by"], raw["data"]["validation_share"]
        Recipe.model_validate({**raw, **given, "data": {**raw["data"], **given["data"]}})


def test_globs_and_lists_in_a_recipe_file_are_relative_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    for name in ("part-1.jsonl", "held.jsonl"):
        (folder / name).touch()
    raw = parse_yaml((BUILT_IN / "survival.yaml").read_text())
    del raw["data"]["split_by"], raw["data"]["validation_share"]
    raw["data"] |= {"source": ["part-*.jsonl", "s3://b/c/", "elsewhere.jsonl"], "validation_source": "held.jsonl"}
    raw["local"] = {"data.validation_source": "held.jsonl"}
    (folder / "own.yaml").write_text(yaml.safe_dump(raw))
    recipe = load_recipe(folder / "own.yaml")
    held = str(folder / "held.jsonl")
    assert recipe.data.source == [str(folder / "part-*.jsonl"), "s3://b/c/", "elsewhere.jsonl"]
    assert recipe.data.validation_source == held and recipe.local == {"data.validation_source": held}


def test_overrides_do_not_change_the_callers_values() -> None:
    small = SURVIVAL.model.model_dump()["small"]
    overrides = {"model.small": small, "model.small.model_type": "llama"}
    assert with_overrides(SURVIVAL, overrides).model.small.model_type == "llama"
    assert small["model_type"] == "smollm3"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("prompt.system", "x" * 130_000),
        ("prompt.system", "\u00e9" * 30_000),
        ("prompt.system", '"' * 50_000),
        ("demo.questions", ["short", "y" * 130_000]),
        ("data_source", [f"{i}/{'z' * 3000}.jsonl" for i in range(25)]),
    ],
)
def test_a_recipe_that_no_argument_can_hold_is_refused(key: str, text: Any) -> None:
    with pytest.raises(UserError, match=r"it is too long by [0-9,]+ characters, as a program's argument; the longest"):
        with_overrides(SURVIVAL, {key: text})


def test_the_longest_recipe_is_an_argument() -> None:
    recipe = with_overrides(SURVIVAL, {"prompt.system": 'a"\u00e9' * 9_000})
    assert len(recipe.to_json()) > 40_000
    argument = json.dumps({"inputs": {"parameterValues": {"recipe": recipe.to_json(), "data_dir": "/d" * 2000}}})
    assert subprocess.run(["true", argument], check=False).returncode == 0
    with pytest.raises(UserError, match=r"the longest text is prompt.system \(36,000\); shorten it"):
        with_overrides(recipe, {"prompt.system": 'a"\u00e9\u00e9' * 9_000})


@pytest.mark.parametrize("user", ["{{x}} {full-question}", "{{{full-question}}}", "{{ {full-question} }}"])
def test_doubled_braces_are_braces(user: str) -> None:
    assert with_overrides(SURVIVAL, {"prompt.user": user}).prompt.user == user
