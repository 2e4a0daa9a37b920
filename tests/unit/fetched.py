"""What the tests of fetching share: content to fetch, and checks of a directory after it."""

import hashlib
import socket
from pathlib import Path

from tailtune.manifest import partial_directory, read_manifest

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
