"""Base models from the hub are on a volume once, and each run links to its own."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_recipe
from fetched import MODEL
from killed import killed
from servers import COMMIT, Server

from tailtune.errors import UserError
from tailtune.fetch import lease, model
from tailtune.fetch.lease import one_writer
from tailtune.fetch.model import fetch_model, provide_base_model
from tailtune.files import read_json
from tailtune.manifest import directory_identity, partial_directory, read_manifest

NAME, LATER = "owner/model", "ab" * 20
WEIGHTS = f"/{NAME}/resolve/{COMMIT}/model-00001-of-00002.safetensors"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, seconds in (("BEAT_SECONDS", 0.05), ("SILENT_SECONDS", 2.0), ("POLL_SECONDS", 0.02)):
        monkeypatch.setattr(lease, constant, seconds)


@pytest.fixture
def volume(tmp_path: Path, server: Server) -> Path:
    server.add_repo("models", NAME, MODEL)
    return tmp_path / "models"


def provide(volume: Path, run: str, revision: str = "main", name: str = NAME) -> Path:
    recipe = tiny_recipe(base_model=name, model_revision=revision)
    directory = volume / run / "base_model"
    return provide_base_model(recipe, volume / "no-data", directory, store=volume / "base_models")


def num_fetched(server: Server, path: str = WEIGHTS) -> int:
    return sum(at == path for method, at, _ in server.requests if method == "GET")


def entry(volume: Path, commit: str = COMMIT) -> Path:
    return volume / "base_models" / f"owner--model@{commit}"


def test_two_runs_have_one_copy(volume: Path, server: Server, tmp_path: Path) -> None:
    first, second = provide(volume, "first"), provide(volume, "second")
    assert num_fetched(server) == 1
    assert first.resolve() == second.resolve() == entry(volume)
    assert os.readlink(first) == f"../base_models/{entry(volume).name}", "relative, wherever the volume is mounted"
    assert read_manifest(first) and sorted(path.name for path in (volume / "base_models").iterdir()) == [
        entry(volume).name
    ]
    volume.rename(tmp_path / "mounted-elsewhere")
    assert (tmp_path / "mounted-elsewhere" / "first" / "base_model" / "config.json").is_file()


def test_a_run_keeps_the_commit_of_its_first_attempt(volume: Path, server: Server) -> None:
    provide(volume, "first")
    server.add_repo("models", NAME, {**MODEL, "config.json": b'{"later": true}'}, commit=LATER)
    assert provide(volume, "first").resolve() == entry(volume)
    assert provide(volume, "second").resolve() == entry(volume, LATER)
    fetched_before = directory_identity(volume / "first" / "base_model")
    (volume / "first" / "base_model").unlink()  # what retention does
    entry(volume).rename(volume / "gone")
    again = provide(volume, "first")
    assert again.resolve() == entry(volume) and directory_identity(again) == fetched_before, "the same key of training"


def test_a_revision_that_is_a_commit_needs_no_hub_when_the_copy_is_there(volume: Path, server: Server) -> None:
    provide(volume, "first", COMMIT)
    num_requests = len(server.requests)
    provide(volume, "second", COMMIT)
    assert len(server.requests) == num_requests


def test_another_model_before_the_training_replaces_the_link(volume: Path, server: Server) -> None:
    provide(volume, "first")
    server.add_repo("models", "owner/other", MODEL)
    assert provide(volume, "first", name="owner/other").resolve().name == f"owner--other@{COMMIT}"
    assert read_json(volume / "first" / "base_model.json")["key"]["model"] == "owner/other"


def test_a_copy_of_an_earlier_version_stays_in_use(volume: Path, server: Server) -> None:
    own = fetch_model(NAME, volume / "first" / "base_model")
    before = {path: path.stat().st_mtime_ns for path in own.rglob("*")}
    server.add_repo("models", NAME, MODEL, commit=LATER)
    assert provide(volume, "first") == own and not own.is_symlink()
    assert before == {path: path.stat().st_mtime_ns for path in own.rglob("*")}
    assert not (volume / "base_models").exists()


def test_a_volume_without_links_gets_copies(
    volume: Path, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    own = provide(volume, "first")
    assert read_manifest(own) and not own.is_symlink()
    assert "no link can be made" in caplog.text
    assert [path.name for path in own.parent.iterdir() if path.name.startswith(".")] == []


def test_of_several_runs_at_once_one_fetches(
    volume: Path, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    download, may_go_on, directories, downloads = model._download_snapshot, threading.Event(), [], []

    def wait_first(*arguments: Any) -> None:
        downloads.append(arguments)
        may_go_on.wait(30)
        download(*arguments)

    monkeypatch.setattr(model, "_download_snapshot", wait_first)
    threads = [threading.Thread(target=lambda run=run: directories.append(provide(volume, run))) for run in "abc"]
    for thread in threads:
        thread.start()
    while not downloads or caplog.text.count("waiting for it") < 2:
        time.sleep(0.01)
    time.sleep(1.5 * lease.SILENT_SECONDS)  # the holder is alive: nobody takes its place
    assert len(downloads) == 1 and "going on in its place" not in caplog.text
    may_go_on.set()
    for thread in threads:
        thread.join(timeout=30)
    assert len({directory.resolve() for directory in directories}) == 1 and len(directories) == 3
    assert num_fetched(server) == 1
    assert [path.name for path in (volume / "base_models").iterdir()] == [entry(volume).name]


def test_a_download_whose_process_was_killed_is_continued(
    volume: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.replies[WEIGHTS].pause_after = 100_000
    finished = partial_directory(entry(volume)) / "model-00002-of-00002.safetensors"
    assert killed(lambda: provide(volume, "first"), when=finished.is_file)
    assert not (volume / "first" / "base_model" / "config.json").exists()
    assert [path.suffix for path in (volume / "base_models").glob("*.lease")] == [".lease"]
    server.replies[WEIGHTS].pause_after = None
    assert read_manifest(provide(volume, "second"))
    assert "the run that was fetching owner/model has stopped: going on in its place" in caplog.text
    assert num_fetched(server, WEIGHTS.replace("00001", "00002", 1)) == 1, "what had arrived is not fetched again"
    assert [path.name for path in (volume / "base_models").iterdir()] == [entry(volume).name]
    assert read_manifest(volume / "first" / "base_model"), "the killed run has it too"


def test_a_holder_that_lost_its_lease_leaves_that_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "entry.lease"
    with one_writer(path, lambda: False, "it"):
        path.write_text("somebody-else 1")
        time.sleep(3 * lease.BEAT_SECONDS)
        assert path.read_text() == "somebody-else 1"
    assert path.read_text() == "somebody-else 1"


def test_a_full_volume_is_said_in_one_line(server: Server, small_disk: Path) -> None:
    server.add_repo("models", NAME, MODEL)
    with pytest.raises(UserError, match=r"no space in .*/base_models: 500,\d\d\d bytes .*tailtune gc --runs"):
        provide(small_disk, "first")
    assert list((small_disk / "base_models").iterdir()) == []
    (small_disk / "ballast").write_bytes(bytes(small_disk.stat().st_blksize * 60))
    with pytest.raises(UserError, match="no space in"):
        provide(small_disk, "second")


def test_of_two_writers_the_slower_one_takes_what_the_faster_one_has_published(
    volume: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a holder was stopped for a while, and another run took its lease over."""
    fetched = provide(volume, "first").resolve()
    fetched.rename(volume / "faster")

    def fail(*_: object, **__: object) -> None:
        (volume / "faster").rename(fetched)
        raise FileNotFoundError("the directory was published by another")

    monkeypatch.setattr(model, "fetch_model", fail)
    assert read_manifest(provide(volume, "second"))
