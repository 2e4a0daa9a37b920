"""Scores of a model against a plain computation, row by row; base against tuned."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny_recipe

from tailtune.errors import UserError
from tailtune.evaluate import compare_models, evaluate_models
from tailtune.kinds.chat.config import METRICS
from tailtune.kinds.chat.evaluate import score_answers, score_texts, unigram_loss
from tailtune.kinds.chat.inference import answer, load_chat_model, load_tokenizer
from tailtune.kinds.chat.prompt import encode_row
from tailtune.recipe.schema import Recipe


def rows_of(prepared: Path, count: int = 11) -> list[dict[str, str]]:
    return pq.read_table(prepared / "data" / "data.parquet").to_pylist()[:count]


def naive_scores(prepared: Path, recipe: Recipe, rows: list[dict[str, str]]) -> tuple[float, float]:
    """Row by row, without padding."""
    chat = load_chat_model(prepared / "base")
    loss = correct = count = 0.0
    for row in rows:
        question, ids = encode_row(chat.tokenizer, recipe.prompt, row)
        with torch.no_grad():
            logits = chat.model(input_ids=torch.tensor([question + ids])).logits[0, len(question) - 1 : -1]
        target = torch.tensor(ids)
        loss += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
        correct += (logits.argmax(-1) == target).sum().item()
        count += len(ids)
    return loss / count, correct / count


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_batched_scores_equal_row_by_row(prepared: Path, batch_size: int) -> None:
    recipe, rows = tiny_recipe(), rows_of(prepared)
    scores = score_answers(load_chat_model(prepared / "base"), recipe.prompt, rows, batch_size)
    loss, accuracy = naive_scores(prepared, recipe, rows)
    assert scores["answer_loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["token_accuracy"] == pytest.approx(accuracy)
    assert scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_answers_do_not_depend_on_the_batch(prepared: Path) -> None:
    recipe = tiny_recipe()
    chat = load_chat_model(prepared / "base")
    questions = ["What is 1 plus 1?", "And a much longer question about 12 plus 5, please?", "Why?"]
    together = answer(chat, recipe.prompt, questions, recipe.generation, 3)
    alone = [answer(chat, recipe.prompt, [q], recipe.generation, 1).texts[0] for q in questions]
    assert together.texts == alone
    assert 0 < together.num_tokens <= 3 * recipe.generation.max_new_tokens


def test_the_unigram_floor_by_hand(prepared: Path) -> None:
    recipe = tiny_recipe()
    tokenizer = load_tokenizer(prepared / "base")
    train, validation = rows_of(prepared, 8), rows_of(prepared, 3)
    tokens = [t for row in train for t in encode_row(tokenizer, recipe.prompt, row)[1]]
    target = [t for row in validation for t in encode_row(tokenizer, recipe.prompt, row)[1]]
    size = len(tokens) + len(tokenizer)
    expected = -sum(math.log((tokens.count(t) + 1) / size) for t in target) / len(target)
    assert unigram_loss(tokenizer, recipe.prompt, train, validation) == pytest.approx(expected)


def test_text_scores_of_equal_and_different_texts() -> None:
    assert score_texts(["the same words"], ["the same words"]) == pytest.approx({"rouge_l": 1.0, "chrf": 100.0})
    assert score_texts(["xyz"], ["the same words"])["rouge_l"] == 0
    assert score_texts([""], ["the same words"])["chrf"] == 0


def test_evaluation_of_two_models_and_again(prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tailtune")
    recipe = tiny_recipe()
    arguments = (recipe, prepared / "data" / "data.parquet", prepared / "base", prepared / "base", tmp_path / "e.json")
    document = evaluate_models(*arguments)
    metrics = document["metrics"]
    assert set(metrics) == set(METRICS.labels), "exactly what the kind declares"
    assert metrics["base_answer_loss"] == metrics["tuned_answer_loss"]
    assert metrics["answer_loss_vs_base"] == 1
    assert metrics["answer_loss_vs_unigram"] == metrics["tuned_answer_loss"] / metrics["unigram_answer_loss"]
    assert document["num_generated"] == 4
    assert [set(example) for example in document["examples"]] == 4 * [{"question", "reference", "base", "tuned"}]
    loss, floor = metrics["tuned_answer_loss"], metrics["unigram_answer_loss"]
    assert caplog.messages[0] == (
        f"evaluate: answer loss {loss:.4f}, base {loss:.4f}, unigram floor {floor:.4f} "
        f"(nats per token, {document['num_rows']} validation rows)"
    )
    assert json.loads((tmp_path / "e.json").read_text()) == document
    before = (tmp_path / "e.json").stat().st_mtime_ns
    assert evaluate_models(*arguments) == document
    assert (tmp_path / "e.json").stat().st_mtime_ns == before


def test_only_the_tuned_models_floor_is_computed(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floors = []

    def count_call(*arguments: Any) -> float:
        floors.append(unigram_loss(*arguments))
        return floors[-1]

    monkeypatch.setattr("tailtune.kinds.chat.evaluate.unigram_loss", count_call)
    data, base = prepared / "data" / "data.parquet", prepared / "base"
    metrics = compare_models(tiny_recipe(), data, {"base": base, "tuned": base})["metrics"]
    assert floors == [metrics["unigram_answer_loss"]]


def test_a_model_is_evaluated_without_its_base(prepared: Path) -> None:
    document = compare_models(tiny_recipe(), prepared / "data" / "data.parquet", {"tuned": prepared / "base"})
    assert not [name for name in document["metrics"] if "base" in name]
    assert set(document["examples"][0]) == {"question", "reference", "tuned"}


def test_without_generated_answers_their_metrics_are_absent(prepared: Path) -> None:
    recipe = tiny_recipe(**{"evaluation.num_generated_answers": 0})
    document = compare_models(recipe, prepared / "data" / "data.parquet", {"tuned": prepared / "base"})
    measured = {f"tuned_{metric.name}" for metric in METRICS.metrics if not metric.of_generated}
    assert {name for name in document["metrics"] if name.startswith("tuned_")} == measured
    assert (document["num_generated"], document["examples"]) == (0, [])


def test_a_directory_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load_chat_model(tmp_path)
    assert str(raised.value).startswith(f"no model can be loaded from {tmp_path}: ")
    assert raised.value.remedy == "give the directory of a Transformers model with its tokenizer"
    assert "\n" not in str(raised.value)
