"""Tail training gives the same losses and weights as TRL's SFTTrainer on the whole model."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tail_runs import ARCHITECTURES, Case, attach_tail, furthest, new_rows, prepare, relative, train, train_whole

from tailtune.kinds.chat.train import FullModelTrainer
from tailtune.train.tail.savings import ALL_SAVINGS, Savings

SETTINGS = [(loss, shared, accumulation, dtype) for loss, shared, accumulation, dtype in itertools.product(
    ("answer", "all"), (1.0, 0.6, 0.0), (1, 4), ("float32", "float64"))]  # fmt: skip
# covers every pair of values of two settings; every architecture is tested
PAIRWISE = {
    ("answer", 1.0, 1, "float32"), ("all", 1.0, 4, "float64"), ("answer", 0.6, 4, "float64"),
    ("all", 0.6, 1, "float32"), ("answer", 0.0, 1, "float64"), ("all", 0.0, 4, "float32"),
}  # fmt: skip


def cases() -> list[object]:
    """The whole matrix; cases outside the selection are marked slow."""
    matrix = []
    for i, architecture in enumerate(ARCHITECTURES):
        chosen = sorted(PAIRWISE, key=str)
        selected = {chosen[i % 6], ("answer", 1.0, 1, "float32")}
        for setting in SETTINGS:
            marks = [] if setting in selected else [pytest.mark.slow]
            matrix.append(pytest.param(architecture, *setting, marks=marks))
    return matrix


@pytest.mark.parametrize(("architecture", "loss", "shared", "accumulation", "dtype"), cases())
def test_losses_and_weights_are_those_of_the_whole_model(
    architecture: str, loss: str, shared: float, accumulation: int, dtype: str, tmp_path: Path
) -> None:
    case = Case(architecture, loss, shared, accumulation, dtype)
    whole, tail = train_whole(case), train(case, tmp_path, tail=True)
    tolerance = 1e-10 if dtype == "float64" else 1e-5
    assert relative(whole.losses, tail.losses) <= tolerance
    if accumulation == 1 and dtype == "float32":  # TRL's accuracy is a mean over micro-batches
        assert tail.accuracies == pytest.approx(whole.accuracies, abs=1e-6)
    assert furthest(without_key_bias(whole.weights), without_key_bias(tail.weights)) <= tolerance
    assert whole.trainer.state.num_input_tokens_seen == tail.trainer.state.num_input_tokens_seen
    assert (len(tail.trainer.model.rows.shared_prefix) > 0) == (shared > 0)


@pytest.mark.parametrize(
    ("architecture", "shared", "accumulation"),
    [("smollm3", 1.0, 1), ("gemma3_text", 0.6, 4), ("gpt_neox", 0.0, 1), ("smollm3-sliding", 0.6, 1)],
)
def test_conversations_with_several_answers_train_as_on_the_whole_model(
    architecture: str, shared: float, accumulation: int, tmp_path: Path
) -> None:
    case = Case(architecture, "turns", shared, accumulation)
    whole, tail = train_whole(case), train(case, tmp_path, tail=True)
    assert relative(whole.losses, tail.losses) <= 1e-5
    assert furthest(without_key_bias(whole.weights), without_key_bias(tail.weights)) <= 1e-5
    labels = tail.trainer.model.rows.labels
    assert max(int((np.diff(row != -100) > 0).sum()) for row in labels) >= 2, "several answers in a row"


def without_key_bias(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out GPT-NeoX's bias of the keys: its gradient is 0, so AdamW only moves it by rounding errors."""
    return {
        name: w.view(4, 3, 8)[:, [0, 2]] if name.endswith("query_key_value.bias") else w for name, w in weights.items()
    }


