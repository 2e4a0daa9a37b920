"""Directories that all runs share, one per key: hidden states of frozen layers, small base models.

Whatever is in them can be computed again, so they may be deleted at any time between runs.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tailtune.files import delete_garbage, discard, sha256_json, write_json

KEEP_SECONDS = 7 * 24 * 3600
"""An entry that no run has used for this long is deleted by the next run that uses one."""


def entry_directory(root: Path, key: Mapping[str, Any]) -> Path:
    """Return the directory below `root` that belongs to `key`."""
    return root / sha256_json(key)[:16]


def use_entry(root: Path, key: Mapping[str, Any]) -> Path:
    """Return the directory of `key`, created if need be and marked as used; delete the unused ones below `root`."""
    directory = entry_directory(root, key)
    write_json(directory / "key.json", key)
    os.utime(directory)
    with suppress(OSError):  # another run deletes the same at the same time
        delete_garbage(root)
        for other in unused_entries(root, time.time() - KEEP_SECONDS):
            if other != directory:
                discard(other)
    return directory


def unused_entries(root: Path, since: float) -> list[Path]:
    """Return the entries that no run has used since this time, in seconds since 1970."""
    entries = []
    for path in root.glob("*/"):
        with suppress(FileNotFoundError):
            # key.json: a root that a user chose may contain directories that are not entries
            is_entry = (path / "key.json").is_file() and not path.name.startswith(".") and not path.is_symlink()
            if is_entry and path.stat().st_mtime < since:
                entries.append(path)
    return sorted(entries)
