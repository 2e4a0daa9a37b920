"""What the last promoted run of a recipe was made from, so that a schedule does not train the same again."""

from datetime import UTC, datetime
from pathlib import Path

from tailtune.identity import training_settings
from tailtune.manifest import read_json, read_manifest, sha256_json, write_json
from tailtune.run import Run


def record_promotion(run: Run, *, passed: bool) -> None:
    """Note the run as its recipe's last one that passed the gate, or withdraw it when it does not any more."""
    old = read_json(run.promotion_path) or {}
    facts = {"run": run.name, "best_model": str(run.best_model_dir), "made_from": _made_from(run)}
    if not passed and old.get("run") == run.name:
        run.promotion_path.unlink()
    elif passed and not facts.items() <= old.items():  # a run that is run again changes nothing
        write_json(run.promotion_path, {**facts, "at": datetime.now(UTC).isoformat(timespec="seconds")})


def unchanged_since(run: Run) -> str | None:
    """A note when the run would train what another one has: the same data (content hash) and settings, promoted.

    None when there is something to train, or when the recipe does not ask (`data.skip_unchanged`). A run
    that failed or was rejected is never a reason to end early, nor is one whose model has been deleted.
    """
    last = read_json(run.promotion_path) if run.recipe.data.skip_unchanged else None
    if last is None or last["run"] == run.name or last["made_from"] != _made_from(run):
        return None
    if read_manifest(Path(last["best_model"])) is None:
        return None
    return f"data and settings are those of run {last['run']}, promoted {last['at']}: nothing to train"


def _made_from(run: Run) -> str:
    """Hash of the settings and of the Parquet file, which is written."""
    manifest = read_manifest(run.parquet_dir)
    assert manifest is not None, "the parquet step publishes with a manifest"
    return sha256_json([training_settings(run.recipe), manifest["files"]["data.parquet"]["sha256"]])
