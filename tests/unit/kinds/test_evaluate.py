"""Scores against the obvious way of computing them."""

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny_recipe

from tailtune.evaluate import evaluate_models
from tailtune.kinds.chat.evaluate import score_answers, score_texts, unigram_loss
from tailtune.kinds.chat.inference import answer, load_chat_model
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
    chat = load_chat_model(prepared / "base")
    train, validation = rows_of(prepared, 8), rows_of(prepared, 3)
    tokens = [t for row in train for t in encode_row(chat.tokenizer, recipe.prompt, row)[1]]
    target = [t for row in validation for t in encode_row(chat.tokenizer, recipe.prompt, row)[1]]
    size = len(tokens) + len(chat.tokenizer)
    expected = -sum(math.log((tokens.count(t) + 1) / size) for t in target) / len(target)
    assert unigram_loss(chat, recipe.prompt, train, validation) == pytest.approx(expected)


def test_text_scores_know_equal_from_different() -> None:
    assert score_texts(["the same words"], ["the same words"]) == pytest.approx({"rouge_l": 1.0, "chrf": 100.0})
    assert score_texts(["xyz"], ["the same words"])["rouge_l"] == 0
    assert score_texts([""], ["the same words"])["chrf"] == 0


def test_evaluation_of_two_models_and_again(prepared: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe()
    arguments = (recipe, prepared / "data" / "data.parquet", prepared / "base", prepared / "base", tmp_path / "e.json")
    document = evaluate_models(*arguments)
    metrics = document["metrics"]
    assert metrics["base_answer_loss"] == metrics["tuned_answer_loss"]
    assert metrics["answer_loss_vs_base"] == 1
    assert {f"{m}_{n}" for m in ("base", "tuned") for n in (
        "answer_loss", "perplexity", "bits_per_byte", "token_accuracy", "rouge_l", "chrf", "tokens_per_second",
    )} <= set(metrics)  # fmt: skip
    assert document["num_generated"] == 4
    assert json.loads((tmp_path / "e.json").read_text()) == document
    before = (tmp_path / "e.json").stat().st_mtime_ns
    assert evaluate_models(*arguments) == document
    assert (tmp_path / "e.json").stat().st_mtime_ns == before
