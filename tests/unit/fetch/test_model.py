"""Models from the hub, whole or not at all."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from fetched import DATA, MODEL, assert_nothing, closed_port
from servers import COMMIT, Reply, Server

from tailtune import files, manifest
from tailtune.errors import UserError
from tailtune.fetch import model, transfer
from tailtune.fetch.dataset import fetch_dataset
from tailtune.fetch.model import fetch_model
from tailtune.files import sha256_file
from tailtune.manifest import partial_directory, read_manifest

RETRY_WAIT_SECONDS = transfer.RETRY_WAIT_SECONDS


def test_hub_without_network(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = closed_port()
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    for call in (
        lambda: fetch_dataset("hf://datasets/owner/name", target),
        lambda: fetch_model("owner/model", target),
    ):
        with pytest.raises(UserError, match=rf"\({endpoint}\) could not be fetched: .*refused.*local path"):
            call()
        assert_nothing(target)


def test_hub_offline(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="while HF_HUB_OFFLINE is set; unset it"):
        fetch_model("owner/model", target)
    assert_nothing(target)


def test_model(server: Server, target: Path) -> None:
    server.add_repo("models", "owner/model", MODEL)
    assert fetch_model("owner/model", target) == target
    names = {path.relative_to(target).as_posix() for path in target.rglob("*")}
    assert names == set(MODEL) - {"pytorch_model.bin", "onnx/config.json", "README.md"} | {"manifest.json"}
    published = read_manifest(target)
    assert published is not None and published["facts"]["revision"] == COMMIT
    num_requests = len(server.requests)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    fetch_model("owner/model", target)
    assert len(server.requests) == num_requests
    assert before == {path: path.stat().st_mtime_ns for path in target.rglob("*")}


def test_progress_of_a_model(
    server: Server, target: Path, last_lines: Callable[[], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    server.add_repo("models", "owner/model", MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQDM_POSITION", "-1")  # the hub's own bars would be shown, as on a terminal
        fetch_model("owner/model", target)
    assert last_lines() == ["fetch: model owner/model 500.0/500.0 kB"]
    assert "it/s" not in capfd.readouterr().err


def test_hashing_a_large_file_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_lines: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(files, "LARGE_BYTES", 1000)
    for num_bytes in (999, 1000):
        (tmp_path / str(num_bytes)).write_bytes(b"x" * num_bytes)
        assert sha256_file(tmp_path / str(num_bytes)) == hashlib.sha256(b"x" * num_bytes).hexdigest()
    assert last_lines() == ["sha256: 1000 1.0/1.0 kB"]


def test_model_is_resumed_after_a_cut(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # waits of the hub's client
    # The hub's client discards the chunk in which the transfer was cut; real chunks are 10 MB.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)
    server.add_repo("models", "owner/model", MODEL)
    path = f"/owner/model/resolve/{COMMIT}/model-00001-of-00002.safetensors"
    server.replies[path].cuts = [100_000]
    fetch_model("owner/model", target)
    assert server.ranges(path) == [None, "bytes=100000-"]
    assert (target / "model-00001-of-00002.safetensors").read_bytes() == MODEL["model-00001-of-00002.safetensors"]


def test_model_keeps_finished_files(server: Server, target: Path) -> None:
    server.add_repo("models", "owner/model", MODEL)
    paths = [f"/owner/model/resolve/{COMMIT}/model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    server.replies[paths[0]].statuses = [403] * 99
    with pytest.raises(UserError, match=r"refused by the hub .*403"):
        fetch_model("owner/model", target)
    assert not target.exists() and partial_directory(target).exists()
    server.replies[paths[0]].statuses = []
    fetch_model("owner/model", target)
    assert server.ranges(paths[1]) == [None]
    assert read_manifest(target) is not None and not partial_directory(target).exists()


def test_incomplete_model_is_not_published(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub would return the incomplete directory with only a warning."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    server.add_repo("models", "owner/model", MODEL)
    server.replies[f"/api/models/owner/model/tree/{COMMIT}"].statuses = [500] * 99
    with pytest.raises(UserError, match=r"model owner/model .*could not be fetched: .*did not arrive in full"):
        fetch_model("owner/model", target)
    assert not target.exists()


@pytest.mark.parametrize("listing", ["revision/main", f"tree/{COMMIT}"])
def test_a_listing_that_keeps_failing_takes_a_minute(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    """The hub's client waits between attempts of its own, within each of ours."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr("random.uniform", lambda low, high: (low + high) / 2)
    monkeypatch.setattr(transfer, "RETRY_WAIT_SECONDS", RETRY_WAIT_SECONDS)
    server.add_repo("models", "owner/model", MODEL)
    server.replies[f"/api/models/owner/model/{listing}"].statuses = [500] * 99
    with pytest.raises(UserError, match="run the step again"):
        fetch_model("owner/model", target)
    assert 10 < sum(waits) < 60


def test_no_content_is_hashed_twice(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def count(path: Path) -> str:
        hashed.append(path.name.removesuffix(".part"))
        return sha256_file(path)

    for module in (model, transfer, manifest):
        monkeypatch.setattr(module, "sha256_file", count)
    server.replies["/data.jsonl"] = Reply(DATA)
    fetch_dataset(f"{server.url}/data.jsonl", tmp_path / "raw")
    assert hashed == ["data.jsonl"]
    hashed.clear()
    server.add_repo("models", "owner/model", MODEL)
    fetch_model("owner/model", tmp_path / "model")
    assert len(hashed) == len(set(hashed)) == 7
    for directory in (tmp_path / "raw", tmp_path / "model"):
        published = read_manifest(directory)
        assert published is not None and {"source", "revision", "bytes", "sha256"} <= set(published["facts"])
        for name, entry in published["files"].items():
            assert entry["sha256"] == sha256_file(directory / name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("owner/gated", r"is gated: accept its licence .*/owner/gated, then set HF_TOKEN", id="gated"),
        pytest.param("owner/missing", "model owner/missing is not on the hub", id="missing"),
        pytest.param("owner/pickle", "has no .safetensors file; take a model", id="no-safetensors"),
        pytest.param("owner/weights", "has no config.json", id="no-config"),
        pytest.param("a/b/c", "is not a valid hub name; write OWNER/NAME, or a local path", id="name"),
    ],
)
def test_model_refusals(server: Server, target: Path, name: str, words: str) -> None:
    server.add_repo("models", "owner/gated", MODEL, refuse=(403, "GatedRepo"))
    server.add_repo("models", "owner/pickle", {"config.json": b"{}", "pytorch_model.bin": b"p"})
    server.add_repo("models", "owner/weights", {"model.safetensors": b"w"})
    with pytest.raises(UserError, match=words):
        fetch_model(name, target)
    assert not target.exists()


def test_damaged_model(server: Server, target: Path) -> None:
    server.add_repo("models", "owner/model", MODEL)
    server.replies[f"/owner/model/resolve/{COMMIT}/model-00002-of-00002.safetensors"].body = b"y" * 200_000
    with pytest.raises(UserError, match=r"model-00002-of-00002.safetensors has a different sha256"):
        fetch_model("owner/model", target)
    assert_nothing(target)


def test_model_on_a_small_disk(server: Server, small_disk: Path) -> None:
    server.add_repo("models", "owner/model", MODEL)
    with pytest.raises(UserError, match=r"no space in .*: 500,\d\d\d bytes are needed"):
        fetch_model("owner/model", small_disk / "base_model")
    assert list(small_disk.iterdir()) == []
