"""The base model of a run: fetched from the hub, taken from a directory, or built small."""

import re
from pathlib import Path

import pyarrow.parquet as pq

from tailtune.errors import UserError
from tailtune.fetch import fetch_model
from tailtune.log import log
from tailtune.manifest import read_manifest
from tailtune.recipe import Recipe
from tailtune.split import split_rows

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def provide_base_model(recipe: Recipe, data_dir: Path, directory: Path) -> Path:
    """Where the base model lies: `directory` when it is fetched or built, else the one that was named.

    `data_dir` holds `data.parquet`; a small model trains its tokenizer on the training rows.
    """
    name = recipe.model.base_model
    if name == "small":
        from tailtune.small_model import build_small_model

        table = pq.read_table(data_dir / "data.parquet")
        train, _ = split_rows(table, recipe.data.split_by, recipe.data.validation_share, recipe.seed)
        manifest = read_manifest(data_dir)
        assert manifest is not None, "the parquet step publishes with a manifest"
        return build_small_model(recipe, train, manifest["files"]["data.parquet"]["sha256"], directory)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"base_model {path} holds no config.json; give the directory of a Transformers model")
        log.info("model: %s is used in place", path)
        return path.resolve()
    if not HUB_NAME.fullmatch(name):
        raise UserError(f"base_model '{name}' is no directory and no hub name; give OWNER/NAME, a path, or small")
    return fetch_model(name, directory, revision=recipe.model.revision)


def describe_base_model(recipe: Recipe, directory: Path) -> dict[str, str]:
    """Name, kind (`hub`, `directory`, `small`) and a note, for the report."""
    manifest = read_manifest(directory)
    facts = manifest["facts"] if manifest else {}
    small = recipe.model.base_model == "small"
    kind = "small" if small else "directory" if Path(recipe.model.base_model).expanduser().is_dir() else "hub"
    described = {"name": recipe.model.base_model, "kind": kind, "note": str(facts.get("note", ""))}
    if small and recipe.model.small:
        described["name"] = f"small {recipe.model.small.model_type}"
    if facts.get("revision"):
        described["revision"] = str(facts["revision"])
    return described
