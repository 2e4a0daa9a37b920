"""The first step: recipe and run parameters become one checked run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailtune.errors import UserError
from tailtune.identity import has_trained, refuse_other_settings
from tailtune.log import log
from tailtune.manifest import write_json
from tailtune.recipe import parse_recipe, with_overrides, without_secrets
from tailtune.run import RUN_NAME, Run


def resolve_run(
    recipe_json: str,
    overrides: Mapping[str, Any],
    name: str,
    data_dir: str,
    models_dir: str,
    workspace_dir: str,
    local: bool,
) -> Run:
    """Check everything that can be checked without data, and write `run.json`. Raises UserError."""
    from tailtune.train.arguments import check_trainer_arguments
    from tailtune.train.hardware import find_profile

    if not RUN_NAME.fullmatch(name):
        raise UserError(f"run_name '{name}': use letters, digits, '-', '_' and '.', at most 100")
    recipe = with_overrides(parse_recipe(recipe_json), overrides)
    if local and recipe.resources.num_nodes != 1:
        raise UserError(f"num_nodes is {recipe.resources.num_nodes}, but this machine is one node; set num_nodes=1")
    check_trainer_arguments(recipe)
    find_profile("cpu", recipe.hardware.profile)
    directories = {
        field: Path(text.replace("{run}", name))
        for field, text in (
            ("data_dir", data_dir),
            ("models_dir", models_dir),
            ("workspace_dir", workspace_dir),
        )
    }
    run = Run(name=name, recipe=recipe, local=local, **directories)
    if run.run_path.is_file() and has_trained(run.models_dir / "checkpoints"):
        refuse_other_settings(Run.from_json(run.run_path.read_text(encoding="utf-8")).recipe, recipe, run.models_dir)
    write_json(run.run_path, run.model_dump(mode="json"))
    log.info(
        "resolve: recipe %s, base model %s, data %s",
        recipe.name,
        recipe.model.base_model,
        without_secrets(recipe.data.source),
    )
    return run
