"""Fetching with the real clients (requests, huggingface_hub, s3fs) from local servers, good and bad ones."""

import errno
import hashlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from conftest import tiny_recipe
from moto.server import ThreadedMotoServer
from servers import COMMIT, Reply, Server, serve

from tailtune import manifest
from tailtune.errors import UserError
from tailtune.fetch import dataset as fetch
from tailtune.fetch import hub, model, transfer
from tailtune.fetch.dataset import fetch_dataset
from tailtune.fetch.model import fetch_model
from tailtune.files import sha256_file
from tailtune.manifest import partial_directory, read_manifest
from tailtune.run import Run

RETRY_WAIT_SECONDS = transfer.RETRY_WAIT_SECONDS
DATA = b'{"question": "?", "answer": "!"}\n' * 20_000
SHA256 = hashlib.sha256(DATA).hexdigest()
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": b"w" * 300_000,
    "model-00002-of-00002.safetensors": b"x" * 200_000,
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "onnx/config.json": b"{}",
    "README.md": b"#",
    "LICENSE": b"Apache",
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "HF_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transfer, "RETRY_WAIT_SECONDS", 0.01)
    caplog.set_level(logging.INFO, logger="tailtune")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "raw"


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def assert_nothing(target: Path) -> None:
    """Neither the final directory nor a partial one is there."""
    assert not target.exists()
    assert not partial_directory(target).exists()


