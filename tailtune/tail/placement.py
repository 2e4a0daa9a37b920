"""Where the states of the frozen layers are kept: by size, by what is free, and by how often they are used."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

Kind = Literal["gpu", "host", "disk", "none"]
MIN_USES = 1.2
"""Uses of an average row, from which on it pays to store its states: a store costs a write and a read."""
SHARE_OF_FREE = 0.5
ADAM_BYTES = 12
"""Gradient and two moments in fp32, of a trainable parameter."""


@dataclass(frozen=True)
class Placement:
    kind: Kind
    reason: str


def place(
    wanted: str, num_bytes: int, uses: float, *, directory: Path, num_trainable: int, ranks_on_node: int
) -> Placement:
    """The first of GPU memory, host memory and the volume that has room; none when rows are not used again.

    `uses` is how often an average row enters the tail, training and evaluations together. A wanted
    placement is taken, unless the volume is full: the states always pass through its files.
    """
    size = f"{num_bytes / 1e9:.2f} GB"
    if wanted == "none":
        return Placement("none", "as the recipe says")
    free_disk = shutil.disk_usage(existing(directory)).free
    if num_bytes > free_disk:
        return Placement("none", f"{size} do not fit into the {free_disk / 1e9:.2f} GB free at {directory}")
    if wanted != "auto":
        return Placement(wanted, "as the recipe says")  # type: ignore[arg-type]
    if uses < MIN_USES:
        return Placement("none", f"a row is used {uses:.1f} times")
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0] - ADAM_BYTES * num_trainable
        if num_bytes <= SHARE_OF_FREE * free:
            return Placement("gpu", f"{size} of {free / 1e9:.1f} GB free GPU memory")
    free = free_host_bytes()
    if num_bytes * ranks_on_node <= SHARE_OF_FREE * free:
        return Placement("host", f"{size} of {free / 1e9:.1f} GB free memory")
    return Placement("disk", f"{size}, mapped from {directory}, because memory has {free / 1e9:.1f} GB free")


def free_host_bytes() -> int:
    """Memory that this process may still take: of the machine, or of its control group where that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free  # no control group of version 2
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def existing(directory: Path) -> Path:
    """The directory, or its nearest parent that exists."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def ranks_on_node() -> int:
    """As torchrun tells every rank."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
