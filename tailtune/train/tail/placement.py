"""Chooses where to keep the hidden states of the frozen layers, by size, free memory and number of uses."""

from pathlib import Path
from typing import Literal, get_args

import psutil
import torch

from tailtune.errors import UserError
from tailtune.files import free_bytes, on_one_volume

Placement = Literal["gpu", "host", "disk", "none"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
"""In order of memory used, most first. If ranks choose differently, all use the choice that comes last here."""
MIN_USES = 0.8
"""Store hidden states if an average row is used at least this many times.

It is below 1, because computing all rows together is faster than computing random batches of them: the products are
larger, and rows that begin alike share the computation of their common tokens (BENCHMARKS.md).
"""
MAX_SHARE_OF_FREE_MEMORY = 0.5
MAX_SHARE_OF_FREE_DISK = 0.9
"""The rest is left for other files on the volume."""
CHECKPOINT_BYTES = 36
"""Estimated bytes per trainable parameter on the checkpoints' volume: weight and two moments in fp32, for the two
checkpoints that are kept by default and one that is being written. Existing checkpoints are counted again."""
OPTIMIZER_BYTES = 20
"""Bytes per trainable parameter in GPU memory, all in fp32: two moments, the gradient, DDP's copy of it, and the
gradient of the head while it is computed."""


def choose_placement(
    requested: str,
    num_bytes: int,
    uses: float,
    *,
    missing_bytes: int,
    directory: Path,
    checkpoints: Path,
    num_trainable: int,
    ranks_on_node: int,
    device: torch.device,
) -> tuple[Placement, str]:
    """Return the placement and the reason for it.

    `auto` chooses the first of GPU memory, host memory and disk that has room, or `none` where rows are not reused.
    Any other `requested` placement is used as it is, unless the volume is full: hidden states always pass through
    files there.

    Args:
        requested: The recipe's `tail.cache`.
        num_bytes: Size of all hidden states.
        uses: How often an average row enters the tail, in training and evaluations together.
        missing_bytes: Size of the hidden states that are not in the cache yet.
        directory: Where the cache is.
        checkpoints: Where checkpoints are written, possibly on the same volume.
        num_trainable: Number of trainable parameters.
        ranks_on_node: Ranks that share the memory of this machine.
        device: Where the tail trains.
    """
    size = f"{num_bytes / 1e9:.2f} GB"
    if requested == "none":
        return "none", "as the recipe says"
    if requested == "gpu" and device.type != "cuda":
        raise UserError("the stage's tail.cache is gpu, but training runs on the CPU", "set it to auto, host or disk")
    free_disk = free_bytes(directory)
    reserved = CHECKPOINT_BYTES * num_trainable if on_one_volume(directory, checkpoints) else 0
    if missing_bytes and missing_bytes > MAX_SHARE_OF_FREE_DISK * free_disk - reserved:
        needed = f", {reserved / 1e9:.2f} GB of them for checkpoints" if reserved else ""
        return "none", f"{size} do not fit into the {free_disk / 1e9:.2f} GB free at {directory}{needed}"
    if requested != "auto":
        return requested, "as the recipe says"  # type: ignore[return-value]
    if missing_bytes and uses < MIN_USES:
        return "none", f"a row is used only {uses:.1f} times on average, so caching does not pay"
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that the allocator caches would count as taken
        free = torch.cuda.mem_get_info()[0] - OPTIMIZER_BYTES * num_trainable
        if num_bytes <= MAX_SHARE_OF_FREE_MEMORY * free:
            return "gpu", f"{size}; {free / 1e9:.1f} GB were free"
    free = free_host_bytes()
    if num_bytes * ranks_on_node <= MAX_SHARE_OF_FREE_MEMORY * free:
        return "host", f"{size}; {free / 1e9:.1f} GB were free"
    return "disk", f"{size}, mapped from {directory}; only {free / 1e9:.1f} GB of host memory were free"


def free_host_bytes() -> int:
    """Memory that this process can still take: the machine's, or its control group's where that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        statistics = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        used -= int(statistics["inactive_file"])  # page cache, which the kernel reclaims
    except (OSError, ValueError, KeyError):
        return free  # no control group of version 2
    return free if limit == "max" else min(free, max(0, int(limit) - used))
