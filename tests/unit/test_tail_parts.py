"""The parts of tail training: rows and their prompt, loss, cache, placement, refusals."""

import errno
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_recipe
from tail_runs import ARCHITECTURES, Case, attach_tail, dataset, new_model, new_rows, prepare, train_whole

from tailtune.errors import UserError
from tailtune.identity import training_settings
from tailtune.recipe import TailSettings
from tailtune.tail import attention, cache, check, placement
from tailtune.tail.attention import CannotSplit
from tailtune.tail.cache import Cache, Prefix, cut_into_shards
from tailtune.tail.layout import lay_out
from tailtune.tail.loss import head_loss
from tailtune.tail.module import Tail, graft
from tailtune.tail.rows import Rows, find_shared_prompt
from tailtune.tail.split import Split
from tailtune.train.model import prepare_tail


def saved_tokens(prompt: tuple[int, ...], rows: list[tuple[int, ...]]) -> int:
    return len(prompt) * (sum(len(r) > len(prompt) and r[: len(prompt)] == prompt for r in rows) - 1)


def test_the_shared_prompt_saves_most_tokens() -> None:
    """Against all beginnings of all rows, on rows that branch often."""
    draw = random.Random(3)
    for _ in range(50):
        stems = [tuple(draw.choices(range(3), k=draw.randint(8, 14))) for _ in range(3)]
        rows = [draw.choice(stems)[: draw.randint(1, 14)] + tuple(draw.choices(range(3), k=3)) for _ in range(12)]
        found = tuple(find_shared_prompt([np.array(row) for row in rows]).tolist())
        every = {row[:n] for row in rows for n in range(8, len(row))}
        best = max((saved_tokens(prompt, rows) for prompt in every), default=0)
        assert (saved_tokens(found, rows) if found else 0) == max(best, 0)


def test_nothing_is_shared_by_one_row_or_by_none() -> None:
    assert len(find_shared_prompt([np.arange(50)])) == 0
    assert len(find_shared_prompt([])) == 0
    assert len(find_shared_prompt([np.arange(50), np.arange(50) + 100])) == 0
    assert len(find_shared_prompt([np.arange(5)] * 9)) == 0  # too short for a place of its own


def make_rows(**kwargs: Any) -> Rows:
    data = dataset(new_rows(20, **kwargs))
    return Rows(data["input_ids"][:], data["labels"][:])


def test_positions_are_those_of_the_whole_row() -> None:
    layout = lay_out(3, np.array([3, 0, 3]), np.array([2, 4, 1]), torch.device("cpu"))
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 3]
    assert layout.offsets.tolist() == [3, 5, 9]


# ---- loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_chunked_loss_is_cross_entropy(
    softcap: float | None, bias: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailtune.tail.loss.CHUNK_BYTES", {"cpu": 4 * 50 * 3})  # three positions at once
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=bias, dtype=torch.float64)
    hidden = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    tokens, weights = torch.randint(0, 50, (10,)), torch.rand(10, dtype=torch.float64) if weighted else None

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(3 * loss, [hidden, *head.parameters()]))

    logits = head(hidden)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    each = torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    expected = (each * (1 if weights is None else weights)).sum()
    right = (logits.argmax(-1) == tokens).double() @ (torch.ones(10).double() if weights is None else weights)
    loss, correct = head_loss(hidden, head, tokens, weights, softcap)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert correct.item() == pytest.approx(right.item(), rel=1e-12)
    for one, other in zip(gradients(expected), gradients(loss), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_the_loss_of_an_impossible_token_is_finite_and_right() -> None:
    head = torch.nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [200.0], [-200.0]]))
    loss, _ = head_loss(torch.ones(1, 1), head, torch.tensor([2]))
    assert loss.item() == pytest.approx(400.0)


def test_evaluation_computes_no_gradient_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden = torch.nn.Linear(4, 9), torch.randn(5, 4)
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: pytest.fail("a gradient is made"))
    with torch.no_grad():
        head_loss(hidden, head, torch.arange(5))


