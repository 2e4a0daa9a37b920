"""The hidden states of all rows after the frozen layers, computed once and kept in files on a volume.

A shard is a file with the hidden states of several rows' own tokens. It is written under a temporary name, ends in a
checksum that is seeded with the cache's key, and is renamed last. A shard that exists and is whole is therefore
correct; all other shards are computed. Nothing else has to be kept consistent.
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
from tailtune.progress import track
from tailtune.shared_cache import entry_directory, use_entry
from tailtune.train.tail.decoder import SplitDecoder
from tailtune.train.tail.layout import KeysAndValues, Layout, lay_out, to_tensor
from tailtune.train.tail.tokenized_rows import TokenizedRows

SHARD_TOKENS = {"cpu": 2048}
"""Own tokens in a shard, which are computed at once; 16,384 on other devices."""
DIGEST_BYTES = 8
SECONDS_TO_APPEAR = 60.0
"""How long to wait for a shard of another rank: a network file system may remember that it did not exist."""
KEYS_PER_TOKEN = 32
"""Limits the number of rows that are computed at once when rows are short and the shared prefix is long."""


class FrozenLayers:
    """Computes the frozen layers. The shared prefix runs once; its keys and values are kept for all rows."""

    def __init__(self, decoder: SplitDecoder, rows: TokenizedRows, *, stop_backward: bool = True) -> None:
        self.decoder, self.rows, self.stop_backward = decoder, rows, stop_backward
        self.device = decoder.head.weight.device
        self._prefix_hidden: torch.Tensor | None = None
        self._prefix_memory: dict[torch.nn.Module, KeysAndValues] = {}

    def layout(self, row_indices: Sequence[int], *, padded: bool = False) -> Layout:
        """Return the layout of a batch, shared prefix included. `padded` makes all rows as long as the longest."""
        starts, lengths = self.rows.starts[row_indices], self.rows.lengths[row_indices]
        if padded:
            lengths = (starts + lengths).max() - starts
        return lay_out(len(self.rows.shared_prefix), starts, lengths, self.device)

    def prefix_hidden_states(self) -> torch.Tensor:
        """Return the hidden states [P, H] of the shared prefix."""
        if self._prefix_hidden is None:
            prefix_length, no_rows = len(self.rows.shared_prefix), np.empty(0, np.int64)
            layout = lay_out(prefix_length, no_rows, no_rows, self.device, prefix_memory=self._prefix_memory)
            empty = torch.empty(0, self.decoder.hidden_size, device=self.device)
            with torch.no_grad():
                self._prefix_hidden = self._run([], layout) if prefix_length else empty
        return self._prefix_hidden

    def own_hidden_states(self, row_indices: Sequence[int]) -> torch.Tensor:
        """Return the hidden states [own tokens, H] of the rows' own tokens, one row after the other."""
        self.prefix_hidden_states()
        num_inherited = self.rows.count_inherited(row_indices)
        layout = lay_out(
            len(self.rows.shared_prefix),
            self.rows.starts[row_indices],
            self.rows.lengths[row_indices],
            self.device,
            includes_prefix=False,
            num_inherited=num_inherited,
            prefix_memory=self._prefix_memory,
        )
        new_ids = [self.rows.own_ids(row)[count:] for row, count in zip(row_indices, num_inherited, strict=True)]
        with torch.no_grad():
            hidden = self._run(new_ids, layout)
            return hidden.index_select(0, to_tensor(np.concatenate(layout.token_indices), self.device))

    def hidden_states(self, row_indices: Sequence[int], layout: Layout) -> torch.Tensor:
        """Compute the hidden states [T, H] of a batch."""
        lengths = self.rows.lengths[row_indices]
        if self.stop_backward:
            return assemble(self.prefix_hidden_states(), self.own_hidden_states(row_indices), lengths, layout)
        num_pads = layout.lengths - lengths
        own_ids = [np.pad(self.rows.own_ids(row), (0, n)) for row, n in zip(row_indices, num_pads, strict=True)]
        return self._run(own_ids, layout)

    def _run(self, own_ids: Sequence[np.ndarray], layout: Layout) -> torch.Tensor:
        """Return the hidden states [T, H] of a layout whose rows have these own tokens."""
        prefix = self.rows.shared_prefix if layout.includes_prefix else self.rows.shared_prefix[:0]
        ids = np.concatenate([prefix, *own_ids])
        return self.decoder.run_frozen(to_tensor(ids, self.device)[None], layout)


