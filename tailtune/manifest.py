"""Publish a step's files so that they are complete or absent.

A step writes into `DIRECTORY.partial`. `manifest.json` is written last, then the directory is renamed
to its final name. A directory with a manifest is therefore complete, and a step that finds its own key
in the manifest has nothing left to do.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailtune.files import DISK_FULL, disk_error, read_json, sha256_file, sha256_json, write_json

MANIFEST = "manifest.json"
RESULTS_VERSION = 4
"""Part of the steps' keys: increase it when the same input gives another result."""


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
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(name), dict) for name in ("files", "facts")):
        return None  # no manifest, or another program's
    if key is not None and manifest.get("key") != json.loads(json.dumps(key, default=str)):
        return None
    for name, entry in manifest["files"].items():
        path = directory / name
        if not path.is_file() or not isinstance(entry, dict) or path.stat().st_size != entry.get("bytes"):
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
    `keep_partial` is set, so that the next attempt can resume from it; on a full disk it is always deleted. Raises
    UserError when the disk is full, or must not be written to.
    """
    partial_dir = partial_directory(directory)
    old = directory.with_name(directory.name + ".old")
    try:
        if not keep_partial:
            shutil.rmtree(partial_dir, ignore_errors=True)
        partial_dir.mkdir(parents=True, exist_ok=True)
        yield partial_dir
        write_manifest(partial_dir, key, facts, known_sha256)
        shutil.rmtree(old, ignore_errors=True)
        if directory.exists():
            directory.rename(old)
        partial_dir.rename(directory)
    except BaseException as error:
        if not keep_partial or (isinstance(error, OSError) and error.errno in DISK_FULL):
            shutil.rmtree(partial_dir, ignore_errors=True)
        if user_error := disk_error(error, directory.parent, facts.get("bytes")):
            raise user_error from None
        raise
    shutil.rmtree(old, ignore_errors=True)
