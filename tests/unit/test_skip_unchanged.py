"""A schedule remembers its last promoted run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import write_rows

from components.write_parquet import write_parquet as step
from tailtune.files import read_json
from tailtune.manifest import publish
from tailtune.parquet.write import write_parquet
from tailtune.recipe.load import load_recipe, with_overrides
from tailtune.run import Run
from tailtune.skip_unchanged import record_promotion, unchanged_since


def make_run(folder: Path, name: str, rows: Path, **overrides: object) -> Run:
    recipe = with_overrides(load_recipe("survival"), {"data.skip_unchanged": True, **overrides})
    directories = {f"{volume}_dir": folder / volume / name for volume in ("data", "models", "workspace")}
    run = Run(name=name, recipe=recipe, local=False, **directories)
    write_parquet(rows, run.parquet_dir, recipe.data)
    return run


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


@pytest.fixture
def promoted(tmp_path: Path, rows: Path) -> Run:
    run = make_run(tmp_path, "monday", rows)
    with publish(run.best_model_dir, {}, {}) as partial_dir:
        (partial_dir / "config.json").write_text("{}")
    record_promotion(run, passed=True)
    return run


def test_the_same_data_and_settings_end_a_run_early(tmp_path: Path, rows: Path, promoted: Run) -> None:
    note = unchanged_since(make_run(tmp_path, "tuesday", rows))
    assert note is not None and note.startswith("data and settings are those of run monday, promoted 20")


@pytest.mark.parametrize(
    "overrides",
    [
        {"learning_rate": 1e-3},
        {"seed": 7},
        {"model_revision": "v2"},
        {"gate.0.threshold": 0.1},
        {"data.skip_unchanged": False},
    ],
    ids=str,
)
def test_a_run_with_other_settings_trains(
    tmp_path: Path, rows: Path, promoted: Run, overrides: dict[str, object]
) -> None:
    assert unchanged_since(make_run(tmp_path, "tuesday", rows, **overrides)) is None


def test_a_run_with_other_data_trains(tmp_path: Path, promoted: Run) -> None:
    assert unchanged_since(make_run(tmp_path, "tuesday", write_rows(tmp_path / "more.jsonl", 40))) is None


def test_a_run_does_not_end_because_of_itself(promoted: Run) -> None:
    assert unchanged_since(promoted) is None


def test_a_deleted_model_is_trained_again(tmp_path: Path, rows: Path, promoted: Run) -> None:
    (promoted.best_model_dir / "config.json").unlink()
    (promoted.best_model_dir / "manifest.json").unlink()
    assert unchanged_since(make_run(tmp_path, "tuesday", rows)) is None


def test_a_rejected_run_does_not_end_others_early(tmp_path: Path, rows: Path, promoted: Run) -> None:
    tuesday = make_run(tmp_path, "tuesday", rows)
    record_promotion(tuesday, passed=False)
    (path,) = promoted.promotions_dir.iterdir()
    assert read_json(path)["run"] == "monday", "the verdict on another run does not change it"
    record_promotion(promoted, passed=False)
    assert unchanged_since(tuesday) is None


def test_promoting_again_changes_no_file(promoted: Run) -> None:
    (path,) = promoted.promotions_dir.iterdir()
    before = path.stat().st_mtime_ns
    record_promotion(promoted, passed=True)
    assert path.stat().st_mtime_ns == before


def test_two_schedules_of_a_recipe_keep_their_own_records(tmp_path: Path, rows: Path, promoted: Run) -> None:
    other = make_run(tmp_path, "other", rows, epochs=9)
    record_promotion(other, passed=True)
    assert unchanged_since(make_run(tmp_path, "tuesday", rows)) is not None


@pytest.mark.parametrize("may_end", [True, False])
def test_a_pipeline_without_the_condition_trains_again(
    tmp_path: Path, rows: Path, promoted: Run, caplog: pytest.LogCaptureFixture, may_end: bool
) -> None:
    """As when somebody edits the recipe in the dashboard: an empty directory would fail the next step."""
    caplog.set_level("INFO", "tailtune")
    run = make_run(tmp_path, "tuesday", rows)
    facts = SimpleNamespace(log_metric=lambda name, value: None)
    note = SimpleNamespace(path=str(tmp_path / "note.md"))
    directory = step.python_func(run.to_json(), str(rows), may_end, facts, note)
    assert directory == ("" if may_end else str(run.parquet_dir))
    message = "parquet: the pipeline was compiled without data.skip_unchanged, so the run goes on in any case"
    assert (message in caplog.messages) is not may_end
