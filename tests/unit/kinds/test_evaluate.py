"""Scores of a model against a plain computation, row by row; base against tuned."""

import json
import math
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tail_runs
import torch
from conftest import tiny_recipe

from tailtune.config import Truncation
from tailtune.errors import UserError
from tailtune.evaluate import compare_models, evaluate_models
from tailtune.kinds.chat.config import METRICS, Evaluation, Prompt
from tailtune.kinds.chat.evaluate import evaluate_model, score_answers, score_texts, unigram_loss
from tailtune.kinds.chat.inference import (
    ChatModel,
    answer,
    load_chat_model,
    load_tokenizer,
    stream_answer,
)
from tailtune.kinds.chat.prompt import encode_row, question_messages, row_messages
from tailtune.kinds.chat.sections import answers_markdown, write_demo
from tailtune.progress import Progress


def rows_of(prepared: Path, count: int = 11) -> list[dict[str, str]]:
    return pq.read_table(prepared / "data" / "data.parquet").to_pylist()[:count]


def naive_scores(chat: ChatModel, prompt: Prompt, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Row by row, without padding."""
    loss = correct = count = 0.0
    for row in rows:
        encoded = encode_row(chat.tokenizer, prompt, row)
        with torch.no_grad():
            logits = chat.model(input_ids=torch.tensor([encoded.ids])).logits[0, :-1]
        for position, target in enumerate(encoded.labels[1:]):
            if target != -100:
                loss -= logits[position].log_softmax(-1)[target].item()
                correct += logits[position].argmax().item() == target
                count += 1
    return loss / count, correct / count


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_batched_scores_equal_row_by_row(prepared: Path, batch_size: int) -> None:
    chat, prompt, rows = load_chat_model(prepared / "base"), tiny_recipe().prompt, rows_of(prepared)
    scores, _ = score_answers(chat, prompt, rows, batch_size)
    loss, accuracy = naive_scores(chat, prompt, rows)
    assert scores["answer_loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["token_accuracy"] == pytest.approx(accuracy)
    assert scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_answers_do_not_depend_on_the_batch(prepared: Path) -> None:
    recipe = tiny_recipe()
    chat = load_chat_model(prepared / "base")
    questions = ["What is 1 plus 1?", "And a much longer question about 12 plus 5, please?", "Why?"]
    asked = [question_messages(recipe.prompt, question) for question in questions]
    together = answer(chat, asked, recipe.generation, 3)
    alone = [answer(chat, [each], recipe.generation, 1).texts[0] for each in asked]
    assert together.texts == alone
    assert 0 < together.num_tokens <= 3 * recipe.generation.max_new_tokens


CHAT = Prompt(system="Answer in one sentence.", messages="turns")


def conversations(count: int) -> list[dict[str, Any]]:
    """Conversations of one to three turns."""
    return [
        {"turns": [{"role": role, "content": f"{role} {i} turn {turn}: {'why ' * (i % 4 + turn)}"}
                   for turn in range(i % 3 + 1) for role in ("user", "assistant")]}
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_turn_of_a_conversation_is_scored(prepared: Path, batch_size: int) -> None:
    chat, rows = load_chat_model(prepared / "base"), conversations(7)
    scores, _ = score_answers(chat, CHAT, rows, batch_size)
    loss, accuracy = naive_scores(chat, CHAT, rows)
    assert scores["answer_loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["token_accuracy"] == pytest.approx(accuracy)
    answers = [turn["content"] for row in rows for turn in row["turns"] if turn["role"] == "assistant"]
    num_tokens = sum(len(encode_row(chat.tokenizer, CHAT, row).answer_ids) for row in rows)
    bits = loss * num_tokens / math.log(2)
    assert scores["bits_per_byte"] == pytest.approx(bits / sum(len(text.encode()) for text in answers), rel=1e-5)


def test_few_logits_are_in_memory_at_once_even_of_a_long_conversation(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, shapes = load_chat_model(prepared / "base"), []
    head, run_lengths = chat.model.get_output_embeddings(), []
    monkeypatch.setattr("tailtune.kinds.chat.evaluate.LOGIT_BYTES", 7 * 4 * head.out_features)
    row = {"turns": [turn for each in conversations(7) for turn in each["turns"]]}
    head.register_forward_hook(lambda module, arguments, output: shapes.append(output.shape))
    chat.model.base_model.register_forward_pre_hook(
        lambda module, arguments, settings: run_lengths.append(settings["input_ids"].shape[1]), with_kwargs=True
    )
    scores, _ = score_answers(chat, CHAT, [row], 8)
    encoded = encode_row(chat.tokenizer, CHAT, row)
    assert max(shape.numel() for shape in shapes) <= 7 * head.out_features
    assert sum(shape[-2] for shape in shapes) == len(encoded.answer_ids), "the head runs where there is a label"
    assert run_lengths == [len(encoded.ids)] + [1] * (len(shapes) - 1), "the layers run once"
    assert len(shapes) > 20
    loss, accuracy = naive_scores(chat, CHAT, [row])
    assert scores["answer_loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["token_accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("gemma3_text", {}), ("granite", {"logits_scaling": 3.0}), ("cohere", {"logit_scale": 0.3}),
     ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": 4})],
)  # fmt: skip
def test_scores_are_of_the_logits_that_the_model_itself_computes(
    architecture: str, settings: dict[str, Any], prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models bound or scale what the head returns."""
    tokenizer, rows = load_chat_model(prepared / "base").tokenizer, conversations(3)
    chat = ChatModel(tail_runs.new_model(architecture, vocab_size=len(tokenizer), **settings).eval(), tokenizer)
    monkeypatch.setattr("tailtune.kinds.chat.evaluate.LOGIT_BYTES", 9 * 4 * len(tokenizer))
    scores, _ = score_answers(chat, CHAT, rows, 2)
    loss, accuracy = naive_scores(chat, CHAT, rows)
    assert scores["answer_loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["token_accuracy"] == pytest.approx(accuracy)


def test_a_batch_has_a_bounded_number_of_tokens(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, rows, shapes = load_chat_model(prepared / "base"), conversations(7), []
    chat.model.register_forward_pre_hook(
        lambda module, arguments, settings: shapes.append(settings["input_ids"].shape), with_kwargs=True
    )
    monkeypatch.setattr("tailtune.kinds.chat.evaluate.MAX_BATCH_TOKENS", 160)
    scores, _ = score_answers(chat, CHAT, rows, 4)
    lengths = sorted(len(encode_row(chat.tokenizer, CHAT, row).ids) for row in rows)
    assert sum(shape[0] for shape in shapes) == 7 and max(shape[1] for shape in shapes) == lengths[-1] > 160
    assert all(shape.numel() <= 160 or shape[0] == 1 for shape in shapes) and any(shape[0] > 1 for shape in shapes)
    assert scores["answer_loss"] == pytest.approx(naive_scores(chat, CHAT, rows)[0], rel=1e-5)


def test_the_last_answer_of_a_conversation_is_generated_from_all_before_it(prepared: Path) -> None:
    rows = conversations(3)
    scores = evaluate_model(prepared / "base", pa.Table.from_pylist(rows), CHAT, tiny_recipe().generation,
                            Evaluation(num_generated_answers=3))  # fmt: skip
    chat = load_chat_model(prepared / "base")
    asked = [row_messages(CHAT, row)[:-1] for row in rows]
    assert [e["answer"] for e in scores.examples] == answer(chat, asked, tiny_recipe().generation, 8).texts
    assert [e["reference"] for e in scores.examples] == [row["turns"][-1]["content"] for row in rows]
    assert scores.examples[0]["question"] == rows[0]["turns"][0]["content"]
    first, second, third = (turn["content"] for turn in rows[1]["turns"][:3])
    assert scores.examples[1]["question"] == f"user: {first}\n\nassistant: {second}\n\nuser: {third}"


def test_an_empty_answer_is_said(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat, recipe = load_chat_model(prepared / "base"), tiny_recipe()
    end = torch.tensor([[chat.tokenizer.eos_token_id]])
    monkeypatch.setattr(chat.model, "generate", lambda input_ids, **_: torch.cat([input_ids, end], dim=1))
    stream_answer(chat, recipe.prompt, "How?", recipe.generation)
    assert capsys.readouterr().out == "(empty answer)\n"


def test_the_unigram_floor_by_hand(prepared: Path) -> None:
    recipe = tiny_recipe()
    tokenizer = load_tokenizer(prepared / "base")
    train, validation = rows_of(prepared, 8), rows_of(prepared, 3)
    tokens = [t for row in train for t in encode_row(tokenizer, recipe.prompt, row).answer_ids]
    target = [t for row in validation for t in encode_row(tokenizer, recipe.prompt, row).answer_ids]
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
    text = (
        tmp_path / "e.json"
    ).read_text()  # compared as text: the tiny model writes no word, and no ratio is NaN == NaN
    assert json.dumps(json.loads(text)) == json.dumps(document)
    before = (tmp_path / "e.json").stat().st_mtime_ns
    assert json.dumps(evaluate_models(*arguments)) == json.dumps(document)
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
    assert not [name for name in document["metrics"] if name.startswith(("reference_", "answer_words_"))]
    assert (document["num_generated"], document["examples"]) == (0, [])


def test_a_long_row_is_cut_as_in_training(prepared: Path) -> None:
    chat, prompt = load_chat_model(prepared / "base"), tiny_recipe().prompt
    row = rows_of(prepared)[0]
    long = row | {"answer": row["answer"] + " word" * 60_000}
    cut = Truncation(256)
    scores, num_truncated = score_answers(chat, prompt, [row, long], 8, cut)
    assert num_truncated == 1
    kept = encode_row(chat.tokenizer, prompt, long).cut(cut)
    shorter = row | {"answer": chat.tokenizer.decode(kept.answer_ids)}
    again, none = score_answers(chat, prompt, [row, shorter], 8)
    assert none == 0 and scores["bits_per_byte"] == pytest.approx(again["bits_per_byte"], rel=0.02)
    assert math.isfinite(unigram_loss(chat.tokenizer, prompt, [row, long], [long], cut))


def test_the_evaluation_cuts_rows_and_says_so(prepared: Path, tmp_path: Path) -> None:
    """Attention over a whole row would ask for gigabytes."""
    recipe = tiny_recipe(**{"evaluation.num_generated_answers": 64, "stages.0.trainer.max_length": 128})
    table = pq.read_table(prepared / "data" / "data.parquet")
    rows = table.to_pylist()
    for each in rows:
        each["answer"] += " word" * 12_000
    pq.write_table(pa.Table.from_pylist(rows[:12], table.schema), tmp_path / "data.parquet")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    document = compare_models(recipe, tmp_path / "data.parquet", {"tuned": prepared / "base"})
    assert document["num_truncated_rows"] == document["num_rows"] > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10, "in KiB"


def test_another_max_length_is_another_evaluation(prepared: Path, tmp_path: Path) -> None:
    keys = set()
    for trainer in ({}, {"max_length": 64}, {"truncation_mode": "keep_end"}):
        recipe = tiny_recipe(**{"evaluation.num_generated_answers": 0},
                             **{f"stages.0.trainer.{name}": value for name, value in trainer.items()})  # fmt: skip
        base = prepared / "base"
        keys.add(evaluate_models(recipe, prepared / "data" / "data.parquet", base, base, tmp_path / "e.json")["key"])
    assert len(keys) == 3


def test_a_question_that_is_too_long_is_refused(prepared: Path) -> None:
    chat, recipe = load_chat_model(prepared / "base"), tiny_recipe()
    for question, limit in (("word " * 5000, None), ("word " * 200, 64)):
        with pytest.raises(UserError, match=r"the question with its system prompt has [\d,]+ tokens"):
            stream_answer(chat, recipe.prompt, question, recipe.generation, limit)


@pytest.mark.parametrize("question", [os.fsdecode(b"caf\xe9"), "one\ud800two", "\udfff"], ids=ascii)
def test_a_question_that_is_no_text_is_refused(prepared: Path, question: str) -> None:
    chat, recipe = load_chat_model(prepared / "base"), tiny_recipe()
    with pytest.raises(UserError, match=r"a text contains \\ud[89a-f].., which is no character; give"):
        stream_answer(chat, recipe.prompt, question, recipe.generation)


@pytest.mark.parametrize(
    "text", ["# forged", "a\n## Question 9", "a\r# b", "a\u2028# b", "\033[31mred", "\x9bA", "- x", ""], ids=ascii
)
def test_no_text_is_read_as_markdown(text: str) -> None:
    lines = answers_markdown([{"question": text, "base": text, "tuned": text}]).split("\n")
    own = [line for line in lines if line and not line.startswith("    ")]
    assert own == ["# Demo answers", "## Question 1", "Base:", "Tuned:"]
    assert all(line.isprintable() for line in lines)


def test_a_directory_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load_chat_model(tmp_path)
    assert str(raised.value).startswith(f"no model can be loaded from {tmp_path}: ")
    assert raised.value.remedy == "give the directory of a Transformers model with its tokenizer"
    assert "\n" not in str(raised.value)


def test_progress_of_an_evaluation(prepared: Path, last_lines: Callable[[], list[str]]) -> None:
    data = prepared / "data" / "data.parquet"
    compare_models(tiny_recipe(), data, {"tuned": prepared / "base"})
    loading, tokenizing, scoring, answering, floor = last_lines()
    assert re.fullmatch(r"model: loading base, tensor (\d+)/\1", loading)
    assert re.fullmatch(r"evaluate: tokenizing row (\d+)/\1", tokenizing)
    tokens = re.fullmatch(r"evaluate: base, token (\d+)/\1", scoring)
    assert tokens and int(tokens[1]) > 100, "tokens, not batches: they differ in length"
    assert answering == "evaluate: base, answer 4/4"
    assert re.fullmatch(r"evaluate: unigram floor, row (\d+)/\1", floor)


def test_answers_are_counted_while_they_grow(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, recipe, amounts = load_chat_model(prepared / "base"), tiny_recipe(), []
    monkeypatch.setattr(Progress, "update", lambda self, amount: amounts.append(amount))
    chat.model.generation_config.eos_token_id = None  # no answer ends early
    answer(
        chat, [question_messages(recipe.prompt, each) for each in ("How?", "Why so?", "What?")], recipe.generation, 2
    )
    num_tokens = recipe.generation.max_new_tokens
    assert amounts == [2 / num_tokens] * num_tokens + [1 / num_tokens] * num_tokens


def test_answers_that_end_early_are_done(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, last_lines: Callable[[], list[str]]
) -> None:
    chat, recipe = load_chat_model(prepared / "base"), tiny_recipe()
    end = chat.tokenizer.eos_token_id
    monkeypatch.setattr(
        chat.model, "generate", lambda input_ids, **_: torch.nn.functional.pad(input_ids, (0, 1), value=end)
    )
    answer(
        chat, [question_messages(recipe.prompt, each) for each in ("How?", "Why so?", "What?")], recipe.generation, 2
    )
    assert last_lines()[-1] == "evaluate: base, answer 3/3"


def test_progress_of_demo_answers(prepared: Path, tmp_path: Path, last_lines: Callable[[], list[str]]) -> None:
    recipe, base = tiny_recipe(), prepared / "base"
    write_demo(base, base, tmp_path / "demo", recipe.prompt, recipe.generation, recipe.demo)
    count = len(recipe.demo.questions)
    assert [line for line in last_lines() if "tensor" not in line] == [f"report: base, answer {count}/{count}"] * 2
