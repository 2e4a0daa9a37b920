"""The states of all rows at the cut, computed once: shards on a volume, read from there or from memory.

A shard holds the own tokens of rows of similar length. It is written under another name, ends in a
checksum seeded with the cache's key, and gets its name last: what is there in full is right, what is
missing or broken is computed, by the rank whose share it is. There is nothing else to keep in step.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from tailtune.log import log
from tailtune.manifest import sha256_json, write_json
from tailtune.tail.layout import Layout, lay_out, own_tokens
from tailtune.tail.rows import Rows
from tailtune.tail.split import Split

SHARD_TOKENS = {"cpu": 2048}
"""Own tokens in a shard, which is also what is computed at once; other devices take 16,384."""
DIGEST_BYTES = 8
KEEP_SECONDS = 7 * 24 * 3600
"""A cache that no run has used for so long is deleted when another one is filled."""
SECONDS_BETWEEN_LINES = 10.0


class Prefix:
    """Computes the frozen layers; the shared prompt once, its keys and values kept for all rows."""

    def __init__(self, split: Split, rows: Rows, *, stop_backward: bool = True) -> None:
        self.split, self.rows, self.stop_backward = split, rows, stop_backward
        self.device = split.head.weight.device
        self.prompt: torch.Tensor | None = None
        self._memory: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def layout(self, rows: Sequence[int], *, padded: bool = False) -> Layout:
        """Prompt and own tokens of a batch; `padded` gives all rows the length of the longest."""
        starts, lengths = self.rows.starts[rows], self.rows.lengths[rows]
        if padded:
            lengths = (starts + lengths).max() - starts
        return lay_out(len(self.rows.prompt), starts, lengths, self.device)

    def prompt_states(self) -> torch.Tensor:
        """[P, H] states of the shared prompt."""
        if self.prompt is None:
            none = np.empty(0, np.int64)
            layout = lay_out(len(self.rows.prompt), none, none, self.device, memory=self._memory)
            with torch.no_grad():
                ids = own_tokens([], self.rows.prompt, layout, self.device)
                empty = torch.empty(0, self.split.hidden_size, device=self.device)
                self.prompt = self.split.frozen(ids, layout) if ids.numel() else empty
        return self.prompt

    def own_states(self, rows: Sequence[int]) -> torch.Tensor:
        """[own tokens, H] states of the rows' own tokens, one row after the other."""
        self.prompt_states()
        inherited = self.rows.inherited(rows)
        layout = lay_out(len(self.rows.prompt), self.rows.starts[rows], self.rows.lengths[rows], self.device,
                         has_prompt=False, inherited=inherited, memory=self._memory)  # fmt: skip
        new = [self.rows.own(row)[count:] for row, count in zip(rows, inherited, strict=True)]
        with torch.no_grad():
            states = self.split.frozen(own_tokens(new, self.rows.prompt, layout, self.device), layout)
        return states if layout.tokens is None else states.index_select(0, layout.tokens)

    def states(self, rows: Sequence[int], layout: Layout) -> torch.Tensor:
        """[T, H] states of a batch, computed now."""
        if self.stop_backward:
            return assemble(self.prompt_states(), self.own_states(rows), self.rows.lengths[rows], layout)
        pads = layout.lengths - self.rows.lengths[rows]
        own = [np.pad(self.rows.own(row), (0, n)) for row, n in zip(rows, pads, strict=True)]
        return self.split.frozen(own_tokens(own, self.rows.prompt, layout, self.device), layout)


def assemble(prompt: torch.Tensor, own: torch.Tensor, lengths: np.ndarray, layout: Layout) -> torch.Tensor:
    """[T, H] of the prompt's states and of the rows' [own tokens, H]; pads, where the layout has them, are 0."""
    if (lengths == layout.lengths).all():
        return torch.cat([prompt.to(own.dtype), own])
    parts = zip(own.split(lengths.tolist()), layout.lengths - lengths, strict=True)
    padded = [torch.nn.functional.pad(part, (0, 0, 0, int(pads))) for part, pads in parts]
    return torch.cat([prompt.to(own.dtype), *padded])


@dataclass(frozen=True)
class Shard:
    rows: np.ndarray
    num_tokens: int


