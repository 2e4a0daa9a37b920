"""What a training run depends on: the key that decides whether a model is finished and a checkpoint may be resumed."""

import json
from pathlib import Path
from typing import Any

from tailtune.errors import UserError
from tailtune.files import read_json
from tailtune.manifest import RESULTS_VERSION, content_sha256, directory_identity, read_manifest
from tailtune.recipe.schema import Recipe, Stage
from tailtune.run import DATA_FILE

CHECKPOINT_KEY = "key.json"
"""File of a checkpoint with the key of the training that wrote it."""


def training_key(recipe: Recipe, stage: Stage, data_dir: Path, model_dir: Path) -> dict[str, Any]:
    """Return the key of one stage: its settings, its data, and the model that it starts from.

    `data_dir` holds `data.parquet`. Launcher and ranks compute the same key. The settings of other stages are not
    part of it, so changing a later stage does not train the earlier ones again.
    """
    return {
        "version": RESULTS_VERSION,
        "settings": training_settings(recipe, stage),
        "data_sha256": content_sha256(data_dir, DATA_FILE),
        "base_model_sha256": directory_identity(model_dir),
    }


def training_settings(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """Return the settings that the trained weights of a stage depend on."""
    index = [other.name for other in recipe.stages].index(stage.name)
    own = stage.model_dump(mode="json")
    own["tail"] = own["tail"]["mode"]  # the other tail settings only change how the same weights are computed
    del own["resources"]
    resources = recipe.resources_of(stage)
    return {
        **recipe.model_dump(mode="json", include={"seed", "prompt", "hardware"}),
        f"stages.{index}": own,
        "split": [recipe.data.split_by, recipe.data.validation_share],
        "world_size": resources.num_nodes * resources.ranks_per_node,
    }


def recipe_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that the trained weights of any stage depend on, the choice of base model included."""
    settings = {"model": recipe.model.model_dump(mode="json")}
    for stage in recipe.stages:
        settings |= training_settings(recipe, stage)
    return settings


def refuse_other_settings(old: Recipe, new: Recipe, models_dir: Path) -> None:
    """Raise UserError when a run that has trained is given another recipe for data or training."""
    before, after = ({**recipe_settings(recipe), "data": recipe.data.model_dump(mode="json")} for recipe in (old, new))
    if changed := differences(before, after):
        raise UserError(
            f"this run was trained with other settings: {', '.join(changed)}",
            f"choose another --run-name, or delete {models_dir}",
        )


def has_trained(models_dir: Path) -> bool:
    """Return whether a run has a complete checkpoint or model. Before the first, settings may still be corrected."""
    checkpoints = (models_dir / "checkpoints").glob("checkpoint-*/complete.json")
    return any(checkpoints) or read_manifest(models_dir / "best_model") is not None


def refuse_other_checkpoints(checkpoints: Path, key: dict[str, Any]) -> None:
    """Raise UserError when a complete checkpoint was made with another key.

    Each checkpoint contains the key of the ranks that wrote it, not of those that will read it: another run's ranks may
    still save one while they are being stopped.
    """
    for path in sorted(checkpoints.glob("checkpoint-*/complete.json")):
        old = read_json(path.with_name(CHECKPOINT_KEY))
        remedy = f"choose another --run-name or --output-dir, or delete {checkpoints}"
        if old is None:
            raise UserError(f"the checkpoints in {checkpoints} were made by an earlier version of tailtune", remedy)
        if changed := differences(old, json.loads(json.dumps(key))):
            settings = ", ".join(changed)
            raise UserError(f"the checkpoints in {checkpoints} were made with other settings ({settings})", remedy)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the dotted paths at which two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [d for k in sorted({*old, *new}) for d in differences(old.get(k), new.get(k), f"{path}.{k}".strip("."))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in differences(a, b, f"{path}.{i}")]
    return [] if old == new else [path.removeprefix("settings.")]
