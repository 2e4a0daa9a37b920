"""What the last promoted run of a recipe was made from, so that a schedule does not train the same again."""

from datetime import UTC, datetime
from pathlib import Path

from tailtune import __version__
from tailtune.manifest import RESULTS_VERSION, read_json, read_manifest, sha256_json, write_json
from tailtune.run import Run
from tailtune.training_key import recipe_settings


def record_promotion(run: Run, *, passed: bool) -> None:
    """Note the run as its recipe's last one that passed the gate, or withdraw it when it does not any more."""
    path = _path(run)
    old = read_json(path) or {}
    facts = {"run": run.name, "best_model": str(run.best_model_dir), "data_sha256": _data_sha256(run)}
    if not passed and old.get("run") == run.name:
        path.unlink()
    elif passed and not facts.items() <= old.items():  # a run that is run again changes nothing
        write_json(path, {**facts, "at": datetime.now(UTC).isoformat(timespec="seconds")})


def unchanged_since(run: Run) -> str | None:
    """A note when the run would train what another one has: the same data (content hash) and settings, promoted.

    Settings are those of training, evaluation and gate, and tailtune's version; not what a hub's branch points to.

    None when there is something to train, or when the recipe does not ask (`data.skip_unchanged`). A run
    that failed or was rejected is never a reason to end early, nor is one whose model has been deleted.
    """
    last = read_json(_path(run)) if run.recipe.data.skip_unchanged else None
    if last is None or last["run"] == run.name or last["data_sha256"] != _data_sha256(run):
        return None
    if read_manifest(Path(last["best_model"])) is None:
        return None
    return f"data and settings are those of run {last['run']}, promoted {last['at']}: nothing to train"


def _path(run: Run) -> Path:
    """One file for each recipe and its settings: two schedules of a recipe do not forget each other's runs."""
    recipe = run.recipe.model_dump(mode="json", include={"gate", "evaluation"})
    settings = sha256_json([RESULTS_VERSION, __version__, recipe_settings(run.recipe), recipe])
    return run.promotions_dir / f"{run.recipe.name}-{settings[:16]}.json"


def _data_sha256(run: Run) -> str:
    """Hash of the Parquet file, which is written."""
    manifest = read_manifest(run.parquet_dir)
    assert manifest is not None, "the parquet step publishes with a manifest"
    return str(manifest["files"]["data.parquet"]["sha256"])
