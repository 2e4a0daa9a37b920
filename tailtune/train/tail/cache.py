"""The states of all rows at the cut, computed once: shards on a volume, read from there or from memory.

A shard holds the own tokens of rows that begin alike or are of similar length. It is written under
another name, ends in a checksum seeded with the cache's key, and gets its name last: what is there in
full is right, what is missing or broken is computed. There is nothing else to keep in step.
"""

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from accelerate.utils import gather_object

from tailtune.errors import UserError
from tailtune.files import sha256_json
from tailtune.log import log
from tailtune.shared_cache import entry_directory, use_entry
from tailtune.train.tail.decoder import Split
from tailtune.train.tail.layout import KeysAndValues, Layout, lay_out, to_tensor
from tailtune.train.tail.tokenized_rows import Rows

SHARD_TOKENS = {"cpu": 2048}
"""Own tokens in a shard, which is also what is computed at once; other devices take 16,384."""
DIGEST_BYTES = 8
SECONDS_BETWEEN_LINES = 10.0
SECONDS_TO_APPEAR = 60.0
"""For a shard of another rank: a network file system may remember for some time that it was not there."""
KEYS_PER_TOKEN = 32
"""Bounds how many rows are computed at once where they are short and the prompt is long."""


class Prefix:
    """Computes the frozen layers; the shared prompt once, its keys and values kept for all rows."""

    def __init__(self, split: Split, rows: Rows, *, stop_backward: bool = True) -> None:
        self.split, self.rows, self.stop_backward = split, rows, stop_backward
        self.device = split.head.weight.device
        self.prompt: torch.Tensor | None = None
        self._memory: dict[torch.nn.Module, KeysAndValues] = {}

    def layout(self, rows: Sequence[int], *, padded: bool = False) -> Layout:
        """Prompt and own tokens of a batch; `padded` gives all whole rows the length of the longest."""
        starts, lengths = self.rows.starts[rows], self.rows.lengths[rows]
        if padded:
            lengths = (starts + lengths).max() - starts
        return lay_out(len(self.rows.prompt), starts, lengths, self.device)

    def prompt_states(self) -> torch.Tensor:
        """[P, H] states of the shared prompt."""
        if self.prompt is None:
            none = np.empty(0, np.int64)
            layout = lay_out(len(self.rows.prompt), none, none, self.device, memory=self._memory)
            empty = torch.empty(0, self.split.hidden_size, device=self.device)
            with torch.no_grad():
                self.prompt = self._run([], layout) if len(self.rows.prompt) else empty
        return self.prompt

    def own_states(self, rows: Sequence[int]) -> torch.Tensor:
        """[own tokens, H] states of the rows' own tokens, one row after the other."""
        self.prompt_states()
        inherited = self.rows.inherited(rows)
        layout = lay_out(len(self.rows.prompt), self.rows.starts[rows], self.rows.lengths[rows], self.device,
                         has_prompt=False, inherited=inherited, memory=self._memory)  # fmt: skip
        new = [self.rows.own(row)[count:] for row, count in zip(rows, inherited, strict=True)]
        with torch.no_grad():
            return self._run(new, layout).index_select(0, to_tensor(np.concatenate(layout.tokens), self.device))

    def states(self, rows: Sequence[int], layout: Layout) -> torch.Tensor:
        """[T, H] states of a batch, computed now."""
        if self.stop_backward:
            return assemble(self.prompt_states(), self.own_states(rows), self.rows.lengths[rows], layout)
        pads = layout.lengths - self.rows.lengths[rows]
        own = [np.pad(self.rows.own(row), (0, n)) for row, n in zip(rows, pads, strict=True)]
        return self._run(own, layout)

    def _run(self, own: Sequence[np.ndarray], layout: Layout) -> torch.Tensor:
        """[T, H] states of a layout with these own tokens."""
        ids = np.concatenate([self.rows.prompt if layout.has_prompt else self.rows.prompt[:0], *own])
        return self.split.frozen(to_tensor(ids, self.device)[None], layout)


def assemble(prompt: torch.Tensor, own: torch.Tensor, lengths: np.ndarray, layout: Layout) -> torch.Tensor:
    """[T, H] of the prompt's states and of the rows' [own tokens, H]; pads, where the layout has them, are 0."""
    if (lengths == layout.lengths).all():
        return torch.cat([prompt.to(own.dtype), own])
    parts = zip(own.split(lengths.tolist()), layout.lengths - lengths, strict=True)
    padded = [torch.nn.functional.pad(part, (0, 0, 0, int(pads))) for part, pads in parts]
    return torch.cat([prompt.to(own.dtype), *padded])


