"""The states of the frozen layers: what is computed when, and what is never used."""

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
from tailtune.train.tail.cache import Cache, Prefix, cut_into_shards
from tailtune.train.tail.decoder import Split
from tailtune.train.weights import select_trainable


@pytest.fixture
def make_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cache]:
    monkeypatch.setattr(cache, "SHARD_TOKENS", {"cpu": 30})

    def make(dtype: torch.dtype = torch.float32, **key: Any) -> Cache:
        model = new_model("llama", dtype)
        select_trainable(model, LastLayers(last_layers=2))
        return Cache(tmp_path / "cache", {"model": "a", **key}, Prefix(Split(model), tail_rows(shared=0.7)), dtype)

    return make


def count_rows(filled: Cache, monkeypatch: pytest.MonkeyPatch, stop_after: int = 10**9) -> list[int]:
    """The rows whose states are computed from here on; the computer fails after so many shards."""
    computed: list[int] = []
    own_states, calls = filled.prefix.own_states, itertools.count()

    def spy(rows: list[int]) -> torch.Tensor:
        if next(calls) >= stop_after:
            raise KeyboardInterrupt
        computed.extend(rows)
        return own_states(rows)

    monkeypatch.setattr(filled.prefix, "own_states", spy)
    return computed


def test_what_was_filled_is_not_computed_again(
    make_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_cache()
    before = count_rows(first, monkeypatch, stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        first.fill()
    second = make_cache()
    after = count_rows(second, monkeypatch)
    assert second.fill() == len(after)
    assert sorted(before + after) == list(range(20)) and len(before) > 0 < len(after)
    third = make_cache()
    assert third.fill() == 0


def test_each_rank_computes_its_share_and_no_other(
    make_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = []
    for rank in range(3):
        one = make_cache()
        shares.append(count_rows(one, monkeypatch))
        one.fill(rank, 3)
    assert sorted(itertools.chain(*shares)) == list(range(20)) and all(shares)
    whole = make_cache()
    assert whole.fill() == 0
    whole.load("disk")
    layout = whole.prefix.layout([4, 7])
    torch.testing.assert_close(whole.states([4, 7], layout), whole.prefix.states([4, 7], layout))


def test_another_ranks_shard_may_appear_late(make_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may remember for a while that a file was not there. A node's own directory never has it."""
    one = make_cache()
    one.fill()
    shard = one.directory / "000001.states"
    shard.rename(shard.with_suffix(".away"))
    threading.Timer(0.3, shard.with_suffix(".away").rename, [shard]).start()
    one.load("disk")
    shard.unlink()
    monkeypatch.setattr(cache, "SECONDS_TO_APPEAR", 0.0)
    with pytest.raises(UserError, match=r"written by another rank .* set --hidden-state-cache-dir"):
        make_cache().load("disk")


@pytest.mark.parametrize(
    "damage",
    [lambda p: p.write_bytes(p.read_bytes()[:-9]), lambda p: p.write_bytes(b"x" + p.read_bytes()[1:]),
     lambda p: p.unlink(), lambda p: os.truncate(p, 0),
     lambda p: p.write_bytes(p.with_name("000001.states").read_bytes())],
    ids=["cut", "changed", "gone", "empty", "another shard"],
)  # fmt: skip
def test_a_damaged_shard_is_computed_again(damage: Callable[[Path], None], make_cache: Callable[..., Cache]) -> None:
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
    moment: str, make_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
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
        UserError, match=r"states cannot be written to .*; give --hidden-state-cache-dir a directory with room"
    ):
        full.fill()
    assert not list(full.root.glob("*/*.partial"))


def test_a_foreign_cache_is_never_used(make_cache: Callable[..., Cache]) -> None:
    mine = make_cache()
    mine.fill()
    other = make_cache(model="b")
    assert other.directory != mine.directory
    assert json.loads((mine.directory / "key.json").read_text()) == {"model": "a"}
    other.directory.mkdir()
    for path in mine.directory.glob("*.states"):  # put in its place by hand: the checksums tell
        (other.directory / path.name).write_bytes(path.read_bytes())
    assert other.fill() == 20


def test_unused_caches_are_deleted_after_a_week(make_cache: Callable[..., Cache]) -> None:
    old, recent = make_cache(model="old"), make_cache(model="recent")
    old.fill()
    recent.fill()
    os.utime(old.directory, (0, 0))
    make_cache(model="new").fill()
    assert not old.directory.exists() and recent.directory.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_cached_states_are_those_of_the_whole_model(
    kind: str, dtype: torch.dtype, make_cache: Callable[..., Cache]
) -> None:
    filled = make_cache(dtype)
    filled.fill()
    filled.load(kind)
    rows, model = filled.rows, filled.prefix.split.model
    for row in range(len(rows)):
        ids = torch.from_numpy(rows.ids[row])[None]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            whole = model(ids, output_hidden_states=True).hidden_states[2][0]
        states = filled.states([row], filled.prefix.layout([row]))
        tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-5
        own = whole[rows.starts[row] :]
        assert states.dtype is own.dtype is dtype
        torch.testing.assert_close(states[len(rows.prompt) :], own, rtol=tolerance, atol=tolerance)


def test_shards_hold_every_row_once_and_similar_lengths() -> None:
    rows = tail_rows(shared=0.5)
    shards = cut_into_shards(rows, 25)
    assert sorted(np.concatenate(shards).tolist()) == list(range(20))
    assert all(rows.lengths[shard].sum() <= 25 or len(shard) == 1 for shard in shards)


def test_the_key_covers_what_the_states_depend_on(tmp_path: Path) -> None:
    """Another model, tokens, split point or precision is another cache; another learning rate is not."""
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
