"""Files: JSON and text written atomically, hashes, sizes, globs, deletion that may be killed."""

import errno
import hashlib
import json
import os
import shutil
import stat
import uuid
from contextlib import suppress
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from tailtune.errors import UserError
from tailtune.progress import Progress

LARGE_BYTES = 256 << 20
"""Hashing a file of this size may be seen to take time."""
MAX_DIGITS = 4000
"""Of an integer in JSON. Python itself refuses more than 4,300."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
GARBAGE = ".garbage"
"""Ending of the name that `discard` gives to what it deletes."""


def free_bytes(directory: Path) -> int:
    """Return the free bytes on the file system where the directory is, or will be."""
    return shutil.disk_usage(_existing(directory)).free


def disk_error(error: BaseException, directory: Path, num_bytes: int | None = None) -> UserError | None:
    """Return what an error of the disk below `directory` means and what to do about it; None for any other one.

    `num_bytes` is how many are needed, where that is known.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in DISK_FULL:
        needed = f"{num_bytes:,} bytes are needed" if num_bytes else "what is written does not fit"
        problem = f"no space in {directory}: {needed}, {free_bytes(directory):,} bytes are free"
        return UserError(problem, "remove old runs with tailtune gc --runs, or use a larger volume")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        at = getattr(error, "filename", None) or directory
        problem = f"cannot read or write {at} ({os.strerror(number)})"
        return UserError(problem, "check the volume's access mode and the permissions")
    return None


def on_one_volume(directory: Path, other: Path) -> bool:
    """Return whether two directories are, or will be, on the same file system and share its free space."""
    return _existing(directory).stat().st_dev == _existing(other).stat().st_dev


def _existing(path: Path) -> Path:
    """Return the path itself or its nearest parent that exists."""
    return next(ancestor for ancestor in (path, *path.parents) if ancestor.exists())


def matching_paths(pattern: Path) -> list[Path]:
    """Return the files that a path with `*`, `?` or `[…]` matches, sorted; none for a path without."""
    if not has_magic(str(pattern)):
        return []
    return sorted(path for path in map(Path, glob(str(pattern), recursive=True)) if path.is_file())


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text."""
    num_bytes = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        if num_bytes < LARGE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        with Progress(f"sha256: {path.name}", num_bytes, "bytes", measure=file.tell):
            return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON as hexadecimal text: the identity of a configuration."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for duplicate keys and for what Python cannot read."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    except RecursionError:
        raise ValueError("brackets within brackets in too many levels") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key '{next(key for key in found if keys.count(key) > 1)[:80]}'")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def read_json(path: Path) -> Any:
    """Return the object of a JSON file; None if there is no file, or no complete JSON object in it."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write JSON (indented, UTF-8) so that a reader sees either the old file or the complete new one."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", private=private)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write UTF-8 text by rename, so that a reader sees either the old file or the complete new one.

    A file that contains the text already is not touched, so its modification time stays. Only its owner may read a
    private file; who may read another one, says the umask.
    """
    if path.is_file() and path.read_bytes() == text.encode("utf-8", "backslashreplace"):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def num_bytes(path: Path) -> int:
    """Return the size of a file, or of all files below a directory. Links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    total = 0
    for directory, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):  # another process writes or deletes here
                status = os.lstat(os.path.join(directory, name))
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def discard(path: Path) -> None:
    """Delete a file or directory under another name, which tells a later `delete_garbage` what a killed one has left.

    A link is deleted, not what it points to. Raises OSError.
    """
    garbage = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{GARBAGE}")
    path.rename(garbage)
    _delete(garbage)


def delete_garbage(directory: Path) -> None:
    """Delete what interrupted calls of `discard` have left in `directory`. Raises OSError."""
    for path in directory.glob(f".*{GARBAGE}"):
        _delete(path)


def _delete(path: Path) -> None:
    with suppress(FileNotFoundError):  # another process deletes it too
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