class Cache:
    """States of all rows. `fill` computes what is missing, `load` opens them, `states` serves a batch."""

    def __init__(self, directory: Path, key: dict[str, Any], prefix: Prefix, dtype: torch.dtype) -> None:
        self.prefix, self.rows, self.dtype = prefix, prefix.rows, dtype
        digest = sha256_json(key)
        self.root, self.directory, self.key = directory, directory / digest[:16], key
        self._seed = int(digest[:16], 16)
        self.shards = cut_into_shards(self.rows, SHARD_TOKENS.get(prefix.device.type, 16384))
        self._where = {
            int(row): (i, first, first + int(self.rows.lengths[row]))
            for i, shard in enumerate(self.shards)
            for row, first in zip(shard.rows, np.cumsum([0, *self.rows.lengths[shard.rows][:-1]]), strict=True)
        }
        self._loaded: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.rows, self.prefix.split.hidden_size, self.dtype)

    def fill(self, rank: int = 0, world_size: int = 1) -> int:
        """Compute this rank's share of what is missing, wait for the others'; the number of rows computed."""
        if rank == 0:
            remove_unused(self.root, self.directory)
            write_json(self.directory / "key.json", self.key)
            os.utime(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        mine = range(rank, len(self.shards), world_size)
        missing = [i for i in mine if not self._is_whole(i)]
        said, num_rows = time.monotonic(), 0
        for done, i in enumerate(missing):
            self._write(i, self.prefix.own_states(self.shards[i].rows.tolist()))
            num_rows += len(self.shards[i].rows)
            if rank == 0 and time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                log.info("tail: frozen layers, %d %% of this rank's rows", 100 * (done + 1) // len(missing))
        if dist.is_initialized():
            dist.barrier()
        return num_rows

    def load(self, placement: str) -> None:
        """Open the shards: `gpu` and `host` copy them into memory, `disk` maps the files."""
        for i, shard in enumerate(self.shards):
            count = shard.num_tokens * self.prefix.split.hidden_size
            states = torch.from_file(str(self._path(i)), shared=False, size=count, dtype=self.dtype)
            states = states.view(shard.num_tokens, -1)
            self._loaded.append(states.to(self.prefix.device) if placement == "gpu" else
                                states.clone() if placement == "host" else states)  # fmt: skip

    def states(self, rows: Sequence[int], layout: Layout) -> torch.Tensor:
        """[T, H] states of a batch."""
        parts = []
        for row in rows:
            shard, first, last = self._where[int(row)]
            parts.append(self._loaded[shard][first:last])
        own = torch.cat(parts).to(self.prefix.device, non_blocking=True)
        return assemble(self.prefix.prompt_states(), own, self.rows.lengths[rows], layout)

    def _path(self, i: int) -> Path:
        return self.directory / f"{i:06d}.states"

    def _checksum(self, i: int, content: bytes | memoryview) -> bytes:
        return xxhash.xxh64(content, seed=self._seed ^ i).digest()

    def _is_whole(self, i: int) -> bool:
        """Whether the shard is there in full and is this cache's own. Reads it once."""
        num_bytes = self.shards[i].num_tokens * self.prefix.split.hidden_size * self.dtype.itemsize
        path = self._path(i)
        if not path.is_file() or path.stat().st_size != num_bytes + DIGEST_BYTES:
            return False
        content = memoryview(path.read_bytes())
        return self._checksum(i, content[:num_bytes]) == content[num_bytes:]

    def _write(self, i: int, states: torch.Tensor) -> None:
        assert len(states) == self.shards[i].num_tokens
        content = states.to(self.dtype).contiguous().cpu().view(torch.uint8).numpy().data.cast("B")
        temporary = self._path(i).with_suffix(f".{os.getpid()}.partial")
        with temporary.open("wb") as file:
            file.write(content)
            file.write(self._checksum(i, content))
        temporary.replace(self._path(i))


def num_bytes(rows: Rows, hidden_size: int, dtype: torch.dtype) -> int:
    """Size of the states of all rows' own tokens."""
    return int(rows.lengths.sum()) * hidden_size * dtype.itemsize


def cut_into_shards(rows: Rows, num_tokens: int) -> list[Shard]:
    """Rows that begin alike or are of similar length together, at most `num_tokens` own tokens or a single row."""
    order = rows.families()
    shards, first, total = [], 0, 0
    for place, row in enumerate(order):
        length = int(rows.lengths[row])
        if total and total + length > num_tokens:
            shards.append(Shard(order[first:place], total))
            first, total = place, 0
        total += length
    return [*shards, Shard(order[first:], total)] if len(order) else []


def remove_unused(root: Path, keep: Path) -> None:
    """Delete caches that no run has started with for a week."""
    for directory in root.glob("*/"):
        age = time.time() - directory.stat().st_mtime
        if directory != keep and (directory / "key.json").is_file() and age > KEEP_SECONDS:
            shutil.rmtree(directory, ignore_errors=True)