def assert_complete(target: Path, name: str = "data.jsonl", content: bytes = DATA) -> None:
    assert sorted(path.name for path in target.iterdir()) == sorted([name, "manifest.json"])
    assert (target / name).read_bytes() == content
    published = read_manifest(target)
    assert published is not None
    assert published["facts"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert published["facts"]["bytes"] == len(content)
    assert not partial_directory(target).exists()


# --- every kind of source --------------------------------------------------------------------------


def test_a_run_that_has_trained_refuses_another_file(tmp_path: Path) -> None:
    from components.fetch_dataset import fetch_dataset as component

    source = tmp_path / "data.jsonl"
    source.write_bytes(DATA)
    folders = {f"{name}_dir": tmp_path / name for name in ("data", "models", "workspace")}
    run = Run(name="a", recipe=tiny_recipe(data_source=str(source)), local=True, **folders)
    first = component.python_func(run.to_json())
    source.write_bytes(DATA + DATA)
    checkpoint = run.models_dir / "checkpoints" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").write_text("{}")
    with pytest.raises(SystemExit):
        component.python_func(run.to_json())
    assert Path(first).read_bytes() == DATA
    shutil.rmtree(run.models_dir)
    assert Path(component.python_func(run.to_json())).read_bytes() == DATA + DATA


def test_local_file(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(DATA)
    first = fetch_dataset(str(source), target, sha256=SHA256)
    assert (first.path, first.revision, first.bytes, first.sha256, first.reused) == (
        target / "data.jsonl", None, len(DATA), SHA256, False)  # fmt: skip
    assert_complete(target)
    before = {path: path.stat().st_mtime_ns for path in [target, *target.iterdir()]}
    again = fetch_dataset(str(source), target, sha256=SHA256)
    assert again.reused and again.path == first.path and again.sha256 == SHA256
    assert before == {path: path.stat().st_mtime_ns for path in [target, *target.iterdir()]}
    source.write_bytes(b"changed\n")
    with pytest.raises(UserError, match=f"differs from the file that this run was trained on.*{SHA256}"):
        fetch_dataset(str(source), target, keep=True)
    assert before == {path: path.stat().st_mtime_ns for path in [target, *target.iterdir()]}
    assert {path.name for path in tmp_path.iterdir()} == {source.name, target.name}
    assert not fetch_dataset(str(source), target).reused
    assert_complete(target, content=b"changed\n")


def test_embedded(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "image").mkdir()
    monkeypatch.setenv("TAILTUNE_EMBEDDED_DIR", str(tmp_path / "image"))
    (tmp_path / "image" / "README.md").write_text("#")
    with pytest.raises(UserError, match=r"exactly one data file .* found 0 \(none\); build the image with one"):
        fetch_dataset("embedded", target)
    (tmp_path / "image" / "data.jsonl").write_bytes(DATA)
    assert fetch_dataset("embedded", target).source == "embedded"
    assert_complete(target)
    (tmp_path / "image" / "more.csv").write_text("a")
    with pytest.raises(UserError, match=r"found 2 \(data.jsonl, more.csv\)"):
        fetch_dataset("embedded", target)
    assert_complete(target)


def test_https(server: Server, target: Path) -> None:
    server.replies["/d/data.jsonl"] = Reply(DATA)
    fetched = fetch_dataset(f"{server.url}/d/data.jsonl?signature=secret", target)
    assert (fetched.source, fetched.revision) == (f"{server.url}/d/data.jsonl", "v1")
    assert_complete(target)
    assert "secret" not in (target / "manifest.json").read_text()
    assert fetch_dataset(f"{server.url}/d/data.jsonl?signature=secret", target).reused
    assert len(server.requests) == 1


def test_hub_dataset(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"README.md": b"#", "dataset_infos.json": b"{}", "data/data.jsonl": DATA}
    server.add_repo("datasets", "owner/name", files)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    fetched = fetch_dataset("hf://datasets/owner/name", target)
    assert (fetched.revision, fetched.sha256) == (COMMIT, SHA256)
    assert_complete(target)
    assert all(headers["authorization"] == "Bearer hf_test" for _, _, headers in server.requests)
    num_requests = len(server.requests)
    assert fetch_dataset("hf://datasets/owner/name", target).reused
    assert len(server.requests) == num_requests, "the commit is pinned, so there is no further query"


def test_hub_dataset_with_revision_and_file(server: Server, target: Path) -> None:
    server.add_repo("datasets", "owner/name", {"a.csv": b"a,b\n", "data.jsonl": DATA})
    assert fetch_dataset(f"hf://datasets/owner/name@{COMMIT}/data.jsonl", target).revision == COMMIT
    assert_complete(target)


# --- cuts ------------------------------------------------------------------------------------------


def test_a_cut_is_resumed(server: Server, target: Path, caplog: pytest.LogCaptureFixture) -> None:
    server.replies["/data.jsonl"] = Reply(DATA, cuts=[100_000])
    assert fetch_dataset(f"{server.url}/data.jsonl", target, sha256=SHA256).sha256 == SHA256
    assert server.ranges("/data.jsonl") == [None, "bytes=100000-"]
    assert_complete(target)
    assert "attempt 1 of 5" in caplog.text and "resuming at byte 100,000" in caplog.text


def test_a_cut_of_a_hub_dataset_is_resumed(server: Server, target: Path) -> None:
    server.add_repo("datasets", "owner/name", {"data.jsonl": DATA})
    path = f"/datasets/owner/name/resolve/{COMMIT}/data.jsonl"
    server.replies[path].cuts = [100_000]
    fetch_dataset("hf://datasets/owner/name", target)
    assert server.ranges(path) == [None, "bytes=100000-"]
    assert_complete(target)


def test_without_ranges_the_transfer_starts_again(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA, cuts=[100_000], ranges=False)
    fetch_dataset(f"{server.url}/data.jsonl", target)
    assert_complete(target)


def test_without_an_etag_the_transfer_starts_again(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA, cuts=[100_000], etag=None)
    fetch_dataset(f"{server.url}/data.jsonl", target)
    assert server.ranges("/data.jsonl") == [None, None]
    assert_complete(target)


def test_always_truncated(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA, cuts=[1000] * 9, ranges=False)
    with pytest.raises(UserError, match=r"data.jsonl could not be fetched: .*1000.*; check the network"):
        fetch_dataset(f"{server.url}/data.jsonl", target)
    assert not target.exists()
    assert len(server.requests) == transfer.ATTEMPTS


def stopped_after(server: Server, target: Path, path: str = "/data.jsonl") -> None:
    """Simulate an attempt of another process that ended with 100,000 bytes in its partial file."""
    server.replies[path].cuts = [100_000]
    server.replies[path].statuses = [200, 500, 500, 500, 500]
    with pytest.raises(UserError, match="answered 500"):
        fetch_dataset(f"{server.url}{path}", target)
    assert partial_directory(target).exists() and not target.exists()
    server.requests.clear()


def test_the_next_process_resumes(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA)
    stopped_after(server, target)
    fetch_dataset(f"{server.url}/data.jsonl", target, sha256=None)
    assert server.ranges("/data.jsonl") == ["bytes=100000-"]
    assert_complete(target)


def test_a_refusal_loses_nothing(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA)
    stopped_after(server, target)
    server.replies["/data.jsonl"].statuses = [401]
    with pytest.raises(UserError, match="401"):
        fetch_dataset(f"{server.url}/data.jsonl", target)
    fetch_dataset(f"{server.url}/data.jsonl", target)
    assert server.ranges("/data.jsonl") == ["bytes=100000-"] * 2
    assert_complete(target)


@pytest.mark.parametrize(
    ("content", "if_range"),
    [
        pytest.param(DATA[::-1], True, id="same-size"),
        pytest.param(DATA[::-1], False, id="if-range-ignored"),
        pytest.param(DATA[:50_000], False, id="shorter-and-if-range-ignored"),
    ],
)
def test_a_changed_file_is_not_mixed(server: Server, target: Path, content: bytes, if_range: bool) -> None:
    server.replies["/data.jsonl"] = Reply(DATA)
    stopped_after(server, target)
    server.replies["/data.jsonl"] = Reply(content, etag='"v2"', if_range=if_range)
    assert fetch_dataset(f"{server.url}/data.jsonl", target).revision == "v2"
    assert_complete(target, content=content)


def test_another_source_is_not_mixed(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA)
    stopped_after(server, target)
    server.replies["/other/data.jsonl"] = Reply(DATA[::-1])
    fetch_dataset(f"{server.url}/other/data.jsonl", target)
    assert server.ranges("/other/data.jsonl") == [None]
    assert_complete(target, content=DATA[::-1])


def test_a_fetch_resumes_after_its_process_was_killed(server: Server, target: Path, tmp_path: Path) -> None:
    reply = server.replies["/data.jsonl"] = Reply(DATA * 40)
    reply.pause_after = 4_000_000
    code = "import sys; from pathlib import Path; from tailtune.fetch.dataset import fetch_dataset; " \
           "fetch_dataset(sys.argv[1], Path(sys.argv[2]))"  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code, f"{server.url}/data.jsonl", str(target)])
    part = partial_directory(target) / "data.jsonl.part"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (part.exists() and part.stat().st_size > 0):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    received = part.stat().st_size
    assert 0 < received < len(reply.body) and not target.exists()
    reply.pause_after = None
    fetch_dataset(f"{server.url}/data.jsonl", target)
    assert server.ranges("/data.jsonl") == [None, f"bytes={received}-"]
    assert_complete(target, content=reply.body)


