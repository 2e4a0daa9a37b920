"""Load recipes and override their values.

A recipe is a YAML file. Its values are overridden by its own `local:` overlay (local runs only), then by run parameters
(`-p`, the dashboard). An override names a dotted key, for example `stages.0.trainer.learning_rate`; `PARAMETERS` has
short names for the common ones. `EPOCHS`, `BATCH_SIZE` and `LEARNING_RATE` in `resources.environment` of the file, the
overlay or the parameters are settings too, and override those of the same source. In the environment of a local run, or
of ranks that are started by hand, they override everything.
"""

import copy
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tailtune.config import Config
from tailtune.errors import UserError, did_you_mean
from tailtune.files import matching_paths, parse_json
from tailtune.log import log
from tailtune.recipe.addresses import REMEDY, without_secrets
from tailtune.recipe.schema import REMOVED_TAIL_KEYS, RENAMED, UNION_TAGS, Recipe
from tailtune.recipe.values import check_values, cut, parse_value, parse_yaml, shown, texts

BUILT_IN = Path(__file__).resolve().parent.parent / "recipes"
PARAMETERS: dict[str, str] = {
    "base_model": "model.base_model",
    "model_revision": "model.revision",
    "data_source": "data.source",
    "epochs": "stages.0.trainer.num_train_epochs",
    "batch_size": "stages.0.trainer.per_device_train_batch_size",
    "learning_rate": "stages.0.trainer.learning_rate",
    "num_nodes": "resources.num_nodes",
    "ranks_per_node": "resources.ranks_per_node",
    "gpu": "resources.gpu",
    "queue": "resources.queue",
    "pipeline_image": "cluster.pipeline_image",
    "trainer_image": "cluster.trainer_image",
    "training_data_pvc": "cluster.data_claim",
    "trained_models_pvc": "cluster.models_claim",
    "workspace_pvc": "cluster.workspace_claim",
    "hf_secret": "cluster.hf_secret",
    "s3_secret": "cluster.s3_secret",
    "ca_secret": "cluster.ca_secret",
    "seed": "seed",
}
"""Run parameter → dotted key of the recipe."""
ENVIRONMENT: dict[str, str] = {
    "EPOCHS": "epochs",
    "BATCH_SIZE": "batch_size",
    "LEARNING_RATE": "learning_rate",
}
"""Environment variable of the ranks → run parameter."""
PATH_KEYS = ("data.source", "data.validation_source", "model.base_model", "data_source", "base_model")
"""Keys and run parameters whose value may be a path on this machine."""
FREE_KEYS = ("trainer", "columns", "local", "environment", "node_selector")
"""Mappings whose keys the user chooses."""
MAX_BYTES = 512 << 10
"""Of a recipe file."""
MAX_ARGUMENT = 120_000
"""Characters. Linux takes 128 KiB in one argument, which has a run's directories and parameters as well."""


def list_recipes() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