def test_the_loss_of_nothing_is_zero() -> None:
    head, hidden = torch.nn.Linear(4, 9), torch.empty(0, 4, requires_grad=True)
    loss, correct = head_loss(hidden, head, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == correct.item() == 0 and head.weight.grad is not None and not head.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_small_gradients(dtype: torch.dtype) -> None:
    """Most of 4,000 words get a gradient of 1/4000, which fp16 loses once it is divided by a step's labels."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, 4000, bias=False), (0.1 * torch.randn(20, 16)).requires_grad_()
    tokens = torch.randint(0, 4000, (20,))
    exact = torch.autograd.grad(torch.nn.functional.cross_entropy(head(hidden), tokens), [hidden, head.weight])
    with torch.autocast("cpu", dtype):
        loss, _ = head_loss(hidden, head, tokens)
        found = torch.autograd.grad(loss / 20, [hidden, head.weight])
    assert found[0].dtype is found[1].dtype is torch.float32
    for one, other in zip(exact, found, strict=True):
        assert (one - other).norm() / one.norm() < 1e-2


# ---- cache -----------------------------------------------------------------------------------------


@pytest.fixture
def make_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cache]:
    monkeypatch.setattr(cache, "SHARD_TOKENS", {"cpu": 30})

    def make(dtype: torch.dtype = torch.float32, **key: Any) -> Cache:
        model = new_model("llama", dtype)
        prepare_tail(model, SimpleNamespace(num_trainable_layers=2, train_head=True))  # type: ignore[arg-type]
        return Cache(tmp_path / "cache", {"model": "a", **key}, Prefix(Split(model), make_rows(shared=0.7)), dtype)

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
    assert again.fill() == len(again.shards[0].rows)
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
        UserError, match=r"states cannot be written to .*; give --prefix-cache-dir a directory with room"
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
    rows = make_rows(shared=0.5)
    shards = cut_into_shards(rows, 25)
    assert sorted(np.concatenate([s.rows for s in shards]).tolist()) == list(range(20))
    assert all(s.num_tokens == rows.lengths[s.rows].sum() for s in shards)
    assert all(s.num_tokens <= 25 or len(s.rows) == 1 for s in shards)


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


# ---- placement -------------------------------------------------------------------------------------

GB = 10**9


@pytest.mark.parametrize(
    ("wanted", "num_bytes", "uses", "expected", "reason"),
    [
        ("auto", 1 * GB, 4.0, "host", "1.00 GB of 8.0 GB free memory"),
        ("auto", 3 * GB, 4.0, "disk", "3.00 GB, mapped from"),  # two ranks share the memory
        ("auto", 1 * GB, 1.1, "none", "a row is used 1.1 times"),
        ("auto", 60 * GB, 4.0, "none", "60.00 GB do not fit into the 50.00 GB free"),
        ("disk", 1 * GB, 1.0, "disk", "as the recipe says"),
        ("disk", 60 * GB, 4.0, "none", "do not fit"),
        ("none", 1 * GB, 4.0, "none", "as the recipe says"),
    ],
)
def test_placement(
    wanted: str,
    num_bytes: int,
    uses: float,
    expected: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 8 * GB)
    monkeypatch.setattr(placement.shutil, "disk_usage", lambda path: SimpleNamespace(free=50 * GB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = placement.place(
        wanted, num_bytes, uses, missing_bytes=num_bytes, directory=tmp_path / "new" / "dir", num_trainable=1,
        ranks_on_node=2, device=torch.device("cpu"),
    )  # fmt: skip
    assert found.kind == expected and reason in found.reason


@pytest.mark.parametrize(("free", "expected"), [(20 * GB, "gpu"), (9 * GB, "host")])
def test_gpu_memory_comes_first_when_the_optimizer_leaves_room(
    free: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 24 * GB))
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 64 * GB)
    found = placement.place("auto", GB, 4.0, directory=tmp_path, num_trainable=419_000_000, ranks_on_node=1,
                            missing_bytes=GB, device=torch.device("cuda"))  # fmt: skip
    assert found.kind == expected


def test_states_that_are_there_need_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    found = placement.place("auto", GB, 1.0, missing_bytes=0, directory=tmp_path, num_trainable=1, ranks_on_node=1,
                            device=torch.device("cpu"))  # fmt: skip
    assert found.kind in ("host", "disk")


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tail\.cache is gpu, but training runs on the CPU; set it to auto"):
        placement.place("gpu", GB, 4.0, missing_bytes=GB, directory=tmp_path, num_trainable=1, ranks_on_node=1,
                        device=torch.device("cpu"))  # fmt: skip


# ---- when not to -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "overrides", "reason"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("gpt_neox", {"hidden_dropout": 0.1}, "hidden_dropout is 0.1"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "of type dynamic"),
        ("smollm3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
         "original_max_position_embeddings": 64, "rope_theta": 10000.0, "factor": 4.0}}, "of type longrope"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_split_is_refused_with_the_reason(
    architecture: str, overrides: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CannotSplit, match=reason):
        check.refuse_model(new_model(architecture, **overrides))
    check.refuse_model(new_model(architecture))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [({"num_kv_shared_layers": 2}, "share keys and values"), ({"layer_types": ["linear_attention"]}, "of type linear"),
     ({"is_encoder_decoder": True}, "encoder"),
     ({"output_router_logits": True, "router_aux_loss_coef": 0.1}, "experts")],
)  # fmt: skip
def test_what_a_configuration_says_is_believed(setting: dict[str, Any], reason: str) -> None:
    model = new_model("llama")
    for name, value in setting.items():
        setattr(model.config, name, value)
    with pytest.raises(CannotSplit, match=reason):
        check.refuse_model(model)


def test_a_refused_model_is_trained_whole_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, plain = prepare(Case("llama"), tmp_path, [])
    model.config.attention_dropout = 0.1
    assert attach_tail(plain, tmp_path, []) is None
    assert "the whole model runs in every step, because attention_dropout is 0.1" in caplog.text
    model.config.attention_dropout = 0.0
    plain.train()  # what was tried left nothing behind
    reference = train_whole(Case("llama")).weights
    assert max((p - reference[n]).abs().max().item() for n, p in model.named_parameters()) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"label_smoothing_factor": 0.1}, "label_smoothing_factor"), ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
     ({"loss_type": "dft"}, "loss_type is dft"), ({"packing": True}, "packing")],
)  # fmt: skip
def test_arguments_that_the_tail_does_not_compute(
    arguments: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, plain = prepare(Case("llama"), tmp_path, [])
    for name, value in arguments.items():
        setattr(plain.args, name, value)
    assert attach_tail(plain, tmp_path, []) is None
    assert reason in caplog.text


def test_a_split_that_fails_is_a_reason_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("rope")

    _, plain = prepare(Case("llama"), tmp_path, [])
    monkeypatch.setattr(plain.model.model.layers[3].self_attn, "forward", fail)
    assert attach_tail(plain, tmp_path, []) is None
    assert "its split fails with KeyError: 'rope'" in caplog.text


def test_nothing_frozen_is_nothing_to_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, plain = prepare(Case("llama", num_layers=4), tmp_path, [])
    assert attach_tail(plain, tmp_path, []) is None
    assert "all of its layers train" in caplog.text


def test_what_trains_elsewhere_is_found() -> None:
    model = new_model("llama")
    prepare_tail(model, SimpleNamespace(num_trainable_layers=1, train_head=True))  # type: ignore[arg-type]
    model.model.norm.requires_grad_(True)
    with pytest.raises(CannotSplit, match=r"model\.norm\.weight trains outside"):
        Split(model)


# Errors that make no sound: each gives losses that look right. The comparison at the start finds them.


def forget_window(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention._attend
    monkeypatch.setattr(
        attention, "_attend", lambda q, k, v, offset, scaling, window: whole(q, k, v, offset, scaling, None)
    )


def one_window_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention._attend
    monkeypatch.setattr(
        attention, "_attend", lambda q, k, v, offset, scaling, window: whole(q, k, v, offset, scaling, 8)
    )


def prompt_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention._attend

    def blind(q: Any, k: Any, v: Any, offset: int, scaling: float, window: int | None) -> torch.Tensor:
        return whole(q, k[:, :, offset:], v[:, :, offset:], 0, scaling, window)

    monkeypatch.setattr(attention, "_attend", blind)


def positions_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    whole = cache.lay_out

    def restart(*args: Any, **kwargs: Any) -> Any:
        layout = whole(*args, **kwargs)
        return replace(layout, positions=torch.arange(len(layout.positions)))

    monkeypatch.setattr(cache, "lay_out", restart)


def rows_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over the packed sequence as if it were one row."""

    def attend(module: Any, q: Any, k: Any, v: Any, *args: Any, scaling: float, **kwargs: Any) -> Any:
        return attention._attend(q, k, v, 0, scaling, None).transpose(1, 2), None

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, attend)