def test_progress_in_a_log(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer, "PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr(fetch, "TIMEOUT_SECONDS", 0.3)
    server.replies["/data.jsonl"] = Reply(DATA, pause_after=100_000)
    with pytest.raises(UserError, match="could not be fetched"):
        fetch_dataset(f"{server.url}/data.jsonl", target)
    assert re.search(r"fetch: [\d,]+ of 660,000 bytes", caplog.text)


# --- refusals and damage ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        pytest.param([401], r"answered 401 .*needs a login.*signed link", id="401"),
        pytest.param([403], r"answered 403 .*access is refused.*expired", id="403"),
        pytest.param([404], r"answered 404 .*nothing is there; check the address", id="404"),
        pytest.param([500] * 9, r"could not be fetched: the server answered 500 .*local path", id="always-500"),
        pytest.param([429] * 9, r"could not be fetched: the server answered 429", id="always-429"),
    ],
)
def test_http_refusals(server: Server, target: Path, statuses: list[int], words: str) -> None:
    server.replies["/data.jsonl"] = Reply(DATA, statuses=list(statuses))
    with pytest.raises(UserError, match=words):
        fetch_dataset(f"{server.url}/data.jsonl?token=secret", target)
    assert len(server.requests) == min(len(statuses), transfer.ATTEMPTS)
    assert not target.exists()


def test_500_then_good(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA, statuses=[500, 503])
    fetch_dataset(f"{server.url}/data.jsonl", target)
    assert_complete(target)


def test_wrong_hash(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA)
    with pytest.raises(UserError, match=f"data.jsonl has sha256 {SHA256}, expected {'0' * 64}; correct data.sha256"):
        fetch_dataset(f"{server.url}/data.jsonl", target, sha256="0" * 64)
    assert_nothing(target)


def test_damaged_hub_file(server: Server, target: Path) -> None:
    server.add_repo("datasets", "owner/name", {"data.parquet": DATA})
    server.replies[f"/datasets/owner/name/resolve/{COMMIT}/data.parquet"].body = DATA[::-1]
    with pytest.raises(UserError, match=r"arrived with sha256 .*, the hub says .*; run the step again"):
        fetch_dataset("hf://datasets/owner/name", target)
    assert_nothing(target)


