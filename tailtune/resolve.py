"""The first step: recipe and run parameters become one checked run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailtune.errors import UserError
from tailtune.files import free_bytes, write_json
from tailtune.imports import uncollected
from tailtune.log import log
from tailtune.owner import take_ownership
from tailtune.recipe.load import parse_recipe, with_overrides
from tailtune.recipe.schema import Recipe, without_secrets
from tailtune.run import MOUNTS, RUN_NAME, Run
from tailtune.training_key import has_trained, refuse_other_settings


def resolve_run(
    recipe_json: str,
    overrides: Mapping[str, Any],
    run_name: str,
    pipeline_run: str,
    data_dir: str,
    models_dir: str,
    workspace_dir: str,
    local: bool,
) -> Run:
    """Check everything that can be checked without data, and write `run.json`. Raises UserError.

    A run without a name takes the id of the pipeline's run. On a cluster, a run of the same name that has not ended is
    an error.
    """
    name = run_name or pipeline_run
    check_run_name(name, "run_name")
    recipe = with_overrides(parse_recipe(recipe_json), overrides)
    if local and recipe.resources.num_nodes != 1:
        raise UserError(f"num_nodes is {recipe.resources.num_nodes}, but this machine is one node", "set num_nodes=1")
    check_recipe(recipe)
    templates = {"data_dir": data_dir, "models_dir": models_dir, "workspace_dir": workspace_dir}
    for field, template in templates.items():
        if not local and not (template.startswith(f"{MOUNTS[field]}/") and template.endswith("/{run}")):
            raise UserError(f"{field} '{template}': give a directory below {MOUNTS[field]}, where the volume is, that "
                            "ends in /{run}, so that runs do not share it")  # fmt: skip
    directories = {field: Path(template.replace("{run}", name)) for field, template in templates.items()}
    run = Run(name=name, recipe=recipe, local=local, pipeline_run="" if local else pipeline_run, **directories)
    if not local:
        free = ", ".join(f"{MOUNTS[field]} {free_bytes(path) / 1e9:.0f} GB" for field, path in directories.items())
        log.info("resolve: free on the volumes: %s", free)
    if run.pipeline_run:
        take_ownership(run, _is_active)
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


def _is_active(pipeline_run: str) -> bool:
    from tailtune.jobs.kubernetes import KubernetesClient

    return KubernetesClient().pipeline_run_is_active(pipeline_run)


def check_run_name(name: str, parameter: str) -> None:
    """Raise UserError unless the name can be a directory's name. `parameter` is what the user calls it."""
    if not RUN_NAME.fullmatch(name):
        raise UserError(
            f"{parameter} '{name}': use letters, digits, '-', '_' and '.', at most 100, not starting with '-' or '.'"
        )


def check_recipe(recipe: Recipe) -> None:
    """Check what the schema cannot: trainer arguments and hardware profile. Imports torch and TRL. Raises UserError."""
    with uncollected():
        import transformers.integrations.integration_utils  # noqa: F401  SFTConfig imports it when it is made
        from trl import SFTConfig  # noqa: F401

        from tailtune.train.arguments import check_trainer_arguments
        from tailtune.train.hardware import find_profile
    check_trainer_arguments(recipe)
    find_profile("cpu", recipe.hardware.profile)
