"""Publishing is all or nothing, and a manifest means complete."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailtune.files import read_json, sha256_json, write_json, write_text
from tailtune.manifest import directory_identity, partial_directory, publish, read_manifest

KEY = {"step": "test", "path": Path("a"), "list": (1, 2)}


def publish_files(directory: Path, key: dict[str, Any] | None = None, **files: str) -> Path:
    facts: dict[str, Any] = {}
    with publish(directory, key or KEY, facts) as partial_dir:
        for name, text in files.items():
            path = partial_dir / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        facts["num_files"] = len(files)
    return directory


def fail(directory: Path, error: BaseException, *, keep_partial: bool = False) -> None:
    """Run a step that raises after its first file."""
    with publish(directory, {"new": 1}, {}, keep_partial=keep_partial) as partial_dir:
        (partial_dir / "a").write_text("new")
        raise error


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_published_directory_describes_itself(tmp_path: Path) -> None:
    directory = publish_files(tmp_path / "deep" / "out", a="hello", sub__b="")
    manifest = read_manifest(directory)
    assert manifest == {
        "key": {"step": "test", "path": "a", "list": [1, 2]},
        "files": {
            "a": {"bytes": 5, "sha256": hashlib.sha256(b"hello").hexdigest()},
            "sub/b": {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()},
        },
        "facts": {"num_files": 2},
    }
    assert names(tmp_path / "deep") == ["out"], "nothing partial is left"


def test_nothing_is_published_before_the_end(tmp_path: Path) -> None:
    with publish(tmp_path / "out", KEY, {}) as partial_dir:
        (partial_dir / "a").write_text("x")
        assert partial_dir == partial_directory(tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert read_manifest(partial_dir) is None, "the manifest is written last"
    assert read_manifest(tmp_path / "out")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("keep_partial", [False, True])
def test_after_an_exception_nothing_is_published(
    tmp_path: Path, error: type[BaseException], keep_partial: bool
) -> None:
    with pytest.raises(error):
        fail(tmp_path / "out", error(), keep_partial=keep_partial)
    assert names(tmp_path) == (["out.partial"] if keep_partial else [])
    assert read_manifest(tmp_path / "out") is None


def test_after_an_exception_the_earlier_result_is_still_there(tmp_path: Path) -> None:
    publish_files(tmp_path / "out", a="old")
    with pytest.raises(ValueError, match="no"):
        fail(tmp_path / "out", ValueError("no"))
    assert read_manifest(tmp_path / "out", KEY)
    assert (tmp_path / "out" / "a").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_new_result_replaces_the_whole_old_one(tmp_path: Path) -> None:
    publish_files(tmp_path / "out", a="old", b="old")
    publish_files(tmp_path / "out", key={"new": 1}, c="new")
    assert names(tmp_path / "out") == ["c", "manifest.json"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(("keep_partial", "expected"), [(False, []), (True, ["rest"])])
def test_the_next_attempt_resumes_only_with_keep_partial(
    tmp_path: Path, keep_partial: bool, expected: list[str]
) -> None:
    rest = partial_directory(tmp_path / "out") / "rest"
    rest.parent.mkdir()
    rest.write_text("x")
    with publish(tmp_path / "out", KEY, {}, keep_partial=keep_partial) as partial_dir:
        assert names(partial_dir) == expected


def test_leftovers_of_a_killed_rename_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "out.old").mkdir()
    (tmp_path / "out.old" / "a").write_text("x")
    publish_files(tmp_path / "out", a="1")
    publish_files(tmp_path / "out", a="2")
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "a").read_text() == "2"


@pytest.mark.parametrize(
    ("damage", "key"),
    [
        pytest.param(lambda d: None, {"step": "other"}, id="another key"),
        pytest.param(lambda d: None, {}, id="an empty key"),
        pytest.param(lambda d: (d / "a").write_text("hell"), KEY, id="another size"),
        pytest.param(lambda d: (d / "a").unlink(), KEY, id="a file is missing"),
        pytest.param(lambda d: ((d / "a").unlink(), (d / "a").mkdir()), KEY, id="a directory instead of a file"),
        pytest.param(lambda d: (d / "manifest.json").unlink(), KEY, id="no manifest"),
        pytest.param(lambda d: (d / "manifest.json").write_text('{"key": {'), KEY, id="half a manifest"),
        pytest.param(lambda d: os.rename(d, d.with_name("gone")), KEY, id="no directory"),
    ],
)
def test_an_incomplete_directory_has_no_manifest(
    tmp_path: Path, damage: Callable[[Path], object], key: dict[str, Any]
) -> None:
    directory = publish_files(tmp_path / "out", a="hello")
    assert read_manifest(directory, KEY)
    damage(directory)
    assert read_manifest(directory, key) is None


def test_an_additional_file_does_no_harm(tmp_path: Path) -> None:
    directory = publish_files(tmp_path / "out", a="hello")
    (directory / ".DS_Store").write_text("x")
    assert read_manifest(directory, KEY)


def test_the_identity_changes_with_the_content(tmp_path: Path) -> None:
    identity = directory_identity(publish_files(tmp_path / "first", a="1"))
    assert directory_identity(publish_files(tmp_path / "same", a="1")) == identity
    assert directory_identity(publish_files(tmp_path / "other", a="2")) != identity


def test_the_identity_of_a_directory_without_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = directory_identity(tmp_path)
    (tmp_path / "a").write_text("2")
    assert directory_identity(tmp_path) != before


def test_a_hash_does_not_depend_on_the_order_of_keys() -> None:
    assert sha256_json({"a": 1, "b": [1, 2]}) == sha256_json({"b": [1, 2], "a": 1})
    assert sha256_json([1, 2]) != sha256_json([2, 1])


@pytest.mark.parametrize("text", [None, "", "{", '{"a": 1} x'])
def test_incomplete_json_is_read_as_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    assert read_json(tmp_path / "a.json") is None
    assert read_json(tmp_path / "a.json" / "b.json") is None


def test_json_is_written_indented_and_as_text(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    write_json(path, {"a": "é – 日本", "path": Path("x")})
    assert read_json(path) == {"a": "é – 日本", "path": "x"}
    assert "日本" in path.read_text(encoding="utf-8")
    assert names(path.parent) == ["a.json"]


def test_after_a_failed_write_the_old_file_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a", "old")

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_text_that_is_not_valid_unicode_is_written_nevertheless(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": "\ud800"})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"a": "\ud800"}
