"""What a trained model depends on: the key of a training, and why another one must not take its place."""

import json
from pathlib import Path
from typing import Any

from tailtune.errors import UserError
from tailtune.files import read_json, write_json
from tailtune.manifest import RESULTS_VERSION, content_sha256, directory_identity
from tailtune.recipe.schema import Recipe
from tailtune.run import DATA_FILE


def training_key(recipe: Recipe, data_dir: Path, model_dir: Path) -> dict[str, Any]:
    """Settings, data and base model of a training. `data_dir` holds `data.parquet`.

    Launcher and ranks compute the same key: it decides whether a model is finished and whether a
    checkpoint may be resumed from.
    """
    return {
        "version": RESULTS_VERSION,
        "settings": training_settings(recipe),
        "data_sha256": content_sha256(data_dir, DATA_FILE),
        "base_model_sha256": directory_identity(model_dir),
    }


def training_settings(recipe: Recipe) -> dict[str, Any]:
    """What the trained weights depend on, of a recipe."""
    settings = recipe.model_dump(mode="json", include={"seed", "model", "prompt", "stages", "hardware"})
    for stage in settings["stages"]:  # its other settings change how the same weights are computed
        stage["tail"] = stage["tail"]["mode"]
    settings["split"] = [recipe.data.split_by, recipe.data.validation_share]
    settings["world_size"] = recipe.resources.num_nodes * recipe.resources.ranks_per_node
    return settings


def refuse_other_settings(old: Recipe, new: Recipe, models_dir: Path) -> None:
    """Raise UserError when a run that has trained is given another recipe for data or training."""
    before, after = ({**training_settings(r), "data": r.data.model_dump(mode="json")} for r in (old, new))
    if changed := differences(before, after):
        raise UserError(
            f"this run has trained with another {', '.join(changed)}; choose another --run-name, or delete {models_dir}"
        )


def has_trained(checkpoints: Path) -> bool:
    """Whether there is a complete checkpoint: before the first one, settings may still be corrected."""
    return any(checkpoints.glob("checkpoint-*/complete.json"))


def claim_checkpoints(checkpoints: Path, key: dict[str, Any]) -> None:
    """Write the key beside the checkpoints; raise UserError when they were made with another one."""
    path = checkpoints / "key.json"
    old = read_json(path)
    if old is None or not has_trained(checkpoints):
        write_json(path, key)
    elif changed := differences(old, json.loads(json.dumps(key))):
        raise UserError(
            f"the checkpoints in {checkpoints} were made with other settings ({', '.join(changed)}); "
            f"choose another --run-name or --output-dir, or delete {checkpoints}"
        )


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Dotted paths at which two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [d for k in sorted({*old, *new}) for d in differences(old.get(k), new.get(k), f"{path}.{k}".strip("."))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in differences(a, b, f"{path}.{i}")]
    return [] if old == new else [path.removeprefix("settings.")]
