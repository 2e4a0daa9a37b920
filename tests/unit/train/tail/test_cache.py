"""The cache of hidden states: what is computed when, and which files are never used."""

import errno
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tail_runs import Case, attach_tail, new_model, new_rows, prepare, tail_rows

from tailtune.errors import UserError
from tailtune.recipe.schema import LastLayers
from tailtune.train.tail import cache
from tailtune.train.tail.cache import FrozenLayers, HiddenStateCache, cut_into_shards
from tailtune.train.tail.decoder import SplitDecoder
from tailtune.train.weights import select_trainable


@pytest.fixture
def make_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HiddenStateCache]:
    monkeypatch.setattr(cache, "SHARD_TOKENS", {"cpu": 30})

    def make(dtype: torch.dtype = torch.float32, **key: Any) -> HiddenStateCache:
        model = new_model("llama", dtype)
        select_trainable(model, LastLayers(last_layers=2))
        frozen_layers = FrozenLayers(SplitDecoder(model), tail_rows(shared=0.7))
        return HiddenStateCache(tmp_path / "cache", {"model": "a", **key}, frozen_layers, dtype)

    return make


def record_computed_rows(
    filled: HiddenStateCache, monkeypatch: pytest.MonkeyPatch, stop_after: int = 10**9
) -> list[int]:
    """Return a list of the rows that are computed from now on; computing fails after `stop_after` shards."""
    computed: list[int] = []
    own_hidden_states, calls = filled.frozen_layers.own_hidden_states, itertools.count()

    def spy(row_indices: list[int]) -> torch.Tensor:
        if next(calls) >= stop_after:
            raise KeyboardInterrupt
        computed.extend(row_indices)
        return own_hidden_states(row_indices)

    monkeypatch.setattr(filled.frozen_layers, "own_hidden_states", spy)
    return computed