@pytest.mark.parametrize(
    ("cache", "savings"),
    [
        ("auto", Savings(packing=False)),
        ("auto", Savings(answer_head=False)),
        ("none", ALL_SAVINGS),
        ("auto", Savings(shared_prefix=False)),
        ("disk", ALL_SAVINGS),
        ("none", Savings(stop_backward=False)),
        ("none", Savings(stop_backward=False, packing=False, answer_head=False, shared_prefix=False)),
    ],
)
@pytest.mark.parametrize("loss", ["answer", "all"])
def test_each_saving_can_be_switched_off(cache: str, savings: Savings, loss: str, tmp_path: Path) -> None:
    case = Case("gemma3_text", loss, 0.6)
    whole, tail = train_whole(case), train(case, tmp_path, tail=True, cache=cache, savings=savings)
    assert relative(whole.losses, tail.losses) <= 1e-5
    assert furthest(whole.weights, tail.weights) <= 1e-5
    assert (tmp_path / "cache").exists() == (cache != "none")


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_any_number_of_layers_may_train(num_layers: int, tmp_path: Path) -> None:
    case = Case("llama", num_layers=num_layers)
    whole, tail = train_whole(case), train(case, tmp_path, tail=True)
    assert relative(whole.losses, tail.losses) <= 1e-5
    assert furthest(whole.weights, tail.weights) <= 1e-5


PREFIX = tuple(range(2, 22))
ODD_ROWS = {
    "the shared prefix is longer than some rows": [((2, 3), (4,)), ((2, 3, 4, 5, 6), (7, 8))],
    "a row is the shared prefix and no more": [(PREFIX[:-2], PREFIX[-2:]), (PREFIX[:5], PREFIX[5:])],
    "a row of one token": [((), (30,)), ((31,), ())],
    "an answer of the end token only": [((*PREFIX, 40), (1,)), ((*PREFIX, 41, 42), (1,))],
    "an answer that begins inside the shared prefix": [
        (PREFIX[:12], (*PREFIX[12:], 50, 51)),
        (PREFIX[:3], (*PREFIX[3:], 9)),
    ],
    "equal rows": [((*PREFIX, 40), (41, 1))] * 3,
    "rows above the length limit": [((*PREFIX, *range(30, 60)), (61, 62)), ((*PREFIX, 30), tuple(range(40, 60)))],
}


@pytest.mark.parametrize("loss", ["answer", "all"])
@pytest.mark.parametrize("odd", ODD_ROWS)
def test_odd_rows(odd: str, loss: str, tmp_path: Path) -> None:
    common = [((*PREFIX, *q), tuple(a)) for q, a in new_rows(18, shared=0.0)]
    rows = tuple((tuple(q), tuple(a)) for q, a in [*common[:9], *ODD_ROWS[odd], *common[9:]])
    limit = 32 if "limit" in odd else 200
    case = Case("smollm3-sliding", loss, rows=rows, arguments=(("max_length", limit), ("max_steps", 15)))
    whole, tail = train_whole(case), train(case, tmp_path, tail=True)
    prefix = tuple(tail.trainer.model.rows.shared_prefix.tolist())
    assert prefix == PREFIX[: len(prefix)] and len(prefix) >= 19
    assert max(map(len, tail.trainer.model.rows.ids)) <= limit
    assert relative(whole.losses, tail.losses) <= 1e-5
    assert furthest(whole.weights, tail.weights) <= 1e-5


@pytest.mark.parametrize("architecture", ["smollm3", "gpt_neox", "gemma3_text"])
def test_bf16_with_fp32_master_weights(architecture: str, tmp_path: Path) -> None:
    case = Case(architecture, dtype="bfloat16")
    whole, tail = train_whole(case), train(case, tmp_path, tail=True)
    assert relative(whole.losses, tail.losses) <= 1e-2
    trained = {p.dtype for p in tail.trainer.model.parameters()}
    assert trained == {torch.float32}
    module = tail.trainer.model
    assert module.source.hidden_states([0], module.frozen_layers.layout([0])).dtype is torch.bfloat16


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    """It would cross the frozen layers or silently break them, so tail training switches it off."""
    whole = train_whole(Case("llama"))
    tail = train(Case("llama", arguments=(("gradient_checkpointing", True),)), tmp_path, tail=True)
    assert relative(whole.losses, tail.losses) <= 1e-5
    assert furthest(whole.weights, tail.weights) <= 1e-5


