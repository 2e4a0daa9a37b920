"""Directories that all runs share, one per key: hidden states of frozen layers, small base models.

Whatever is in them can be computed again, so they may be deleted at any time between runs.
"""

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tailtune.files import sha256_json, write_json

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
    for other in root.glob("*/"):
        with suppress(FileNotFoundError):  # another run deletes it at the same time
            age_seconds = time.time() - other.stat().st_mtime
            # key.json: a root that a user chose may contain directories that are not entries
            if other != directory and (other / "key.json").is_file() and age_seconds > KEEP_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
    return directory