def test_existing_shards_are_not_computed_again(
    make_cache: Callable[..., HiddenStateCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_cache()
    before = record_computed_rows(first, monkeypatch, stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        first.fill()
    second = make_cache()
    after = record_computed_rows(second, monkeypatch)
    assert second.fill() == len(after)
    assert sorted(before + after) == list(range(20)) and len(before) > 0 < len(after)
    third = make_cache()
    assert third.fill() == 0


def test_progress_of_filling_and_opening(
    make_cache: Callable[..., HiddenStateCache], last_lines: Callable[[], list[str]]
) -> None:
    filled = make_cache()
    filled.fill()
    filled.load("host")
    tokens, shards = sum(filled.rows.lengths), len(filled.shards)
    assert last_lines() == [
        f"tail: checking shard {shards}/{shards}",
        f"tail: frozen layers, token {tokens}/{tokens}",
        f"tail: opening shard {shards}/{shards}",
    ]


def test_each_rank_computes_only_its_share(
    make_cache: Callable[..., HiddenStateCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = []
    for rank in range(3):
        of_rank = make_cache()
        shares.append(record_computed_rows(of_rank, monkeypatch))
        of_rank.fill(rank, 3)
    assert sorted(itertools.chain(*shares)) == list(range(20)) and all(shares)
    whole = make_cache()
    assert whole.fill() == 0
    whole.load("disk")
    layout = whole.frozen_layers.layout([4, 7])
    computed = whole.frozen_layers.hidden_states([4, 7], layout)
    torch.testing.assert_close(whole.hidden_states([4, 7], layout), computed)


def test_another_ranks_shard_may_appear_late(
    make_cache: Callable[..., HiddenStateCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may remember that a file did not exist. In a node's own directory it never appears."""
    filled = make_cache()
    filled.fill()
    shard = filled.directory / "000001.states"
    shard.rename(shard.with_suffix(".away"))
    threading.Timer(0.3, shard.with_suffix(".away").rename, [shard]).start()
    filled.load("disk")
    shard.unlink()
    monkeypatch.setattr(cache, "SECONDS_TO_APPEAR", 0.0)
    with pytest.raises(
        UserError,
        match="written by another rank and is not visible to this one; set "
        "--hidden-state-cache-dir to a directory that all ranks share",
    ):
        make_cache().load("disk")


@pytest.mark.parametrize(
    "damage",
    [lambda p: p.write_bytes(p.read_bytes()[:-9]), lambda p: p.write_bytes(b"x" + p.read_bytes()[1:]),
     lambda p: p.unlink(), lambda p: os.truncate(p, 0),
     lambda p: p.write_bytes(p.with_name("000001.states").read_bytes())],
    ids=["cut", "changed", "deleted", "empty", "another shard"],
)  # fmt: skip
def test_a_damaged_shard_is_computed_again(
    damage: Callable[[Path], None], make_cache: Callable[..., HiddenStateCache]
) -> None:
    good = make_cache()
    good.fill()
    path = good.directory / "000000.states"
    content = path.read_bytes()
    damage(path)
    again = make_cache()
    assert again.fill() == len(again.shards[0])
    assert path.read_bytes() == content


@pytest.mark.parametrize("moment", ["before the first shard", "at a shard"])
def test_a_volume_that_cannot_be_written_is_named(
    moment: str, make_cache: Callable[..., HiddenStateCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = make_cache()
    if moment == "at a shard":
        replace = Path.replace

        def fail(self: Path, target: Path) -> Path:
            if target.name == "000001.states":
                raise OSError(errno.ENOSPC, "No space left on device")
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", fail)
    else:
        full.root.write_text("a file in the directory's place")
    with pytest.raises(
        UserError,
        match=r"hidden states .* cannot be written to .*; give --hidden-state-cache-dir a directory with room",
    ):
        full.fill()
    assert not list(full.root.glob("*/*.partial"))


def test_a_foreign_cache_is_never_used(make_cache: Callable[..., HiddenStateCache]) -> None:
    mine = make_cache()
    mine.fill()
    other = make_cache(model="b")
    assert other.directory != mine.directory
    assert json.loads((mine.directory / "key.json").read_text()) == {"model": "a"}
    other.directory.mkdir()
    for path in mine.directory.glob("*.states"):  # copied by hand: the checksums do not match
        (other.directory / path.name).write_bytes(path.read_bytes())
    assert other.fill() == 20


def test_unused_caches_are_deleted_after_a_week(make_cache: Callable[..., HiddenStateCache]) -> None:
    old, recent = make_cache(model="old"), make_cache(model="recent")
    old.fill()
    recent.fill()
    os.utime(old.directory, (0, 0))
    make_cache(model="new").fill()
    assert not old.directory.exists() and recent.directory.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", ["host", "disk"])
def test_cached_hidden_states_are_those_of_the_whole_model(
    placement: str, dtype: torch.dtype, make_cache: Callable[..., HiddenStateCache]
) -> None:
    filled = make_cache(dtype)
    filled.fill()
    filled.load(placement)
    rows, model = filled.rows, filled.frozen_layers.decoder.model
    for row in range(len(rows)):
        ids = torch.from_numpy(rows.ids[row])[None]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            whole = model(ids, output_hidden_states=True).hidden_states[2][0]
        hidden = filled.hidden_states([row], filled.frozen_layers.layout([row]))
        tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-5
        own = whole[rows.starts[row] :]
        assert hidden.dtype is own.dtype is dtype
        torch.testing.assert_close(hidden[len(rows.shared_prefix) :], own, rtol=tolerance, atol=tolerance)


def test_shards_hold_every_row_once_within_their_size() -> None:
    rows = tail_rows(shared=0.5)
    shards = cut_into_shards(rows, 25)
    assert sorted(np.concatenate(shards).tolist()) == list(range(20))
    assert all(rows.lengths[shard].sum() <= 25 or len(shard) == 1 for shard in shards)


def test_the_key_covers_what_the_hidden_states_depend_on(tmp_path: Path) -> None:
    """A different model, tokens, number of frozen layers or precision needs another cache; a learning rate does not."""
    directories = []
    for case, base in [
        (Case("llama"), "a"),
        (Case("llama", arguments=(("learning_rate", 1e-5),)), "a"),
        (Case("llama"), "b"),
        (Case("llama", num_layers=1), "a"),
        (Case("llama", dtype="bfloat16"), "a"),
        (Case("llama", rows=tuple((tuple(q), tuple(a)) for q, a in new_rows(40, seed=5))), "a"),
    ]:
        _, plain = prepare(case, tmp_path, [])
        attached = attach_tail(plain, tmp_path, [], case.dtype, base=base)
        directories.append(attached.model.source.directory)
    assert directories[0] == directories[1]
    assert len(set(directories)) == 5
