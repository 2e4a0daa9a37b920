"""Data sets from S3."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from conftest import tiny_recipe
from fetched import DATA, SHA256, assert_complete, assert_nothing
from moto.server import ThreadedMotoServer
from servers import Reply, Server

from tailtune.errors import UserError
from tailtune.fetch import dataset as fetch
from tailtune.fetch.dataset import fetch_dataset
from tailtune.inspection import inspect_sources
from tailtune.manifest import read_manifest


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
    for name in ("part-2.jsonl", "part-1.jsonl", "deep/part-0.jsonl", "notes.md", "_SUCCESS"):
        client.put_object(Bucket="bucket", Key=f"many/{name}", Body=DATA)
    for name in ("train.jsonl", "test.jsonl"):
        client.put_object(Bucket="bucket", Key=f"splits/{name}", Body=DATA)
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


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("many/", ["deep/part-0.jsonl", "part-1.jsonl", "part-2.jsonl"]),
        ("many/part-*.jsonl", ["part-1.jsonl", "part-2.jsonl"]),
        ("*/part-1*", ["part-1.jsonl"]),
    ],
)
def test_s3_prefix_and_pattern(source: str, names: list[str], s3: str, target: Path) -> None:
    fetched = fetch_dataset(f"s3://bucket/{source}", target)
    published = read_manifest(target)
    assert published is not None
    assert [file["source"] for file in published["facts"]["files"]] == [f"s3://bucket/many/{name}" for name in names]
    assert fetched.revision == hashlib.md5(DATA).hexdigest()


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
        pytest.param(
            "bucket/folder", {}, "is a folder; name one object in it, or write s3://bucket/folder/ for all", id="folder"
        ),
        pytest.param("bucket/nothing/", {}, "contains no .json, .jsonl, .csv, .txt or .parquet file", id="prefix"),
        pytest.param("bucket/many/*.csv", {}, "matches no .json, .jsonl, .csv, .txt or .parquet object", id="pattern"),
        pytest.param("nowhere/folder/", {}, r"no bucket 'nowhere'; .*AWS_ENDPOINT_URL", id="prefix-bucket"),
        pytest.param(
            "bucket/splits/",
            {},
            r"2 splits \(train: train.jsonl, test: test.jsonl\); name .*/train.jsonl$",
            id="splits",
        ),
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


def test_a_folder_is_inspected(s3: str) -> None:
    lines = list(inspect_sources(["s3://bucket/many/"], tiny_recipe()))
    assert lines[0] == "not fetched, because there are enough rows: 2 of 3 files"
    assert lines[1] == f"3 files: the first rows of each, 10,000 rows, {len(DATA):,} bytes"
