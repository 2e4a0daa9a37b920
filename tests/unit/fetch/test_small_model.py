"""Small base models are built once per key; every run owns a copy."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_recipe, write_rows

from tailtune.fetch import small_model
from tailtune.fetch.model import provide_base_model
from tailtune.manifest import directory_identity, read_manifest
from tailtune.parquet.write import write_parquet
from tailtune.recipe.schema import Recipe
from tailtune.run import Run


@pytest.fixture
def data_dir(prepared: Path) -> Path:
    return prepared / "data"


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories that models are built in from now on, one per build."""
    directories: list[Path] = []
    build = small_model.build_small_model

    def record(*arguments: Any) -> None:
        directories.append(arguments[-1])
        build(*arguments)

    monkeypatch.setattr(small_model, "build_small_model", record)
    return directories


def provide(tmp_path: Path, name: str, data_dir: Path, recipe: Recipe | None = None) -> Path:
    return provide_base_model(recipe or tiny_recipe(), data_dir, tmp_path / name / "base_model", tmp_path / "cache")


def test_a_second_run_copies_the_model(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = count_builds(monkeypatch)
    first, second = provide(tmp_path, "first", data_dir), provide(tmp_path, "second", data_dir)
    assert builds == [first]
    assert first != second and directory_identity(first) == directory_identity(second), "so the keys of both trainings"
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    weights = [(directory / "model.safetensors").read_bytes() for directory in (first, second)]
    assert weights[0] == weights[1]


def test_a_run_keeps_its_model_when_the_cache_is_gone(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a run that was made before there was a cache."""
    provide_base_model(tiny_recipe(), data_dir, tmp_path / "run" / "base_model")
    before = directory_identity(tmp_path / "run" / "base_model")
    builds = count_builds(monkeypatch)
    assert directory_identity(provide(tmp_path, "run", data_dir)) == before
    assert builds == [] and not (tmp_path / "cache").exists()


def test_other_settings_or_data_are_another_model(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = count_builds(monkeypatch)
    more_rows = tmp_path / "more_rows"
    write_parquet(write_rows(tmp_path / "rows.jsonl", 60), more_rows, tiny_recipe().data)
    provide(tmp_path, "first", data_dir)
    provide(tmp_path, "other-seed", data_dir, tiny_recipe(seed=7))
    provide(tmp_path, "other-data", more_rows)
    assert len(builds) == 3


def test_a_damaged_model_in_the_cache_is_not_copied(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = count_builds(monkeypatch)
    provide(tmp_path, "first", data_dir)
    [weights] = (tmp_path / "cache").glob("*/*/model.safetensors")
    weights.write_bytes(b"half")
    assert read_manifest(provide(tmp_path, "second", data_dir))
    provide(tmp_path, "third", data_dir)
    assert [directory.parent.name for directory in builds] == ["first", "second"]


def test_two_runs_that_build_the_same_model_at_once_both_get_it(tmp_path: Path, data_dir: Path) -> None:
    """Both processes wait after looking into the empty cache, until the other one has looked too."""
    code = """
import sys, time
from pathlib import Path
from tailtune.fetch import small_model
from tailtune.fetch.model import provide_base_model
from tailtune.recipe.load import parse_recipe

recipe, data_dir, directory, cache_dir, barrier, other = sys.argv[1:]
build = small_model.build_small_model

def build_together(*arguments):
    Path(barrier).touch()
    while not Path(other).exists():
        time.sleep(0.05)
    build(*arguments)

small_model.build_small_model = build_together
provide_base_model(parse_recipe(recipe), Path(data_dir), Path(directory), Path(cache_dir))
"""
    names, cache_dir = ("a", "b"), tmp_path / "cache"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, tiny_recipe().to_json(), data_dir, tmp_path / name / "base_model", cache_dir,
             tmp_path / f"{name}.started", tmp_path / f"{other}.started"]
        )
        for name, other in (names, names[::-1])
    ]  # fmt: skip
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for name in names:
        assert read_manifest(tmp_path / name / "base_model")
    assert not list(tmp_path.rglob("*.partial"))
    assert read_manifest(provide(tmp_path, "third", data_dir))
    [entry] = cache_dir.iterdir()
    assert all(read_manifest(build) for build in entry.glob("*/"))


def test_models_that_no_run_has_used_for_a_week_are_deleted(tmp_path: Path, data_dir: Path) -> None:
    provide(tmp_path, "first", data_dir)
    [old] = (tmp_path / "cache").iterdir()
    os.utime(old, (0, 0))
    (tmp_path / "cache" / "of-somebody-else").mkdir()
    os.utime(tmp_path / "cache" / "of-somebody-else", (0, 0))
    provide(tmp_path, "second", data_dir, tiny_recipe(seed=7))
    assert not old.exists() and (tmp_path / "cache" / "of-somebody-else").exists(), "it has no key.json"


def test_local_runs_share_the_cache_next_to_them(
    make_run: Callable[..., Run], tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = count_builds(monkeypatch)
    runs = [make_run("monday"), make_run("tuesday")]
    for run in runs:
        provide_base_model(run.recipe, data_dir, run.base_model_dir, run.small_model_cache_dir)
        assert (run.base_model_path / "config.json").is_file()
    assert builds == [runs[0].base_model_dir] and len(list((tmp_path / ".small_models").iterdir())) == 1


def test_progress_of_a_build(tmp_path: Path, data_dir: Path, last_lines: Callable[[], list[str]]) -> None:
    provide_base_model(tiny_recipe(), data_dir, tmp_path / "base_model")
    tokenizer, rows, pretraining = last_lines()
    assert (tokenizer, rows) == ("model: training the tokenizer", "model: tokenizing the rows")
    assert re.fullmatch(r"model: pretraining step 2/2 loss \d\.\d{3}", pretraining)
