"""Files are written whole, and readable to whom the umask says."""

import os
from pathlib import Path

import pytest

from tailtune.files import parse_json, read_json, write_json, write_text


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_the_umask_decides_who_reads_a_file(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "a.json", "{}")
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == mode
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a.json" / "b").mkdir(parents=True)
    with pytest.raises(OSError, match=r"a\.json"):
        write_text(tmp_path / "a.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "[" * 100_000, "1" * 5000, '{"a": 1, "a": 2}', "\ufeff{}"])
def test_a_file_without_one_json_object_is_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    assert read_json(tmp_path / "a.json") is None


def test_equal_keys_at_different_places_are_good() -> None:
    assert parse_json('{"a": {"a": [{"a": 1}, {"a": 2}]}}') == {"a": {"a": [{"a": 1}, {"a": 2}]}}


def test_a_private_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("readable before")
    write_json(tmp_path / "run.json", {"a": 1}, private=True)
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o600
