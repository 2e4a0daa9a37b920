"""Transfers over HTTP that are cut, refused or damaged, and disks that fill up."""

import errno
import gzip
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fetched import DATA, SHA256, assert_complete, assert_nothing, closed_port
from http_server import HttpServer
from servers import Reply, Server

from tailtune import progress
from tailtune.errors import UserError
from tailtune.fetch import dataset as fetch
from tailtune.fetch import transfer
from tailtune.fetch.dataset import fetch_dataset
from tailtune.files import num_bytes
from tailtune.manifest import partial_directory


def test_https(server: Server, target: Path) -> None:
    server.replies["/d/data.jsonl"] = Reply(DATA)
    fetched = fetch_dataset(f"{server.url}/d/data.jsonl?signature=secret", target)
    assert (fetched.source, fetched.revision) == (f"{server.url}/d/data.jsonl", "v1")
    assert_complete(target)
    assert "secret" not in (target / "manifest.json").read_text()
    assert fetch_dataset(f"{server.url}/d/data.jsonl?signature=secret", target).reused
    assert len(server.requests) == 1


def test_a_cut_is_resumed(server: Server, target: Path, caplog: pytest.LogCaptureFixture) -> None:
    server.replies["/data.jsonl"] = Reply(DATA, cuts=[100_000])
    assert fetch_dataset(f"{server.url}/data.jsonl", target, sha256=SHA256).sha256 == SHA256
    assert server.ranges("/data.jsonl") == [None, "bytes=100000-"]
    assert_complete(target)
    assert "attempt 1 of 5" in caplog.text and "resuming at byte 100,000" in caplog.text


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


def test_progress_of_a_file(server: Server, target: Path, last_lines: Callable[[], list[str]]) -> None:
    server.replies["/data.jsonl"] = Reply(DATA, cuts=[100_000])
    fetch_dataset(f"{server.url}/data.jsonl", target)
    assert last_lines() == ["fetch: data.jsonl 660.0/660.0 kB"], "none of the attempt that failed"


def test_progress_of_a_file_of_unknown_size(server: Server, target: Path, last_lines: Callable[[], list[str]]) -> None:
    server.replies["/data.jsonl"] = Reply(gzip.compress(DATA), headers={"Content-Encoding": "gzip"})
    fetch_dataset(f"{server.url}/data.jsonl", target)
    assert last_lines() == ["fetch: data.jsonl 660.0 kB"]


def test_a_transfer_that_stands_still_is_seen_to(
    server: Server, target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.1)
    monkeypatch.setattr(progress, "_last_line_at", -1e9)
    monkeypatch.setattr(fetch, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 80_000)
    server.replies["/data.jsonl"] = Reply(DATA, pause_after=100_000)
    with pytest.raises(UserError, match="could not be fetched"):
        fetch_dataset(f"{server.url}/data.jsonl", target)
    assert re.search(r"fetch: data\.jsonl 100\.0/660\.0 kB .* ETA \d+ s", caplog.text)


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


@pytest.mark.parametrize("content_type", ["text/html; charset=utf-8", "Text/HTML", "application/octet-stream"])
def test_web_page(server: Server, target: Path, content_type: str) -> None:
    server.replies["/data.jsonl"] = Reply(b"\n<HTML>", content_type=content_type)
    with pytest.raises(UserError, match="is a web page, not a data file; use the link that downloads"):
        fetch_dataset(f"{server.url}/data.jsonl", target)
    assert_nothing(target)


@pytest.mark.parametrize("length", ["abc", "-5", " ", "9" * 5000])
def test_a_length_that_is_none(length: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", length)
        request.end_headers()
        request.wfile.write(DATA)
        request.close_connection = True

    monkeypatch.setattr(HttpServer, "__abstractmethods__", frozenset())
    server = HttpServer()
    monkeypatch.setattr(server, "answer", answer)
    fetch_dataset(f"{server.url}/data.jsonl", target)
    server.close()
    assert_complete(target)


def test_a_redirection_to_no_address(server: Server, target: Path) -> None:
    server.replies["/data.jsonl"] = Reply(b"", statuses=[302], headers={"Location": "http://[::1/x"})
    with pytest.raises(
        UserError, match=r"data.jsonl cannot be fetched: it is, or leads to, an invalid address; check the"
    ):
        fetch_dataset(f"{server.url}/data.jsonl", target)


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


def test_disk_too_small_is_known_up_front(server: Server, small_disk: Path) -> None:
    server.replies["/data.jsonl"] = Reply(DATA)
    words = rf"no space in .*disk: {len(DATA):,} bytes are needed, 262,144 bytes are free; remove old runs"
    with pytest.raises(UserError, match=words):
        fetch_dataset(f"{server.url}/data.jsonl", small_disk / "raw")
    assert list(small_disk.iterdir()) == []


def test_what_other_files_have_taken_is_not_free(server: Server, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a data set are received one after the other into one directory."""
    for name in ("one", "two"):
        server.replies[f"/{name}.jsonl"] = Reply(DATA)
    size = len(DATA) + 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size - num_bytes(target.parent)))
    with pytest.raises(UserError, match=rf"no space in .*: {2 * len(DATA):,} bytes are needed"):
        fetch_dataset([f"{server.url}/{name}.jsonl" for name in ("one", "two")], target)


def test_disk_fills_up_on_the_way(server: Server, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "check_space", lambda *_: None)  # as if another process filled the disk meanwhile
    server.replies["/data.jsonl"] = Reply(DATA)
    with pytest.raises(
        UserError, match=rf"no space in .*disk: {len(DATA):,} bytes are needed, 2\d\d,\d+ bytes are free"
    ):
        fetch_dataset(f"{server.url}/data.jsonl", small_disk / "raw")
    assert list(small_disk.iterdir()) == []


def test_disk_full_and_the_size_is_not_known(server: Server, small_disk: Path) -> None:
    server.replies["/data.jsonl"] = Reply(gzip.compress(DATA), headers={"Content-Encoding": "gzip"})
    words = r"no space in .*disk: what is written does not fit, 2\d\d,\d+ bytes are free; remove old runs"
    with pytest.raises(UserError, match=words):
        fetch_dataset(f"{server.url}/data.jsonl", small_disk / "raw")
    assert list(small_disk.iterdir()) == []


def test_disk_full_without_root(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "data.jsonl").write_bytes(DATA)
    monkeypatch.setattr("tailtune.progress.Progress.update", full)
    with pytest.raises(UserError, match=f"no space in .*: {len(DATA):,} bytes are needed"):
        fetch_dataset(str(tmp_path / "data.jsonl"), target)
    assert_nothing(target)