def other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slicing the list of layers: each then takes its neighbour's kind of attention and rotation."""

    def shift(self: Split, *args: Any) -> torch.Tensor:
        config = self.model.config
        types = config.layer_types
        config.layer_types = [*types[1:], types[0]]
        try:
            return trained(self, *args)
        finally:
            config.layer_types = types

    trained = Split.trained
    monkeypatch.setattr(Split, "trained", shift)


@pytest.mark.parametrize(
    "error", [forget_window, one_window_for_all_layers, prompt_out_of_sight, positions_from_zero, other_layers]
)
def test_errors_without_a_sound_are_found_before_training(
    error: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    _, plain = prepare(Case("gemma3_text"), tmp_path, [])
    assert attach_tail(plain, tmp_path, []) is not None
    error(monkeypatch)
    assert attach_tail(plain, tmp_path, []) is None
    assert "differ by" in caplog.text


def test_rows_without_a_prompt_are_compared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, plain = prepare(Case("llama", shared=0.0), tmp_path, [])
    assert attach_tail(plain, tmp_path, []) is not None
    rows_that_see_each_other(monkeypatch)
    assert attach_tail(plain, tmp_path, []) is None
    assert "differ by" in caplog.text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_right_split_is_far_below_the_tolerance(architecture: str) -> None:
    model = new_model(architecture)
    prepare_tail(model, SimpleNamespace(num_trainable_layers=2, train_head=True))  # type: ignore[arg-type]
    prefix = Prefix(Split(model), make_rows(shared=0.7))
    assert check.logit_difference(Tail(prefix, TailSettings())) < 1e-5
    assert model.config._attn_implementation == "sdpa"


def test_a_checkpoint_of_the_tail_is_grafted_onto_the_base() -> None:
    model, base = new_model("gpt_neox"), new_model("gpt_neox")
    prepare_tail(model, SimpleNamespace(num_trainable_layers=2, train_head=True))  # type: ignore[arg-type]
    tail = Tail(Prefix(Split(model), make_rows()), TailSettings())
    with torch.no_grad():
        for parameter in tail.parameters():
            parameter.add_(1)
    graft(base, tail.state_dict())
    ids = torch.randint(0, 96, (1, 9))
    assert torch.equal(base(ids).logits, model(ids).logits)
    with pytest.raises(UserError, match=r"embed_out.nonsense .* does not fit into GPTNeoXForCausalLM"):
        graft(base, {"embed_out.nonsense": torch.ones(1)})


def test_how_the_states_are_kept_may_change_between_attempts() -> None:
    """After running out of memory, say; whether the tail trains alone may not: its checkpoints are others."""
    one, disk, off = (
        training_settings(tiny_recipe(**{f"stages.0.tail.{key}": value}))
        for key, value in (("cache", "auto"), ("cache", "disk"), ("mode", "off"))
    )
    assert one == disk != off


def test_states_without_gradient_cannot_be_kept() -> None:
    with pytest.raises(UserError, match=r"stop_backward is false, so states need their gradient; set cache to 'none'"):
        tiny_recipe(**{"stages.0.tail.stop_backward": False})