def test_a_failure_keeps_the_earlier_data(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA)
    fetch_dataset(f"{server.url}/data.jsonl", target)
    with pytest.raises(UserError, match="404"):
        fetch_dataset(f"{server.url}/other.jsonl", target)
    assert_complete(target)


def test_web_page(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(b"<html>", content_type="text/html; charset=utf-8")
    with pytest.raises(UserError, match="is a web page, not a data file; use the link that downloads"):
        fetch_dataset(f"{server.url}/data.jsonl", target)
    assert_nothing(target)


def test_empty_answer(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(b"")
    with pytest.raises(UserError, match=r"data.jsonl is empty \(0 bytes\)"):
        fetch_dataset(f"{server.url}/data.jsonl", target)
    assert_nothing(target)


def test_no_network(target: Path) -> None:
    with pytest.raises(
        UserError, match=r"data.jsonl could not be fetched: .*[Cc]onnection refused.*local path"
    ) as error:
        fetch_dataset(f"{closed_port()}/data.jsonl?token=secret", target)
    assert "secret" not in str(error.value) and "\n" not in str(error.value)
    assert_nothing(target)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("{tmp}/missing.jsonl", "missing.jsonl does not exist; give the path of a file", id="missing"),
        pytest.param("{tmp}", "is a directory; name one file in it", id="directory"),
        pytest.param("{tmp}/empty.jsonl", r"empty.jsonl is empty \(0 bytes\)", id="empty"),
        pytest.param("ftp://host/data.csv", r"'ftp://' is not supported; use hf://datasets/", id="scheme"),
        pytest.param("hf://datasets/owner", "Write hf://datasets/OWNER/NAME", id="hf-syntax"),
        pytest.param("hf://owner/model", "is not a dataset; write hf://datasets", id="hf-model"),
        pytest.param("s3://bucket", "names no object; write s3://BUCKET/KEY", id="s3-bucket-only"),
        pytest.param("http://", "cannot be fetched.*check the address", id="no-host"),
    ],
)
def test_bad_sources(tmp_path: Path, target: Path, source: str, words: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match=words):
        fetch_dataset(source.format(tmp=tmp_path), target)
    assert_nothing(target)


# --- the disk --------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here (that needs root)")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_disk_too_small_is_known_up_front(server: Server, small_disk: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA)
    words = rf"no space in .*disk: {len(DATA):,} bytes are needed, 262,144 bytes are free; free some"
    with pytest.raises(UserError, match=words):
        fetch_dataset(f"{server.url}/data.jsonl", small_disk / "raw")
    assert list(small_disk.iterdir()) == []


def test_disk_fills_up_on_the_way(server: Server, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "check_space", lambda *_: None)  # as if another process filled the disk meanwhile
    server.replies["/data.jsonl"] = Reply(DATA)
    with pytest.raises(
        UserError, match=rf"no space in .*disk: {len(DATA):,} bytes are needed, 2\d\d,\d+ bytes are free"
    ):
        fetch_dataset(f"{server.url}/data.jsonl", small_disk / "raw")
    assert list(small_disk.iterdir()) == []


def test_disk_full_without_root(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "data.jsonl").write_bytes(DATA)
    monkeypatch.setattr("tailtune.fetch.transfer.tqdm.update", full)
    with pytest.raises(UserError, match=f"no space in .*: {len(DATA):,} bytes are needed"):
        fetch_dataset(str(tmp_path / "data.jsonl"), target)
    assert_nothing(target)


# --- the hub ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("missing", r"owner/missing is not on the hub .*check the name.*HF_TOKEN", id="missing"),
        pytest.param("name@v9", "has no such revision on the hub", id="revision"),
        pytest.param("name/x.csv", "x.csv has no such file on the hub", id="file"),
        pytest.param("name", r"12 data files \(00.csv, .*09.csv, …\); append one .*owner/name/00.csv", id="many"),
        pytest.param("none", "contains no .json, .jsonl, .csv, .txt or .parquet file", id="none"),
        pytest.param("gated", r"is gated: accept its licence at .*/owner/gated, .*HF_TOKEN", id="gated"),
        pytest.param("token", r"is refused by the hub .*401\); check HF_TOKEN", id="bad-token"),
    ],
)
def test_hub_dataset_refusals(server: Server, target: Path, source: str, words: str) -> None:
    server.add_repo("datasets", "owner/name", {f"{number:02}.csv": b"a" for number in range(12)})
    server.add_repo("datasets", "owner/none", {"README.md": b"#"})
    server.add_repo("datasets", "owner/gated", {"data.csv": b"a"}, refuse=(403, "GatedRepo"))
    server.add_repo("datasets", "owner/token", {"data.csv": b"a"}, refuse=(401, ""))
    with pytest.raises(UserError, match=words):
        fetch_dataset(f"hf://datasets/owner/{source}", target)
    assert_nothing(target)


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


