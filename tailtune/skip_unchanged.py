"""Remember what the last promoted run of a recipe was made from, so that a schedule does not train the same twice."""

from datetime import UTC, datetime
from pathlib import Path

from tailtune import __version__
from tailtune.files import read_json, sha256_json, write_json
from tailtune.manifest import RESULTS_VERSION, content_sha256, read_manifest
from tailtune.run import DATA_FILE, Run
from tailtune.training_key import recipe_settings


def record_promotion(run: Run, *, passed: bool) -> None:
    """Record the run as its recipe's last one that passed the gate, or delete its record when it no longer passes."""
    path = _record_path(run)
    old = read_json(path) or {}
    data_sha256 = content_sha256(run.parquet_dir, DATA_FILE)
    facts = {"run": run.name, "best_model": str(run.best_model_dir), "data_sha256": data_sha256}
    if not passed and old.get("run") == run.name:
        path.unlink()
    elif passed and not facts.items() <= old.items():  # a repeated run changes nothing
        write_json(path, {**facts, "at": datetime.now(UTC).isoformat(timespec="seconds")})


def unchanged_since(run: Run) -> str | None:
    """Return a note when a promoted run has the same data (content hash) and settings; None when there is work to do.

    Settings are those of training, evaluation and gate, and tailtune's version, but not the commit that a
    branch on the hub points to. Also None when the recipe does not set `data.skip_unchanged`, when the last
    run failed or was rejected, and when its model has been deleted.
    """
    last = read_json(_record_path(run)) if run.recipe.data.skip_unchanged else None
    if last is None or last["run"] == run.name or last["data_sha256"] != content_sha256(run.parquet_dir, DATA_FILE):
        return None
    if read_manifest(Path(last["best_model"])) is None:
        return None
    return f"data and settings are those of run {last['run']}, promoted {last['at']}: nothing to train"


def _record_path(run: Run) -> Path:
    """Return the record's path: one per recipe and settings, so that two schedules of a recipe keep their own."""
    judging = run.recipe.model_dump(mode="json", include={"gate", "evaluation"})
    settings_sha256 = sha256_json([RESULTS_VERSION, __version__, recipe_settings(run.recipe), judging])
    return run.promotions_dir / f"{run.recipe.name}-{settings_sha256[:16]}.json"
