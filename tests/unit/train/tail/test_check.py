"""When the whole model is trained instead of the tail: refusals, and silent errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tail_runs import ARCHITECTURES, Case, attach_tail, new_model, prepare, tail_rows, train_whole

from tailtune.errors import UserError
from tailtune.recipe.schema import LastLayers
from tailtune.train.tail import attention, cache, check
from tailtune.train.tail.attention import CannotSplit
from tailtune.train.tail.cache import FrozenLayers
from tailtune.train.tail.decoder import SplitDecoder
from tailtune.train.tail.layout import Group
from tailtune.train.tail.module import Tail, graft
from tailtune.train.tail.savings import Savings
from tailtune.train.tail.tokenized_rows import TokenizedRows
from tailtune.train.weights import select_trainable


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


@pytest.mark.parametrize("where", ["model", "trainer"])
def test_the_loss_of_a_mixture_of_experts_is_not_dropped(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL takes the weight of this loss from the model's configuration or from the trainer's arguments."""
    model = {"router_aux_loss_coef": 0.01 if where == "model" else 0.0, "num_experts": 4, "moe_intermediate_size": 16}
    arguments = {"router_aux_loss_coef": 0.01} if where == "trainer" else {}
    case = Case("qwen3_moe", arguments=tuple(arguments.items()), overrides=tuple(model.items()))
    _, plain = prepare(case, tmp_path, [])
    assert attach_tail(plain, tmp_path, []) is None
    assert "mixture of experts adds a loss" in caplog.text


def test_a_mask_that_a_model_builds_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, plain = prepare(Case("llama"), tmp_path, [])
    first = plain.model.model.layers[0]
    whole = first.forward
    monkeypatch.setattr(first, "forward", lambda x, **kwargs: whole(x, **{**kwargs, "attention_mask": torch.zeros(1)}))
    assert attach_tail(plain, tmp_path, []) is None
    assert "because it builds an attention mask of its own" in caplog.text


@pytest.mark.parametrize(
    ("setting", "reason"),
    [({"num_kv_shared_layers": 2}, "share keys and values"), ({"layer_types": ["linear_attention"]}, "of type linear"),
     ({"is_encoder_decoder": True}, "encoder")],
)  # fmt: skip
def test_a_configuration_that_cannot_be_split_is_refused(setting: dict[str, Any], reason: str) -> None:
    model = new_model("llama")
    for name, value in setting.items():
        setattr(model.config, name, value)
    with pytest.raises(CannotSplit, match=reason):
        check.refuse_model(model)


