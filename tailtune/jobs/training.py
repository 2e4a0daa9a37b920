"""The train step: launch a stage as a job, once."""

import json
from pathlib import Path
from typing import Any

from tailtune.errors import UserError
from tailtune.jobs.job import Job
from tailtune.jobs.local import run_job
from tailtune.log import log
from tailtune.manifest import directory_identity, read_json, read_manifest, write_json, write_text
from tailtune.recipe import Recipe
from tailtune.run import Run


def training_settings(recipe: Recipe) -> dict[str, Any]:
    """What the trained weights depend on, of a recipe."""
    settings = recipe.model_dump(mode="json", include={"seed", "model", "prompt", "stages", "hardware"})
    settings["split"] = [recipe.data.split_by, recipe.data.validation_share]
    settings["world_size"] = recipe.resources.num_nodes * recipe.resources.ranks_per_node
    return settings


def train_stage(run: Run, data_dir: Path, model_dir: Path) -> Path:
    """Train the recipe's stage and return `best_model/`; a finished one is left untouched.

    `data_dir` holds `data.parquet` with its manifest, `model_dir` the base model. Raises JobFailed,
    and UserError when the run's checkpoints come from other settings.
    """
    recipe, resources = run.recipe, run.recipe.resources
    data = read_manifest(data_dir)
    if data is None:
        raise UserError(f"{data_dir} holds no complete Parquet file; run the parquet step first")
    key = {
        "settings": training_settings(recipe),
        "data_sha256": data["files"]["data.parquet"]["sha256"],
        "base_model_sha256": directory_identity(model_dir),
    }
    if read_manifest(run.best_model_dir, key):
        log.info("train: best_model/ is complete, no step to do")
        return run.best_model_dir
    _refuse_foreign_checkpoints(run.models_dir / "checkpoints" / "key.json", key)
    write_text(run.models_dir / "recipe.json", recipe.model_dump_json(indent=2) + "\n")
    stage = recipe.stages[0]
    run_job(
        Job(
            name=f"{recipe.name}-{stage.name}",
            module="tailtune.train",
            args=(
                "--recipe", str(run.models_dir / "recipe.json"),
                "--stage", stage.name,
                "--model-dir", str(model_dir),
                "--key", json.dumps(key),
            ),
            num_nodes=resources.num_nodes,
            ranks_per_node=resources.ranks_per_node,
            max_restarts=resources.max_restarts,
            shutdown_seconds=resources.shutdown_seconds,
            environment={"DATA_DIR": str(data_dir), "OUTPUT_DIR": str(run.models_dir)},
        )
    )  # fmt: skip
    return run.best_model_dir


def _refuse_foreign_checkpoints(key_path: Path, key: dict[str, Any]) -> None:
    """Checkpoints made with other settings are neither resumed from nor overwritten."""
    if old := read_json(key_path):
        if changed := _differences(old, json.loads(json.dumps(key))):
            raise UserError(
                f"the checkpoints in {key_path.parent} were made with other settings ({', '.join(changed)}); "
                f"choose another --run-name, or delete {key_path.parent}"
            )
    else:
        write_json(key_path, key)


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Dotted paths at which two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [d for k in sorted({*old, *new}) for d in _differences(old.get(k), new.get(k), f"{path}.{k}".strip("."))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in _differences(a, b, f"{path}.{i}")]
    return [] if old == new else [path.removeprefix("settings.")]