# --- models ----------------------------------------------------------------------------------------


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


def test_a_hub_that_stops_answering_is_given_up(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HUB_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(hub, "HUB_GIVE_UP_SECONDS", 0.3)
    server.replies["/api/datasets/owner/name"] = Reply(b"{}", pause_after=1)
    with pytest.raises(UserError, match="could not be fetched"):
        fetch_dataset("hf://datasets/owner/name", target)
    assert len(server.requests) == 2


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


# --- S3 --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1",
                          aws_access_key_id="key", aws_secret_access_key="secret")  # fmt: skip
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="folder/data.jsonl", Body=DATA)
    yield url
    running.stop()


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return moto


def test_s3(s3: str, target: Path) -> None:
    fetched = fetch_dataset("s3://bucket/folder/data.jsonl", target, sha256=SHA256)
    assert fetched.revision == hashlib.md5(DATA).hexdigest()
    assert_complete(target)


def test_s3_with_a_mounted_secret(moto: str, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret\n",
        "AWS_S3_ENDPOINT": moto,
    }.items():
        (secret / name).write_text(value)
    monkeypatch.setenv("TAILTUNE_S3_SECRET_DIR", str(secret))
    fetch_dataset("s3://bucket/folder/data.jsonl", target)
    assert_complete(target)


def test_s3_is_resumed(s3: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setattr(fetch, "CHUNK_BYTES", 100_000)
    ranges: list[tuple[int, int]] = []
    read = s3fs.core._fetch_range

    def cut(*arguments: Any, **named: Any) -> bytes:
        ranges.append(arguments[4:6])
        if len(ranges) == 3:
            raise TimeoutError("cut")
        return bytes(read(*arguments, **named))

    monkeypatch.setattr("s3fs.core._fetch_range", cut)
    fetch_dataset("s3://bucket/folder/data.jsonl", target)
    assert [start for start, _ in ranges][:5] == [0, 100_000, 200_000, 200_000, 300_000]
    assert_complete(target)


@pytest.mark.parametrize(
    ("source", "environment", "words"),
    [
        pytest.param("bucket/missing.csv", {}, "bucket 'bucket' has no such object; check the key", id="key"),
        pytest.param("nowhere/data.csv", {}, r"no bucket 'nowhere'; .*AWS_ENDPOINT_URL", id="bucket"),
        pytest.param("bucket/folder", {}, "is a folder; name one object in it", id="folder"),
        pytest.param(
            "bucket/folder/data.jsonl",
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            "NoCredentialsError: .*; set AWS_ACCESS_KEY_ID",
            id="no-credentials",
        ),
        pytest.param(
            "bucket/folder/data.jsonl",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            "could not be fetched: .*127.0.0.1:9.*check the network",
            id="no-network",
        ),
        pytest.param(
            "bucket/folder/data.jsonl",
            {"TAILTUNE_S3_SECRET_DIR": "/nowhere"},
            "TAILTUNE_S3_SECRET_DIR is /nowhere, which is not a directory",
            id="no-secret",
        ),
    ],
)
def test_s3_refusals(
    s3: str,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    environment: dict[str, str],
    words: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        fetch_dataset(f"s3://{source}", target)
    assert_nothing(target)


def test_s3_bad_credentials(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto accepts every key, so a plain 403 stands in for it, which is also S3's answer to HEAD."""
    server.replies["/bucket/data.jsonl"] = Reply(b"", statuses=[403] * 9)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "bad")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "bad")
    monkeypatch.setenv("AWS_S3_ENDPOINT", server.url)
    with pytest.raises(UserError, match=r"S3 refused: .*403.*; set AWS_ACCESS_KEY_ID"):
        fetch_dataset("s3://bucket/data.jsonl", target)
    assert_nothing(target)