def test_a_refused_model_is_trained_as_a_whole_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, plain = prepare(Case("llama"), tmp_path, [])
    model.config.attention_dropout = 0.1
    assert attach_tail(plain, tmp_path, []) is None
    assert "the whole model runs in every step, because attention_dropout is 0.1" in caplog.text
    model.config.attention_dropout = 0.0
    plain.train()  # the attempt must not have changed the model
    reference = train_whole(Case("llama")).weights
    assert max((p - reference[n]).abs().max().item() for n, p in model.named_parameters()) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"label_smoothing_factor": 0.1}, "label_smoothing_factor"), ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
     ({"loss_type": "dft"}, "loss_type is dft"), ({"packing": True}, "packing"),
     ({"accelerator_config": SimpleNamespace(dispatch_batches=True)}, "dispatch_batches")],
)  # fmt: skip
def test_arguments_that_the_tail_does_not_support(
    arguments: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, plain = prepare(Case("llama"), tmp_path, [])
    for name, value in arguments.items():
        setattr(plain.args, name, value)
    assert attach_tail(plain, tmp_path, []) is None
    assert reason in caplog.text


def test_a_split_that_fails_is_a_reason_to_train_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("rope")

    _, plain = prepare(Case("llama"), tmp_path, [])
    monkeypatch.setattr(plain.model.model.layers[3].self_attn, "forward", fail)
    assert attach_tail(plain, tmp_path, []) is None
    assert "splitting it fails with KeyError: 'rope'" in caplog.text


def test_without_frozen_layers_the_whole_model_is_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, plain = prepare(Case("llama", num_layers=4), tmp_path, [])
    assert attach_tail(plain, tmp_path, []) is None
    assert "all of its layers train" in caplog.text


def test_trainable_parameters_outside_the_tail_are_refused() -> None:
    model = new_model("llama")
    select_trainable(model, LastLayers(last_layers=1))
    model.model.norm.requires_grad_(True)
    with pytest.raises(CannotSplit, match=r"model\.norm\.weight trains outside"):
        SplitDecoder(model)


# Silent errors: the losses look plausible with each of them. The comparison at the start finds them.


def forget_window(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention._attend
    monkeypatch.setattr(
        attention, "_attend", lambda q, k, v, group, scaling, window: whole(q, k, v, group, scaling, None)
    )


def one_window_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention._attend
    monkeypatch.setattr(attention, "_attend", lambda q, k, v, group, scaling, window: whole(q, k, v, group, scaling, 8))


def invisible_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention._attend

    def blind(q: Any, k: Any, v: Any, group: Group, scaling: float, window: int | None) -> torch.Tensor:
        length = group.prefix_length
        without_prefix = replace(group, prefix_length=0, masks={})
        return whole(q, k[:, :, length:], v[:, :, length:], without_prefix, scaling, window)

    monkeypatch.setattr(attention, "_attend", blind)


def positions_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cache.lay_out

    def restart(*args: Any, **kwargs: Any) -> Any:
        layout = whole(*args, **kwargs)
        return replace(layout, positions=torch.arange(len(layout.positions)))

    monkeypatch.setattr(cache, "lay_out", restart)


def rows_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over the packed sequence as if it were one row."""
    one_row: Any = SimpleNamespace(prefix_length=0, columns=None)

    def attend(module: Any, q: Any, k: Any, v: Any, *args: Any, scaling: float, **kwargs: Any) -> Any:
        return attention._attend(q, k, v, one_row, scaling, None).transpose(1, 2), None

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, attend)


def other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the list of layers were sliced: each layer then gets its neighbour's type of attention and rotation."""

    def shift(self: SplitDecoder, *args: Any) -> torch.Tensor:
        config = self.model.config
        types = config.layer_types
        config.layer_types = [*types[1:], types[0]]
        try:
            return run_tail(self, *args)
        finally:
            config.layer_types = types

    run_tail = SplitDecoder.run_tail
    monkeypatch.setattr(SplitDecoder, "run_tail", shift)


@pytest.mark.parametrize(
    "error", [forget_window, one_window_for_all_layers, invisible_prefix, positions_from_zero, other_layers]
)
def test_silent_errors_are_found_before_training(
    error: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    _, plain = prepare(Case("gemma3_text"), tmp_path, [])
    assert attach_tail(plain, tmp_path, []) is not None
    error(monkeypatch)
    assert attach_tail(plain, tmp_path, []) is None
    assert "differ by" in caplog.text


def test_rows_without_the_shared_prefix_are_compared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, plain = prepare(Case("llama", shared=0.0), tmp_path, [])
    assert attach_tail(plain, tmp_path, []) is not None
    rows_that_see_each_other(monkeypatch)
    assert attach_tail(plain, tmp_path, []) is None
    assert "differ by" in caplog.text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_correct_split_is_far_below_the_tolerance(architecture: str) -> None:
    model = new_model(architecture)
    select_trainable(model, LastLayers(last_layers=2))
    tail = Tail(FrozenLayers(SplitDecoder(model), tail_rows(shared=0.7)))
    assert check.logit_difference(tail) < 1e-5
    assert model.config._attn_implementation == "sdpa"


def test_a_checkpoint_of_the_tail_is_grafted_onto_the_base() -> None:
    model, base = new_model("gpt_neox"), new_model("gpt_neox")
    select_trainable(model, LastLayers(last_layers=2))
    tail = Tail(FrozenLayers(SplitDecoder(model), tail_rows()))
    with torch.no_grad():
        for parameter in tail.parameters():
            parameter.add_(1)
    graft(base, tail.state_dict())
    ids = torch.randint(0, 96, (1, 9))
    assert torch.equal(base(ids).logits, model(ids).logits)
    with pytest.raises(UserError, match=r"embed_out.nonsense .* does not fit into GPTNeoXForCausalLM"):
        graft(base, {"embed_out.nonsense": torch.ones(1)})
    with pytest.raises(UserError, match=r"no tensors"):
        graft(base, {})


def test_a_tied_base_gets_a_head_of_its_own_when_grafted(tmp_path: Path) -> None:
    """Otherwise the trained head would silently become the embedding. A saved model keeps both."""
    model, base = new_model("smollm3"), new_model("smollm3")
    select_trainable(model, LastLayers(last_layers=1))
    tail = Tail(FrozenLayers(SplitDecoder(model), tail_rows()))
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    graft(base, tail.state_dict())
    base.save_pretrained(tmp_path)
    ids = torch.randint(0, 96, (1, 9))
    for grafted in (base, type(base).from_pretrained(tmp_path)):
        assert torch.equal(grafted(ids).logits, model(ids).logits)


def test_a_batch_without_labels_gives_every_parameter_a_gradient_of_zero() -> None:
    """Other ranks may have labels, and DDP waits for every parameter."""
    model = new_model("llama")
    select_trainable(model, LastLayers(last_layers=2))
    rows = TokenizedRows([[5, 6], [7]], [[-100, -100], [7]])
    tail = Tail(FrozenLayers(SplitDecoder(model), rows))
    outputs = tail(row_indices=torch.tensor([0, 1]))
    outputs["loss"].backward()
    assert outputs["loss"] == 0 and outputs["num_labels"] == 0
    assert all(p.grad is not None and not p.grad.any() for p in tail.parameters())


def test_cached_hidden_states_need_no_gradient(tmp_path: Path) -> None:
    _, plain = prepare(Case("llama"), tmp_path, [])
    with pytest.raises(ValueError, match=r"stop_backward is false, .* set cache to 'none'"):
        attach_tail(plain, tmp_path, [], savings=Savings(stop_backward=False))