class Cache:
    """States of all rows. `fill` computes what is missing, `load` opens them, `states` serves a batch."""

    def __init__(self, directory: Path, key: dict[str, Any], prefix: Prefix, dtype: torch.dtype) -> None:
        self.prefix, self.rows, self.dtype = prefix, prefix.rows, dtype
        digest = sha256_json(key)
        self.root, self.directory, self.key = directory, entry_directory(directory, key), key
        self._seed = int(digest[:16], 16)
        self.shards = cut_into_shards(self.rows, tokens_at_once(prefix.device))
        self._num_tokens = [int(self.rows.lengths[shard].sum()) for shard in self.shards]
        self._where = {
            int(row): (i, last - int(self.rows.lengths[row]), last)
            for i, shard in enumerate(self.shards)
            for row, last in zip(shard, np.cumsum(self.rows.lengths[shard]).tolist(), strict=True)
        }
        self._loaded: list[torch.Tensor] = []
        self.fill_seconds = 0.0

    def num_bytes(self, *, missing: bool = False) -> int:
        """Size of all shards, or of those that are not there."""
        return sum(self._num_bytes(i) for i in range(len(self.shards)) if not (missing and self._path(i).is_file()))

    def _num_bytes(self, i: int) -> int:
        return self._num_tokens[i] * self.prefix.split.hidden_size * self.dtype.itemsize

    def fill(self, rank: int = 0, world_size: int = 1) -> int:
        """Compute this rank's share of what is missing, wait for the others'; the number of rows computed."""
        with self._writing():
            self.directory.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                use_entry(self.root, self.key)
        missing = [i for i in range(rank, len(self.shards), world_size) if not self._is_whole(i)]
        if dist.is_initialized():  # what an earlier attempt left may be uneven
            missing = sorted(gather_object(missing))[rank::world_size]
        start = said = time.monotonic()
        num_rows = 0
        for done, i in enumerate(missing):
            self._write(i, self.prefix.own_states(self.shards[i].tolist()))
            num_rows += len(self.shards[i])
            if rank == 0 and time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                log.info("tail: frozen layers, %d %% of this rank's rows", 100 * (done + 1) // len(missing))
        self.fill_seconds = time.monotonic() - start
        if dist.is_initialized():
            dist.barrier()
        return num_rows

    def touch(self) -> None:
        """Say that the cache is in use."""
        os.utime(self.directory)

    def load(self, placement: str) -> None:
        """Open the shards: `gpu` and `host` copy them into memory, `disk` maps the files."""
        deadline = time.monotonic() + SECONDS_TO_APPEAR
        for i, num_tokens in enumerate(self._num_tokens):
            while not self._path(i).is_file() and time.monotonic() < deadline:
                time.sleep(1)
            if not self._path(i).is_file():
                raise UserError(f"{self._path(i)} was written by another rank and is not seen by this one; set "
                                "--hidden-state-cache-dir to a directory that all ranks share")  # fmt: skip
            count = num_tokens * self.prefix.split.hidden_size
            states = torch.from_file(str(self._path(i)), shared=False, size=count, dtype=self.dtype)
            states = states.view(num_tokens, -1)
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
        """Of the content; another key or other rows give another one."""
        return xxhash.xxh64(content, seed=self._seed ^ xxhash.xxh64_intdigest(self.shards[i].tobytes())).digest()

    def _is_whole(self, i: int) -> bool:
        """Whether the shard is there in full and is this cache's own. Reads it once."""
        num_bytes = self._num_bytes(i)
        path = self._path(i)
        if not path.is_file() or path.stat().st_size != num_bytes + DIGEST_BYTES:
            return False
        content = memoryview(path.read_bytes())
        return self._checksum(i, content[:num_bytes]) == content[num_bytes:]

    def _write(self, i: int, states: torch.Tensor) -> None:
        assert len(states) == self._num_tokens[i] and states.dtype == self.dtype
        content = states.contiguous().cpu().view(torch.uint8).numpy().data.cast("B")
        temporary = self._path(i).with_suffix(f".{uuid.uuid4().hex}.partial")  # other runs may fill it too
        with self._writing():
            try:
                with temporary.open("wb") as file:
                    file.write(content)
                    file.write(self._checksum(i, content))
                temporary.replace(self._path(i))
            finally:
                temporary.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"the frozen layers' states cannot be written to {self.directory}: {error.strerror}; give "
                "--hidden-state-cache-dir a directory with room, or set the stage's tail.cache to none"
            ) from None


def tokens_at_once(device: torch.device) -> int:
    """Own tokens that a device computes without gradient in one go."""
    return SHARD_TOKENS.get(device.type, 16384)


def cut_into_shards(rows: Rows, num_tokens: int) -> list[np.ndarray]:
    """Rows that begin alike or are of similar length together, at most `num_tokens` own tokens or a single row."""
    order = rows.families
    shards, first, total, longest = [], 0, 0, 0
    for place, length in enumerate(rows.lengths[order].tolist()):
        longest = max(longest, length)
        if total and (total + length > num_tokens or place - first >= most_rows(rows, longest, num_tokens)):
            shards.append(order[first:place])
            first, total, longest = place, 0, length
        total += length
    return [*shards, order[first:]] if len(order) else []


def most_rows(rows: Rows, longest: int, num_tokens: int) -> int:
    """Rows whose keys attention holds at once, on top of the prompt and padded to the longest; may be 0."""
    return KEYS_PER_TOKEN * num_tokens // (len(rows.prompt) + longest)
