"""Publish a step's files so that they are complete or absent.

A step writes into `DIRECTORY.partial`. `manifest.json` is written last, then the directory is renamed
to its final name. A directory with a manifest is therefore complete, and a step that finds its own key
in the manifest has nothing left to do.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
RESULTS_VERSION = 2
"""Part of the steps' keys: increase it when the same input gives another result."""


def free_bytes(directory: Path) -> int:
    """Return the free bytes on the file system where the directory is, or will be."""
    return shutil.disk_usage(_existing(directory)).free


def on_one_volume(directory: Path, other: Path) -> bool:
    """Return whether two directories are, or will be, on the same file system and share its free space."""
    return _existing(directory).stat().st_dev == _existing(other).stat().st_dev


def _existing(path: Path) -> Path:
    """Return the path itself or its nearest parent that exists."""
    return next(ancestor for ancestor in (path, *path.parents) if ancestor.exists())


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON as hexadecimal text: the identity of a configuration."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Return a JSON file's value; None if there is no file, or no complete JSON text in it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write JSON (indented, UTF-8) so that a reader sees either the old file or the complete new one."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text by rename, so that a reader sees either the old file or the complete new one.

    A file that contains the text already is not touched, so its modification time stays.
    """
    if path.is_file() and path.read_bytes() == text.encode("utf-8", "backslashreplace"):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.chmod(temporary, 0o664)  # mkstemp's 0600 would lock out the other pods' user
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def partial_directory(directory: Path) -> Path:
    """Return the directory that a step writes into before `directory` is published."""
    return directory.with_name(directory.name + ".partial")


def read_manifest(directory: Path, key: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the manifest of a complete directory, or None.

    None when there is no manifest, when `key` is given and differs from the manifest's, or when a
    listed file is missing or has another size. Content is not hashed again: that would read whole
    models at every start.
    """
    manifest = read_json(directory / MANIFEST)
    if not isinstance(manifest, dict) or not {"key", "files", "facts"} <= manifest.keys():
        return None  # no manifest, or another program's
    if key is not None and manifest["key"] != json.loads(json.dumps(key, default=str)):
        return None
    for name, entry in manifest["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return None
    return manifest


def content_sha256(directory: Path, name: str) -> str:
    """Return the SHA-256 of a file in a published directory, from its manifest, or computed if there is none."""
    manifest = read_manifest(directory)
    entry = manifest["files"].get(name) if manifest else None
    return str(entry["sha256"]) if entry else sha256_file(directory / name)


def directory_identity(directory: Path) -> str:
    """Return a SHA-256 that changes with a directory's content: of its manifest, or of every file."""
    if read_manifest(directory):
        return sha256_file(directory / MANIFEST)
    return sha256_json(
        {str(p.relative_to(directory)): sha256_file(p) for p in sorted(directory.rglob("*")) if p.is_file()}
    )


def write_manifest(
    directory: Path, key: Mapping[str, Any], facts: Mapping[str, Any], known_sha256: Mapping[str, str] | None = None
) -> None:
    """Hash every file below `directory` whose hash is not known, and write the manifest, last."""
    known_sha256, files = known_sha256 or {}, {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != MANIFEST:
            path.chmod(path.stat().st_mode | 0o444)  # safetensors writes 0600, but other pods have other users
            files[name] = {"bytes": path.stat().st_size, "sha256": known_sha256.get(name) or sha256_file(path)}
    write_json(directory / MANIFEST, {"key": key, "files": files, "facts": facts})


@contextmanager
def publish(
    directory: Path,
    key: Mapping[str, Any],
    facts: dict[str, Any],
    *,
    keep_partial: bool = False,
    known_sha256: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """Yield the directory to write into; publish it as `directory` when the block succeeds.

    `key` is what the content depends on, `facts` is what the block finds out; the block fills it in.
    `known_sha256` (file name to hash), filled in likewise, saves reading those files again.
    When the block raises, `directory` stays as it is, and what the block wrote is deleted, unless
    `keep_partial` is set, so that the next attempt can resume from it.
    """
    partial_dir = partial_directory(directory)
    if not keep_partial:
        shutil.rmtree(partial_dir, ignore_errors=True)
    partial_dir.mkdir(parents=True, exist_ok=True)
    try:
        yield partial_dir
        write_manifest(partial_dir, key, facts, known_sha256)
    except BaseException:
        if not keep_partial:
            shutil.rmtree(partial_dir, ignore_errors=True)
        raise
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial_dir.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