def test_micro_batches_that_do_not_fit_into_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailtune.train.tail.trainer.MAX_STEP_TOKENS", 100)
    case = Case("llama", accumulation=4)
    whole, tail = train_whole(case), train(case, tmp_path, tail=True)
    assert tail.trainer.args.gradient_accumulation_steps == 4
    assert relative(whole.losses, tail.losses) <= 1e-5
    assert furthest(whole.weights, tail.weights) <= 1e-5


def test_a_resumed_training_is_the_same(tmp_path: Path) -> None:
    """A checkpoint holds only the tail, and training resumes from it as if it had not been interrupted."""
    from safetensors.torch import load_file

    for architecture in ("smollm3", "gpt_neox"):
        folder = tmp_path / architecture
        saving = (("save_strategy", "steps"), ("save_steps", 20))
        first = train(Case(architecture, arguments=saving), folder, tail=True)
        checkpoint = folder / "checkpoint-20"
        names = set(load_file(checkpoint / "model.safetensors"))
        assert names == {name for name, p in first.trainer.model.decoder.model.named_parameters() if p.requires_grad}
        resumed = train(Case(architecture, arguments=saving), folder, tail=True, resume=str(checkpoint))
        whole = train_whole(Case(architecture))
        assert relative(whole.losses[20:], resumed.losses) <= 1e-5
        assert furthest(without_key_bias(whole.weights), without_key_bias(resumed.weights)) <= 1e-5


def test_the_best_model_at_the_end_is_an_earlier_one(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    arguments = (("eval_strategy", "steps"), ("eval_steps", 5), ("save_strategy", "steps"), ("save_steps", 5),
                 ("load_best_model_at_end", True), ("learning_rate", 0.03))  # fmt: skip
    result = train(Case("qwen3", arguments=arguments), tmp_path, tail=True)
    state = result.trainer.state
    evaluated = {entry["step"]: entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry}
    assert state.best_global_step < 50 and evaluated[state.best_global_step] == min(evaluated.values())
    best = load_file(tmp_path / f"checkpoint-{state.best_global_step}" / "model.safetensors")
    last = load_file(tmp_path / "checkpoint-50" / "model.safetensors")
    assert furthest(best, {name: result.weights[name] for name in best}) == 0
    assert furthest(best, last) > 1e-3
    again = result.trainer.evaluate()["eval_loss"]
    assert again == pytest.approx(min(evaluated.values()), rel=1e-6)


def test_the_evaluation_loss_is_per_label_with_and_without_the_tail(
    tmp_path: Path, last_lines: Callable[[], list[str]]
) -> None:
    """Both therefore choose the same checkpoint as the best; a mean over batches is a different number."""
    case = Case("smollm3", arguments=(("per_device_eval_batch_size", 2),))
    by_batch = prepare(case, tmp_path, [])[1].evaluate()["eval_loss"]
    _, plain = prepare(case, tmp_path, [], FullModelTrainer)
    whole = plain.evaluate()["eval_loss"]
    tail = attach_tail(plain, tmp_path, []).evaluate()["eval_loss"]
    assert [last_lines()[0], last_lines()[-1]] == ["train: evaluating batch 5/5", "train: evaluating row 9/9"]
    assert tail == pytest.approx(whole, rel=1e-6)
    assert abs(by_batch - whole) > 1e-3


def test_a_batch_of_filler_rows_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks, the last one may get no row of its own, for which label smoothing computes 0 / 0."""
    smoothing = (("label_smoothing_factor", 0.1), ("per_device_eval_batch_size", 3))
    _, plain = prepare(Case("llama", arguments=smoothing), tmp_path, [], FullModelTrainer)
    alone = plain.evaluate()["eval_loss"]  # nine rows in three batches
    monkeypatch.setattr(type(plain.args), "world_size", 2)  # as many rows as for two ranks, here on one
    dataloader = plain.get_eval_dataloader()
    assert len(dataloader) == 4
    monkeypatch.setattr(plain, "get_eval_dataloader", lambda *args: dataloader)
    assert plain.evaluate()["eval_loss"] == pytest.approx(alone, rel=1e-6)
