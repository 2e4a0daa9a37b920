"""Files: JSON and text written atomically, hashes, free space."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any


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