def load_recipe(name_or_path: str | os.PathLike[str]) -> Recipe:
    """Load a built-in recipe by name, or a user's file by path.

    Paths in the file (`PATH_KEYS`, also in `local:`) are relative to the file. Raises UserError that names the field
    and the remedy.
    """
    text = os.fspath(name_or_path)
    if text in list_recipes():
        path = BUILT_IN / f"{text}.yaml"
    elif text.endswith((".yaml", ".yml", ".json")) or os.sep in text:
        path = Path(text)
    else:
        raise UserError(
            f"no recipe '{text}'{did_you_mean(text, list_recipes())}",
            f"built in: {', '.join(list_recipes())}; or give a path that ends in .yaml",
        )
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"recipe file {path} is larger than {MAX_BYTES >> 10} KiB", "is this another file?")
        decoded = content.decode("utf-8-sig")
        raw = parse_json(decoded) if kind == "JSON" else parse_yaml(decoded)
    except FileNotFoundError:
        raise UserError(f"recipe file {path} does not exist", "check the path, or see --list") from None
    except OSError as error:
        raise UserError(f"recipe file {path} cannot be read: {error.strerror}", "give a readable YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"recipe file {path} cannot be read: {error}", "save it as UTF-8") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"recipe file {path}: {error}", f"correct the {kind}") from None
    if not isinstance(raw, dict):
        raise UserError(
            f"recipe file {path} contains no mapping", "start from a built-in one (tailtune/recipes/survival.yaml)"
        )
    return _with_settings_of_environment(_validate(raw, source=str(path), folder=path.parent))


def parse_recipe(text: str) -> Recipe:
    """Return the recipe of a JSON text, the form in which it is a parameter of the pipeline. Raises UserError."""
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise UserError(
            f"parameter 'recipe' is not JSON ({error})",
            "leave it at its default, or paste the value of `recipe` that `pipeline.py --dry-run` prints",
        ) from None
    if not isinstance(raw, dict):
        raise UserError("parameter 'recipe' is not a JSON object", "leave it at its default")
    return _validate(raw, source="parameter 'recipe'")


def with_overrides(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """Return the recipe with run parameters and dotted keys replaced.

    Raises UserError for unknown keys, for a setting whose variable in `resources.environment` has another value, and
    for such a variable of a single stage. Logs changes of `resources` that a stage's own value keeps from its job.
    """
    if not overrides:
        return _with_settings_of_environment(recipe)
    raw = recipe.model_dump(mode="json")
    for key, value in overrides.items():
        _set(raw, key, copy.deepcopy(value))  # a later key may be inside it
    changed = _validate(raw, source=cut("with " + ", ".join(overrides), 200))
    given = {PARAMETERS.get(key, key): key for key in overrides}
    for name, text in changed.resources.environment.items():
        setting = given.get(PARAMETERS[ENVIRONMENT[name]]) if name in ENVIRONMENT else None
        if setting and text and parse_value(text) != overrides[setting]:
            problem = f"{setting} is {overrides[setting]}, but {name} in resources.environment is {text}"
            raise UserError(problem, f"set only {setting}")
    for path, key in given.items():
        section, _, field = path.rpartition(".")
        for index, stage in enumerate(changed.stages):
            own = section == "resources" and field in stage.resources.model_fields_set
            if own and getattr(changed.resources, field) != getattr(recipe.resources, field):
                log.warning("recipe: %s does not change stages.%d, which has its own resources.%s", key, index, field)
    return _with_settings_of_environment(changed)


def with_local_overlay(recipe: Recipe) -> Recipe:
    """Return the recipe with its own `local:` overrides, as it runs on this machine."""
    try:
        return with_overrides(recipe, recipe.local)
    except UserError as error:
        raise UserError(f"the recipe's local: overlay: {error.problem}", error.remedy) from None


def with_environment(recipe: Recipe, environment: Mapping[str, str]) -> Recipe:
    """Return the recipe with the settings that are in the ranks' environment (`EPOCHS`, …)."""
    texts = {name: environment[name] for name in ENVIRONMENT if environment.get(name)}
    return with_overrides(recipe, {ENVIRONMENT[name]: parse_value(text) for name, text in texts.items()})


def parse_parameters(pairs: Iterable[str]) -> dict[str, Any]:
    """Return the overrides of `KEY=VALUE` texts. Raises UserError for a text without `=`."""
    overrides = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"-p {cut(without_secrets(pair))}: write KEY=VALUE, for example -p epochs=2")
        overrides[key.strip()] = parse_value(text)
    return overrides


def value_at(recipe: Recipe, key: str) -> Any:
    """Return the value at a parameter name or dotted key."""
    value: Any = recipe.model_dump(mode="json")
    for part in PARAMETERS.get(key, key).split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set one value of the raw recipe by parameter name or dotted key."""
    path = PARAMETERS.get(key, key).split(".")
    key = cut(key)
    if path[0] == "local":
        remedy = f"set {cut('.'.join(path[1:])) or 'the keys in it'} itself"
        raise UserError(f"'{key}' has no effect: local: is applied to the recipe before parameters", remedy)
    parent: Any = raw
    for depth, part in enumerate(path):
        is_last = depth == len(path) - 1
        prefix = cut(".".join(path[:depth]))
        if isinstance(parent, list):
            if not re.fullmatch(r"[0-9]{1,4}", part):
                remedy = f"write '{cut('.'.join([prefix, '0', *path[depth:]]))}'"
                raise UserError(f"unknown key '{key}': '{prefix}' has entries 0 to {len(parent) - 1}", remedy)
            if int(part) >= len(parent):
                raise UserError(f"unknown key '{key}': '{prefix}' has entries 0 to {len(parent) - 1}")
            index: Any = int(part)
        elif isinstance(parent, dict):
            is_partial = re.fullmatch(r"stages\.\d+\.resources", prefix) is not None  # the schema knows its keys
            has_free_keys = is_partial or (depth >= 1 and path[depth - 1] in FREE_KEYS)
            if is_partial and part in FREE_KEYS:
                parent.setdefault(part, {})
            if part not in parent and part in RENAMED:
                raise UserError(f"'{key}' is now '{'.'.join([*path[:depth], RENAMED[part]])}'", "use that key")
            if prefix.endswith(".tail") and part in REMOVED_TAIL_KEYS:
                problem = f"'{key}' is no longer a recipe key (only benchmarks/tail.py can still change it)"
                raise UserError(problem, "leave it out")
            if part not in parent and not (has_free_keys and is_last):
                known = [f"{prefix}.{name}" if prefix else name for name in parent]
                known += list(PARAMETERS) if depth == 0 else []
                hint = did_you_mean(".".join(path[: depth + 1]), known)
                raise UserError(f"unknown key '{key}'{hint}", f"known here: {', '.join(known)}")
            index = part
        else:
            problem = f"unknown key '{key}': '{prefix}' is a single value, not a section"
            raise UserError(problem, f"set '{prefix}' itself")
        if is_last:
            parent[index] = value
        else:
            parent = parent[index]


def _with_settings_of_environment(recipe: Recipe) -> Recipe:
    """Return the recipe with `EPOCHS`, `BATCH_SIZE` and `LEARNING_RATE` moved from `resources.environment` to settings.

    The training key is made of settings. With variables that only the ranks see, they would train another model.
    Raises UserError for these variables in the resources of a single stage, which can set the argument itself.
    """
    for index, stage in enumerate(recipe.stages):
        for name in ENVIRONMENT.keys() & stage.resources.environment.keys():
            setting = PARAMETERS[ENVIRONMENT[name]].replace("stages.0.", f"stages.{index}.")
            raise UserError(f"{name} in stages.{index}.resources.environment is a setting", f"set {setting}")
    environment = recipe.resources.environment
    moved = {name: environment[name] for name in ENVIRONMENT if name in environment}
    if not moved:
        return recipe
    for name, text in moved.items():
        log.info("recipe: %s=%s in resources.environment is the setting %s", name, text, ENVIRONMENT[name])
    others = {name: text for name, text in environment.items() if name not in moved}
    return with_environment(with_overrides(recipe, {"resources.environment": others}), moved)


def _validate(raw: dict[str, Any], source: str, folder: Path | None = None) -> Recipe:
    """Return the recipe. Paths in it are relative to `folder`."""
    check_values(raw, source)
    try:
        recipe = Recipe.model_validate(_with_absolute_paths(raw, folder) if folder else raw)
    except ValidationError as error:
        # an unknown key first: it is the likely cause of a key that is missing
        problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        described = "; ".join(_describe(problem) for problem in problems[:3])
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(f"recipe {source}: {described}{more}") from None
    check_values(recipe.model_dump(mode="json"), source)  # a text may have become a number
    _check_size(recipe, source)
    return recipe


def _check_size(recipe: Recipe, source: str) -> None:
    """Raise UserError for a recipe that does not fit, with its escapes and its sources, into one argument of a step."""
    size = len(json.dumps(recipe.to_json())) + len(json.dumps(json.dumps(recipe.data.source)))
    if size > MAX_ARGUMENT:
        key, text = max(texts(recipe.model_dump(mode="json")), key=lambda item: len(item[1]))
        problem = f"recipe {source}: it is too long by {size - MAX_ARGUMENT:,} characters, as a program's argument"
        raise UserError(f"{problem}; the longest text is {cut(key)} ({len(text):,})", "shorten it")


def _describe(problem: Any) -> str:
    """Describe one of pydantic's errors: the field, what is wrong, and the remedy."""
    is_unknown = problem["type"] == "extra_forbidden"
    *parents, last = problem["loc"] or ("recipe",)
    key = [part for part in parents if part not in UNION_TAGS]
    key += [last] if is_unknown or last not in UNION_TAGS else []
    field = cut(".".join(map(str, key)))
    if is_unknown:
        known = _fields_at(key[:-1])
        return f"{field}: unknown key{did_you_mean(str(key[-1]), known)}; known: {', '.join(known)}"
    if problem["type"] == "missing":
        return f"{field}: is missing; add it"
    detail = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    return f"{field}: {detail}" + ("" if isinstance(given, dict) or REMEDY in detail else f" (got {shown(given)})")


def _fields_at(location: Sequence[Any]) -> list[str]:
    """Return the field names of the configuration class at a location of the recipe."""
    kind: Any = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        kind = next(_config_classes(kind.model_fields[part].annotation))
    return list(kind.model_fields)


def _config_classes(annotation: Any) -> Iterator[type[Config]]:
    """Yield the configuration classes in a type, for example `Stage` in `list[Stage]`."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _config_classes(argument)


def _with_absolute_paths(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the paths in a recipe file against the file's own folder."""

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(each) for each in value]
        if not isinstance(value, str) or "://" in value:
            return value
        own = (folder / os.path.expanduser(value)).resolve()
        if not own.exists() and value.startswith("samples/") and (BUILT_IN / value).exists():
            return str(BUILT_IN / value)  # a copy of a built-in recipe still finds the built-in samples
        exists = own.exists() or bool(matching_paths(own))
        return str(own) if exists or value.startswith(("./", "../", "~", "samples/")) else value

    for key in PATH_KEYS:
        section, dot, field = key.partition(".")
        if dot and isinstance(raw.get(section), dict) and field in raw[section]:
            raw[section][field] = resolved(raw[section][field])
    if isinstance(raw.get("local"), dict):
        raw["local"] = {k: resolved(v) if k in PATH_KEYS else v for k, v in raw["local"].items()}
    return raw