def assemble(prefix: torch.Tensor, own: torch.Tensor, lengths: np.ndarray, layout: Layout) -> torch.Tensor:
    """Join the hidden states of the shared prefix [P, H] and of the rows [own tokens, H] to those of a layout [T, H].

    `lengths` [n] are the rows' numbers of own tokens. Padding in the layout gets hidden states of 0.
    """
    if (lengths == layout.lengths).all():
        return torch.cat([prefix.to(own.dtype), own])
    parts = zip(own.split(lengths.tolist()), layout.lengths - lengths, strict=True)
    padded = [torch.nn.functional.pad(part, (0, 0, 0, int(num_pads))) for part, num_pads in parts]
    return torch.cat([prefix.to(own.dtype), *padded])


class HiddenStateCache:
    """Hidden states of all rows. `fill` computes missing shards, `load` opens them, `hidden_states` returns a batch."""

    def __init__(self, root: Path, key: dict[str, Any], frozen_layers: FrozenLayers, dtype: torch.dtype) -> None:
        self.frozen_layers, self.rows, self.dtype = frozen_layers, frozen_layers.rows, dtype
        digest = sha256_json(key)
        self.root, self.directory, self.key = root, entry_directory(root, key), key
        self._seed = int(digest[:16], 16)
        self.shards = cut_into_shards(self.rows, tokens_at_once(frozen_layers.device))
        """Row indices of each shard."""
        self._num_tokens = [int(self.rows.lengths[shard].sum()) for shard in self.shards]
        self._slices = {
            int(row): (i, end - int(self.rows.lengths[row]), end)
            for i, shard in enumerate(self.shards)
            for row, end in zip(shard, np.cumsum(self.rows.lengths[shard]).tolist(), strict=True)
        }
        """Shard, first token and end of each row."""
        self._loaded: list[torch.Tensor] = []
        self.fill_seconds = 0.0

    def num_bytes(self, *, missing: bool = False) -> int:
        """Return the size of all shards, or of the missing ones."""
        return sum(self._num_bytes(i) for i in range(len(self.shards)) if not (missing and self._path(i).is_file()))

    def _num_bytes(self, i: int) -> int:
        return self._num_tokens[i] * self.frozen_layers.decoder.hidden_size * self.dtype.itemsize

    def fill(self, rank: int = 0, world_size: int = 1) -> int:
        """Compute this rank's share of the missing shards and wait for the other ranks.

        Returns the number of rows that this rank has computed.
        """
        with self._named_write_errors():
            self.directory.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                use_entry(self.root, self.key)
        of_rank = range(rank, len(self.shards), world_size)
        missing = [i for i in track(of_rank, "tail: checking shard", "shards") if not self._is_whole(i)]
        if dist.is_initialized():  # an interrupted attempt may have left uneven shares
            missing = sorted(gather_object(missing))[rank::world_size]
        start = time.monotonic()
        num_rows = 0
        for i in track(missing, "tail: frozen layers, token", "tokens", size=self._num_tokens.__getitem__):
            self._write(i, self.frozen_layers.own_hidden_states(self.shards[i].tolist()))
            num_rows += len(self.shards[i])
        self.fill_seconds = time.monotonic() - start
        if dist.is_initialized():
            dist.barrier()
        return num_rows

    def touch(self) -> None:
        """Mark the cache as used now."""
        os.utime(self.directory)

    def load(self, placement: str) -> None:
        """Open the shards: `gpu` and `host` copy them into memory, `disk` maps the files.

        Raises UserError when a shard of another rank does not appear.
        """
        deadline = time.monotonic() + SECONDS_TO_APPEAR
        for i, num_tokens in enumerate(track(self._num_tokens, "tail: opening shard", "shards")):
            while not self._path(i).is_file() and time.monotonic() < deadline:
                time.sleep(1)
            if not self._path(i).is_file():
                raise UserError(
                    f"{self._path(i)} was written by another rank and is not visible to this one",
                    "set --hidden-state-cache-dir to a directory that all ranks share",
                )
            count = num_tokens * self.frozen_layers.decoder.hidden_size
            hidden = torch.from_file(str(self._path(i)), shared=False, size=count, dtype=self.dtype)
            hidden = hidden.view(num_tokens, -1)
            if placement == "gpu":
                hidden = hidden.to(self.frozen_layers.device)
            elif placement == "host":
                hidden = hidden.clone()
            self._loaded.append(hidden)

    def hidden_states(self, row_indices: Sequence[int], layout: Layout) -> torch.Tensor:
        """Return the hidden states [T, H] of a batch."""
        parts = []
        for row in row_indices:
            shard, first, end = self._slices[int(row)]
            parts.append(self._loaded[shard][first:end])
        own = torch.cat(parts).to(self.frozen_layers.device, non_blocking=True)
        return assemble(self.frozen_layers.prefix_hidden_states(), own, self.rows.lengths[row_indices], layout)

    def _path(self, i: int) -> Path:
        return self.directory / f"{i:06d}.states"

    def _checksum(self, i: int, content: bytes | memoryview) -> bytes:
        """Return the checksum of a shard's content, which also depends on the key and on the shard's rows."""
        return xxhash.xxh64(content, seed=self._seed ^ xxhash.xxh64_intdigest(self.shards[i].tobytes())).digest()

    def _is_whole(self, i: int) -> bool:
        """Read a shard and return whether it is complete and belongs to this cache."""
        num_bytes = self._num_bytes(i)
        path = self._path(i)
        if not path.is_file() or path.stat().st_size != num_bytes + DIGEST_BYTES:
            return False
        content = memoryview(path.read_bytes())
        return self._checksum(i, content[:num_bytes]) == content[num_bytes:]

    def _write(self, i: int, hidden: torch.Tensor) -> None:
        assert len(hidden) == self._num_tokens[i] and hidden.dtype == self.dtype
        content = hidden.contiguous().cpu().view(torch.uint8).numpy().data.cast("B")
        temporary = self._path(i).with_suffix(f".{uuid.uuid4().hex}.partial")  # other runs may fill the cache too
        with self._named_write_errors():
            try:
                with temporary.open("wb") as file:
                    file.write(content)
                    file.write(self._checksum(i, content))
                temporary.replace(self._path(i))
            finally:
                temporary.unlink(missing_ok=True)

    @contextmanager
    def _named_write_errors(self) -> Iterator[None]:
        """Turn an OSError within the block into a UserError that names the directory."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"the hidden states of the frozen layers cannot be written to {self.directory}: {error.strerror}",
                "give --hidden-state-cache-dir a directory with room, or set the stage's tail.cache to none",
            ) from None


def tokens_at_once(device: torch.device) -> int:
    """Return how many own tokens a device computes at once without gradient."""
    return SHARD_TOKENS.get(device.type, 16384)


def cut_into_shards(rows: TokenizedRows, num_tokens: int) -> list[np.ndarray]:
    """Return the row indices of each shard: similar rows together, with at most `num_tokens` own tokens or one row."""
    order = rows.fill_order
    shards, first, total, longest = [], 0, 0, 0
    for i, length in enumerate(rows.lengths[order].tolist()):
        longest = max(longest, length)
        if total and (total + length > num_tokens or i - first >= max_rows(rows, longest, num_tokens)):
            shards.append(order[first:i])
            first, total, longest = i, 0, length
        total += length
    return [*shards, order[first:]] if len(order) else []


def max_rows(rows: TokenizedRows, longest: int, num_tokens: int) -> int:
    """Return how many rows attention computes at once, each with the shared prefix and `longest` keys; may be 0."""
    return KEYS_PER_TOKEN * num_tokens // (len(rows.shared_prefix) + longest)
