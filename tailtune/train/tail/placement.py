"""Where the states of the frozen layers are kept: by size, by what is free, and by how often they are used."""

from pathlib import Path
from typing import Literal, get_args

import psutil
import torch

from tailtune.errors import UserError
from tailtune.files import free_bytes, on_one_volume

Kind = Literal["gpu", "host", "disk", "none"]
PLACEMENTS: tuple[Kind, ...] = get_args(Kind)
"""By how little memory they need: when ranks choose differently, all take the last one."""
MIN_USES = 0.8
"""Uses of an average row, from which on it pays to store its states.

Less than one, because all rows together take less time than batches of rows that meet at random: larger
products, and rows that begin alike are computed once (BENCHMARKS.md).
"""
SHARE_OF_FREE = 0.5
SHARE_OF_DISK = 0.9
"""The rest is for what else is written there."""
CHECKPOINT_BYTES = 36
"""Of a trainable parameter on the checkpoints' volume, an estimate: weight and two moments in fp32, of the two
checkpoints that are kept by default and one that is being written; those that are there already count again."""
OPTIMIZER_BYTES = 20
"""Of a trainable parameter: two moments, gradient, DDP's copy of it, the head's gradient as it is made; all fp32."""


def place(
    wanted: str,
    num_bytes: int,
    uses: float,
    *,
    missing_bytes: int,
    directory: Path,
    checkpoints: Path,
    num_trainable: int,
    ranks_on_node: int,
    device: torch.device,
) -> tuple[Kind, str]:
    """Where, and why: the first of GPU memory, host memory and the volume that has room; none when rows are not reused.

    `uses` is how often an average row enters the tail, training and evaluations together. A wanted
    placement is taken, unless the volume is full: the states always pass through its files.
    """
    size = f"{num_bytes / 1e9:.2f} GB"
    if wanted == "none":
        return "none", "as the recipe says"
    if wanted == "gpu" and device.type != "cuda":
        raise UserError("the stage's tail.cache is gpu, but training runs on the CPU; set it to auto, host or disk")
    free_disk = free_bytes(directory)
    reserved = CHECKPOINT_BYTES * num_trainable if on_one_volume(directory, checkpoints) else 0
    if missing_bytes and missing_bytes > SHARE_OF_DISK * free_disk - reserved:
        needed = f", {reserved / 1e9:.2f} GB of them for checkpoints" if reserved else ""
        return "none", f"{size} do not fit into the {free_disk / 1e9:.2f} GB free at {directory}{needed}"
    if wanted != "auto":
        return wanted, "as the recipe says"  # type: ignore[return-value]
    if missing_bytes and uses < MIN_USES:
        return "none", f"a row is used {uses:.1f} times"
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator keeps for itself counts as taken
        free = torch.cuda.mem_get_info()[0] - OPTIMIZER_BYTES * num_trainable
        if num_bytes <= SHARE_OF_FREE * free:
            return "gpu", f"{size} of {free / 1e9:.1f} GB free GPU memory"
    free = free_host_bytes()
    if num_bytes * ranks_on_node <= SHARE_OF_FREE * free:
        return "host", f"{size} of {free / 1e9:.1f} GB free memory"
    return "disk", f"{size}, mapped from {directory}, because memory has {free / 1e9:.1f} GB free"


def free_host_bytes() -> int:
    """Memory that this process may still take: of the machine, or of its control group where that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        statistics = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        used -= int(statistics["inactive_file"])  # page cache, which gives way
    except (OSError, ValueError, KeyError):
        return free  # no control group of version 2
    return free if limit == "max" else min(free, max(0, int(limit) - used))
