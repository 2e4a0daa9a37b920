"""The report: what it shows, what it shows when values are missing, and that hostile text stays text."""

import dataclasses
import html
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tailtune.kinds.chat.config import METRICS, Generation, Prompt
from tailtune.kinds.chat.sections import loading_lines
from tailtune.metrics import Metric, MetricTable
from tailtune.report.page import ReportData, render_report

PROMPT = Prompt(system="Answer.", user="{question}", assistant="{answer}")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

HOSTILE = [
    "<script>document.title='pwned'</script>",
    "</style></title></textarea><script>document.title='pwned'</script>",
    '"><img src=x onerror="document.title=\'pwned\'">',
    "' onmouseover='document.title=1' x='",
    "<svg onload=document.title='pwned'><a href='https://example.org'>x</a>",
    "{{ 7 * 7 }} ]]> --> &lt;script&gt;",
    "\u202eabc\u2066def\x00\x07\x1b[31m\ud800",
    "x" * 10_000,
    "👩‍🚒🔥 שלום עולם مرحبا",
    "one\n\n  two\r\nthree",
]

ANSWERS = [
    (
        "How many cups in a gallon?",
        "A gallon is a unit of volume. There are many cups in a gallon and the cups are used for the water. "
        "The cups are 8 and the gallon is 10, and the gallon is a unit of the volume of the gallon.",
        "There are 16 cups in one US gallon.\n\n1. One gallon is 4 quarts.\n2. One quart is 2 pints, so a "
        "gallon is 8 pints.\n3. One pint is 2 cups, so a gallon is 16 cups.\n\nAn imperial gallon is larger: "
        "about 19 US cups. Check which one your recipe uses before you scale it.",
    ),
    (
        "How do I treat a nosebleed?",
        "You should lie down and tilt your head back, then wait for a while.",
        "Safety first: call for help if it bleeds for more than 20 minutes, or after a blow to the head.\n\n"
        "1. Sit up and lean slightly forward, so that blood does not run down the throat.\n"
        "2. Pinch the soft part of the nose for 10 to 15 minutes without letting go.\n"
        "3. Breathe through the mouth; a cold cloth on the bridge of the nose may help.",
    ),
    (
        "What are the advantages of a mirrorless camera?",
        "A mirrorless camera is a camera without a mirror. It is good.",
        "A mirrorless camera is smaller and lighter than an SLR of the same sensor size, shows the exposure "
        "in the viewfinder before you press the shutter, and can be silent. Carry a second battery: the "
        "viewfinder uses power all the time.",
    ),
    (
        "What is the easiest loop knot to tie?",
        "The easiest loop knot to tie is the knot.",
        "The overhand loop is the easiest. Double the rope, tie an overhand knot with the doubled end, and "
        "pull it tight.\n\nFor a loop that can be untied after a load, learn the bowline.",
    ),
    (
        "I have a whistle, what is the right way to signal for help?",
        "",
        "Three blasts, a pause of one minute, repeat.",
    ),
]


def report_data() -> ReportData:
    """A run on four GPUs."""
    steps = range(5, 321, 5)
    return ReportData(
        run_name="survival-2026-03-14-a",
        recipe={
            "name": "survival",
            "description": "Chat fine-tuning of SmolLM3-3B on practical-skills questions and answers.",
            "seed": 42,
            "model": {"base_model": "HuggingFaceTB/SmolLM3-3B", "revision": "main"},
            "data": {"columns": {"full-question": "For {topic}, {question}", "answer": "{answer}"}},
            "gate": [{"metric": "answer_loss_vs_base", "comparison": "<=", "threshold": 0.95}],
        },
        data={
            "source": "hf://datasets/cahlen/offline-practical-skills-qa-synthetic",
            "revision": "5d1c0f7f0a6be4f3a3d5f6a1c2b3d4e5f6a7b8c9",
            "source_bytes": 1_834_211,
            "source_sha256": "9b" * 32,
            "num_rows": 2845,
            "num_rejected": 3,
            "num_duplicates": 214,
            "parquet_bytes": 512_345,
            "content_sha256": "4f" * 32,
            "rejected_examples": [
                {"line": 17, "reason": "answer is empty"},
                {"line": 904, "reason": "no JSON"},
            ],
            "num_train_rows": 2566,
            "num_validation_rows": 279,
            "num_train_groups": 1554,
            "num_validation_groups": 173,
            "split_by": "full-question",
            "check": {
                "metrics": {"answer_words": 23.0, "answers_with_steps": 0.004, "answers_with_warnings": 0.0875},
                "rules": [
                    rule("answer_words", 23.0, ">=", 60, False, "23 is not >= 60"),
                    rule("answers_with_warnings", 0.0875, ">=", 0.05, True, ""),
                ],
            },
        },
        summary={
            "stage": "sft",
            "base_model": {"name": "HuggingFaceTB/SmolLM3-3B", "kind": "hub", "note": ""},
            "num_parameters": 3_075_098_624,
            "num_trainable_parameters": 418_234_368,
            "trainable_share": 0.136,
            "world_size": 4,
            "num_nodes": 4,
            "num_train_rows": 2566,
            "num_validation_rows": 279,
            "num_truncated_rows": 0,
            "num_train_epochs": 4,
            "num_steps": 320,
            "effective_batch_size": 64,
            "learning_rate": 2e-4,
            "train_seconds": 1475.2,
            "rows_per_second": 6.957,
            "tokens_per_second": 5231.4,
            "best_step": 280,
            "best_eval_loss": 2.468,
            "peak_memory_bytes": 21_474_836_480,
            "resumed_from_steps": [160],
            "tail_training": {"num_frozen_layers": 34, "num_layers": 36, "states": "gpu", "fill_seconds": 2.0},
            "hardware": {
                "profile": "h200",
                "device": "NVIDIA H200",
                "precision": "bf16",
                "attention": "flash_attention_2",
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 2,
            },
            "provenance": {
                "seed": 42,
                "git_commit": "30e8d85a1b2c",
                "python": "3.11.9",
                "packages": {
                    "tailtune": "0.1.0",
                    "torch": "2.9.1",
                    "transformers": "4.57.1",
                    "trl": "0.25.0",
                },
                "gpus": ["NVIDIA H200"] * 4,
                "image": "example/tailtune-trainer@sha256:" + "ab" * 32,
                "base_model_revision": "a07cc9a04f16550a088caea529712d1d335b0ac1",
                "recipe_sha256": "77" * 32,
                "started_at": "2026-03-14T09:12:03+00:00",
                "finished_at": "2026-03-14T09:51:44+00:00",
            },
            "local_overlay": [],
        },
        history={
            "train": [
                {
                    "step": step,
                    "epoch": step / 80,
                    "loss": 2.3 + 1.5 * math.exp(-step / 70) + 0.12 * math.sin(step * 1.7),
                    "learning_rate": 2e-4 * min(step / 10, (320 - step) / 310),
                    "grad_norm": 0.9 + 1.8 * math.exp(-step / 30) + 0.25 * abs(math.sin(step * 0.9)),
                    "tokens_per_second": 5230 + 120 * math.sin(step) - (2100 if step == 165 else 0),
                    "peak_memory_bytes": 21_474_836_480,
                    "gpu_utilisation_percent": 91 + math.sin(step),
                }
                for step in steps
            ],
            "eval": [
                {"step": step, "epoch": step / 80, "eval_loss": loss}
                for step, loss in zip(
                    range(40, 321, 40), [3.02, 2.78, 2.64, 2.56, 2.51, 2.479, 2.468, 2.471], strict=True
                )
            ],
        },
        evaluation={
            "num_rows": 279,
            "num_generated": 64,
            "metrics": {
                "base_answer_loss": 3.764,
                "tuned_answer_loss": 2.468,
                "base_perplexity": 43.1,
                "tuned_perplexity": 11.8,
                "base_bits_per_byte": 1.236,
                "tuned_bits_per_byte": 0.81,
                "base_token_accuracy": 0.3121,
                "tuned_token_accuracy": 0.4713,
                "base_rouge_l": 0.142,
                "tuned_rouge_l": 0.287,
                "base_chrf": 21.4,
                "tuned_chrf": 38.9,
                "base_answer_words": 151.5,
                "tuned_answer_words": 97.0,
                "reference_answer_words": 24.0,
                "base_answers_with_steps": 0.75,
                "tuned_answers_with_steps": 0.5,
                "reference_answers_with_steps": 0.0,
                "base_answers_with_warnings": 0.4,
                "tuned_answers_with_warnings": 0.3,
                "reference_answers_with_warnings": 0.1,
                "base_tokens_per_second": 212.4,
                "tuned_tokens_per_second": 211.0,
                "unigram_answer_loss": 6.17,
                "answer_loss_vs_base": 0.6557,
                "answer_loss_vs_unigram": 0.4,
                "answer_words_vs_base": 0.6403,
                "answer_words_vs_reference": 4.042,
            },
            "examples": [
                {"question": f"For knots, {question}", "reference": tuned[:160], "base": base, "tuned": tuned}
                for question, base, tuned in ANSWERS[:3]
            ],
        },
        verdict={
            "passed": True,
            "rules": [
                rule("answer_loss_vs_base", 0.6557, "<=", 0.95, True, "0.656 is at most 0.95"),
                rule("answer_loss_vs_unigram", 0.4, "<=", 0.75, True, "0.400 is at most 0.75"),
                rule("tuned_token_accuracy", 0.4713, ">=", 0.3, True, "0.471 is at least 0.3"),
            ],
        },
        demo={
            "answers": [{"question": question, "base": base, "tuned": tuned} for question, base, tuned in ANSWERS],
            "generation": {"max_new_tokens": 256, "repetition_penalty": 1.0},
        },
        usage={"folder": "/shared/models/survival-2026-03-14-a", "lines": loading_lines(PROMPT, Generation())},
    )


def render(data: ReportData, table: MetricTable = METRICS) -> str:
    return render_report(data, table)


def rule(metric: str, value: Any, comparison: str, threshold: float, passed: bool, reason: str) -> dict[str, Any]:
    return {
        "metric": metric,
        "value": value,
        "comparison": comparison,
        "threshold": threshold,
        "passed": passed,
        "reason": reason,
    }


def failed_data() -> ReportData:
    """A laptop run whose gate failed: one value just above its threshold, one not measured."""
    good = report_data()
    metrics = good.evaluation["metrics"] | {
        "tuned_answer_loss": 3.5761,
        "answer_loss_vs_base": 0.95007,
        "answer_loss_vs_unigram": 0.5796,
        "tuned_perplexity": 35.7,
        "tuned_token_accuracy": 0.29,
        "tuned_rouge_l": math.nan,
        "tuned_chrf": None,
    }
    summary = good.summary | {
        "base_model": {
            "name": "small",
            "kind": "small",
            "note": "Built here: smollm3, 4 layers, 1.2 M parameters.",
        },
        "local_overlay": ["data.source", "model.base_model", "resources.num_nodes"],
        "peak_memory_bytes": None,
        "hardware": {"profile": "cpu", "device": "cpu", "precision": "float32"},
        "provenance": good.summary["provenance"] | {"gpus": []},
        "num_nodes": 1,
        "resumed_from_steps": [],
    }
    verdict = {
        "passed": False,
        "rules": [
            rule(
                "answer_loss_vs_base",
                0.95007,
                "<=",
                0.95,
                False,
                "the tuned model must be better than the base model",
            ),
            rule("answer_loss_vs_unigram", 0.5796, "<=", 0.75, True, "0.580 is at most 0.75"),
            rule("tuned_rouge_l", None, ">=", 0.2, False, "not measured: no answers were generated"),
        ],
    }
    history = {"train": [p | {"gpu_utilisation_percent": None} for p in good.history["train"]], "eval": []}
    return dataclasses.replace(
        good,
        run_name="survival-laptop",
        summary=summary,
        verdict=verdict,
        history=history,
        evaluation=good.evaluation | {"metrics": metrics},
    )


def empty_data() -> ReportData:
    return ReportData("empty", {}, {}, {}, {}, {}, {}, {}, {})


def hostile_data() -> ReportData:
    """The run of `report_data` with every text, and some keys, replaced by hostile ones in turn."""
    count = 0

    def spoil(value: Any) -> Any:
        nonlocal count
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoil(item) for item in value]
        if isinstance(value, str):
            count += 1
            return HOSTILE[count % len(HOSTILE)]
        return value

    good = report_data()
    data = ReportData(**{field.name: spoil(getattr(good, field.name)) for field in dataclasses.fields(good)})
    data.evaluation["metrics"][HOSTILE[2]] = 1.0
    data.summary["provenance"]["packages"][HOSTILE[0]] = HOSTILE[3]
    data.summary["local_overlay"] = HOSTILE
    data.demo["generation"] = {HOSTILE[2]: HOSTILE[0]}
    data.demo["answers"] += [{"question": text, "base": text, "tuned": text} for text in HOSTILE]
    data.verdict["rules"].append(rule(HOSTILE[2], HOSTILE[0], HOSTILE[4], HOSTILE[0], HOSTILE[1], HOSTILE[3]))  # type: ignore[arg-type]
    return data


class Page(HTMLParser):
    """Elements and texts of a page, as a browser parses them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts)).replace("\u00a0", " ")


@pytest.mark.parametrize(
    "expected",
    [
        "✓ Promoted It may be used: it meets all 3 rules of the gate.",
        "The data teaches something else than the recipe expects: words per answer 23, expected ≥ 60. Answer loss",
        "Answer loss nats per token 3.76 → 2.47 −34 % ▲ better Token accuracy next token right 31.2 → 47.1 % "
        "+15.9 points ▲ better Answer length words 151.5 → 97 −36 % On 279 validation rows",
        "Expected Data Reference Base Tuned",
        "by white space ≥ 60 23 24 151.5 97",
        "counts 1, 2 — 0.400 % 0.00 % 75.0 % 50.0 %",
        "an upper bound ≥ 5.0 % 8.75 % 10.0 % 40.0 % 30.0 %",
        "the same 64 validation questions",
        "Training time 24 min 35 s 320 steps GPU-hours 1.64 ranks: 4, nodes: 4 Peak memory 20.0 GiB of one rank",
        "in the folder /shared/models/survival-2026-03-14-a or wherever best_model was copied to. from transformers",
        "How do I treat a nosebleed?",
        "(empty answer)",
        "0.656 ≤ 0.95",
        "0.656 is at most 0.95",
        "43.1 11.8 −73 % ▲ better",
        "31.2 % 47.1 % +15.9 points ▲ better",
        "212 211 −0.66 %",
        "Answer loss, word-frequency floor 6.17",
        "Rows 2,845 Rejected rows 3 Duplicate rows 214",
        "1.75 MiB",
        "1,554 groups",
        "24 min 35 s",
        "20.0 GiB",
        "3.08 B",
        "resumed from step 160",
        "best 2.47 at step 280",
        "Learning rate 2e-4",
        "NVIDIA H200, NVIDIA H200",
        "base_model: HuggingFaceTB/SmolLM3-3B",
    ],
)
def test_contents(expected: str) -> None:
    assert expected in Page(render(report_data())).text


def test_a_worse_metric_is_marked_and_speed_is_not_judged() -> None:
    data = report_data()
    metrics = {**data.evaluation["metrics"], "tuned_rouge_l": 0.1, "tuned_tokens_per_second": 1.0}
    worse = dataclasses.replace(data, evaluation={**data.evaluation, "metrics": metrics})
    text = Page(render(worse)).text
    assert "0.142 0.100 −30 % ▼ worse" in text
    assert text.count("▼ worse") == 1


def test_answers_keep_their_lines() -> None:
    assert "There are 16 cups in one US gallon.\n\n1. One gallon is 4 quarts.\n2." in render(report_data())


def test_the_first_question_is_answered_first() -> None:
    """Better, and may I use it? Then the data, the curves, the cost, and how to load the model."""
    page = render(report_data())
    text = Page(page).text.partition("Is it better, and may I use it?")[2]
    parts = ["✓ Promoted", "Answer loss", "How many cups in a gallon? Base", "How do I treat a nosebleed? Base",
             "What the data teaches", "Learning rate", "GPU-hours", "from transformers import pipeline",
             "The gate's rules", "All answers, before and after", "Perplexity"]  # fmt: skip
    assert sorted(parts, key=text.index) == parts
    assert page.count("<h1>") == 1


def test_a_failed_gate_comes_first_with_its_reasons() -> None:
    text = Page(render(failed_data())).text
    assert (
        "Is it better, and may I use it? ✕ Rejected It must not be used. 2 of 3 rules not met. "
        "Answer loss, tuned ÷ base: 0.9501, required ≤ 0.95; ROUGE-L, tuned: not measured, required ≥ 0.2."
    ) in text
    assert "Node-hours 0.410 ranks: 4, nodes: 1" in text
    assert "This model was rejected: load it to find out why." in text
    assert "0.9501 ≤ 0.95 ✕ fail" in text, "three digits would show a value that meets its threshold"
    assert "— ≥ 0.2 ✕ fail not measured: no answers were generated" in text
    assert "Laptop run with a small model. Built here: smollm3, 4 layers, 1.2 M parameters." in text
    assert "model.base_model , resources.num_nodes ." in text
    assert "not measured: the device reports none" in text
    assert "nan" not in re.findall(r"\w+", text) and "None" not in text


def test_failed_gate_without_rules_is_not_overlooked() -> None:
    text = Page(render(dataclasses.replace(empty_data(), verdict={"passed": False}))).text
    assert "✕ Rejected It must not be used. not measured" in text


def test_passed_gate_has_no_alarm() -> None:
    page = render(report_data())
    assert "Rejected It" not in Page(page).text and "Laptop" not in page and 'role="alert"' not in page
    assert 'role="alert"' in render(failed_data())


def test_a_small_model_is_not_for_use() -> None:
    good = report_data()
    summary = good.summary | {"base_model": {"kind": "small"}}
    text = Page(render(dataclasses.replace(good, summary=summary))).text
    assert "✓ Promoted A trial: it meets all 3 rules of the gate, but a small model is not for use." in text
    assert "It may be used" not in text


def test_a_model_that_was_not_judged_is_not_promoted() -> None:
    text = Page(render(dataclasses.replace(report_data(), verdict={}))).text
    assert "Not judged The gate has not judged this model. Do not use it yet." in text and "✓ Promoted" not in text


def test_data_as_expected_is_not_remarked() -> None:
    good = report_data()
    rules = [rule("answer_words", 23.0, ">=", 20, True, "")]
    page = render(dataclasses.replace(good, data=good.data | {"check": good.data["check"] | {"rules": rules}}))
    assert "something else" not in page and "≥ 20 23" in Page(page).text and "strong bad" not in page


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, "text", 10**400])
def test_any_value_may_be_missing(missing: Any) -> None:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items()}
        return [without(item) for item in value] if isinstance(value, list) else missing

    good = report_data()
    fields = {field.name: without(getattr(good, field.name)) for field in dataclasses.fields(good)}
    assert "Answer loss nats per token not measured" in Page(render(ReportData(**fields))).text


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ReportData) if field.name != "run_name"])
def test_any_section_may_be_empty(field: str) -> None:
    assert "not measured" in render(empty_data())
    some: dict[str, Any] = {field: {}}
    assert "<h1>" in render(dataclasses.replace(report_data(), **some))


ACCURACY = Metric("accuracy", "Accuracy", "", "higher", "share of images whose class is right", is_share=True)
IMAGES = MetricTable(
    metrics=(
        ACCURACY,
        Metric("margin", "Margin", "logits", "higher", "mean distance of the two highest logits"),
        Metric("images_per_second", "Speed", "images/s", "neither", "images per second"),
    ),
    headline=ACCURACY,
)
"""A kind without floor, highlights, generated text, or a metric that is the trainer's loss."""


def image_data(**metrics: float) -> ReportData:
    good = report_data()
    rules = [rule("accuracy_vs_base", 1.6, ">=", 1.1, True, "")]
    return dataclasses.replace(
        good, evaluation={"num_rows": 500, "metrics": metrics}, verdict={"passed": True, "rules": rules}, demo={}
    )


def test_another_kind_is_reported_by_its_own_table() -> None:
    metrics = {"base_accuracy": 0.5, "tuned_accuracy": 0.8, "base_margin": -0.5, "tuned_margin": 0.25,
               "base_images_per_second": 900.0, "tuned_images_per_second": 910.0, "accuracy_vs_base": 1.6}  # fmt: skip
    page = render(image_data(**metrics), IMAGES)
    text = Page(page).text
    assert "✓ Promoted It may be used: it meets the rule of the gate. Accuracy 50.0 → 80.0 % +30.0 points ▲" in text
    assert "Base 50.0 % Tuned 80.0 % Accuracy on 500 validation rows. Higher is better." in text
    assert "Accuracy, tuned ÷ base accuracy_vs_base 1.60 ≥ 1.1" in text
    assert "Accuracy higher is better 50.0 % 80.0 % +30.0 points ▲ better" in text
    assert "Margin logits, higher is better −0.500 0.250 +150 % ▲ better" in text
    assert "Speed, tuned 910" in text
    for word in ("Answer loss", "word-frequency", "Perplexity", "ROUGE", "Generated tokens", "nats", "base model 0"):
        assert word not in text
    assert ".ladder .unigram" not in page and ".ladder .— i" not in page


def test_a_kind_whose_headline_is_not_positive_has_no_ladder() -> None:
    page = render(image_data(base_accuracy=0.0, tuned_accuracy=0.0), IMAGES)
    assert "Accuracy 0.00 → 0.00 % 0.00 points unchanged" in Page(page).text
    assert 'class="ladder' not in page
    assert "not measured: the evaluation wrote no metrics" in Page(render(image_data(), IMAGES)).text


def test_the_references_are_only_beside_the_models() -> None:
    text = Page(render(report_data())).text
    assert "Answer length, tuned ÷ base 0.640" in text and "Answer length, reference" not in text


def test_same_input_gives_same_bytes() -> None:
    assert render(report_data()) == render(report_data())


def test_long_curves_keep_their_spikes() -> None:
    data = report_data()
    data.history["train"] = [{"step": s, "loss": 9.0 if s == 7777 else 2.0} for s in range(1, 20_001)]
    text = render(data)
    assert len(text) < 100_000
    assert re.search(r"L38\.8\d [\d.]+", text)


@pytest.mark.parametrize(
    ("peak", "labels"),
    [
        (2e-4, ["0", "5e-5", "1e-4", "1.5e-4", "2e-4"]),
        (9.78261e-4, ["0", "2e-4", "4e-4", "6e-4", "8e-4", "1e-3"]),
        (0.0, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        (0.83, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (14_000.0, ["0", "5,000", "10,000", "15,000"]),
    ],
)
def test_axes_have_round_labels(peak: float, labels: list[str]) -> None:
    data = dataclasses.replace(empty_data(), history={"train": [{"step": 1, "learning_rate": peak}]})
    assert re.findall(r'<span class="y"[^>]*>([^<]*)</span>', render(data)) == labels


@pytest.mark.parametrize("data", [report_data(), failed_data(), hostile_data()], ids=["good", "failed", "hostile"])
def test_page_loads_and_runs_nothing(data: ReportData) -> None:
    text = render(data)
    text.encode("utf-8")
    for tag, attributes in Page(text).elements:
        assert tag not in {"script", "img", "link", "iframe", "object", "embed", "a", "base", "form", "input"}
        assert not [name for name in attributes if name.startswith("on") or name in {"src", "href", "xlink:href"}]
    assert "url(" not in text and "@import" not in text


def test_hostile_text_is_shown_as_text() -> None:
    text = render(hostile_data())
    page = Page(text)
    for hostile in HOSTILE[:6]:
        assert hostile in "".join(page.texts)
    assert "⟨U+202E⟩abc⟨U+2066⟩def␀␇␛[31m\ufffd" in text
    assert not re.search(r"[\x00-\x08\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)
    assert "… (2,000 more characters)" in text
    assert "👩‍🚒🔥 שלום עולם مرحبا" in text


def test_template_syntax_in_texts_is_not_executed() -> None:
    assert "{{ 7 * 7 }}" in render(hostile_data())


def chromium(folder: Path, page: str, *options: str) -> str:
    """Load a page in headless Chromium and return the document as it is afterwards."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    options += ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic")
    options += (
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    )
    command = [CHROMIUM, f"--user-data-dir={folder / 'profile'}", *options, "--dump-dom", file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def without_policy(report: str) -> str:
    """The report without its Content-Security-Policy, so that only escaping protects it."""
    bare = re.sub(r"<meta http-equiv=[^>]*>", "", report)
    assert bare != report
    return bare


def test_browser_runs_no_hostile_script(tmp_path: Path) -> None:
    data = dataclasses.replace(hostile_data(), run_name="hostile")
    picture = tmp_path / "page.png"
    document = chromium(tmp_path, without_policy(render(data)), f"--screenshot={picture}")
    assert "<title>hostile · before and after</title>" in document
    assert "script" not in [tag for tag, _ in Page(document).elements]
    assert picture.stat().st_size > 10_000


def test_page_is_as_wide_as_its_window(tmp_path: Path) -> None:
    """Measured in frames, because a headless window is at least 500 px wide."""
    cases = {"good": report_data(), "failed": failed_data(), "hostile": hostile_data(), "empty": empty_data()}
    reports = {name: render(data) for name, data in cases.items()}
    frames = "".join(
        f'<iframe width="{width}" title="{name}-{width}" srcdoc="{html.escape(report)}"></iframe>'
        for name, report in reports.items()
        for width in (360, 800, 1280)
    )
    script = """<script>addEventListener("load", () => {
      document.title = [...document.querySelectorAll("iframe")].map(frame => {
        const page = frame.contentDocument.documentElement;
        return frame.title + ":" + page.scrollWidth + "/" + page.clientWidth;
      }).join(" ");
      for (const frame of [...document.querySelectorAll("iframe")]) frame.remove();
    });</script>"""
    document = chromium(tmp_path, f"<!DOCTYPE html><title></title>{script}{frames}", "--window-size=1400,900")
    measured = re.findall(r"([a-z]+-\d+):(\d+)/(\d+)", document)
    assert len(measured) == len(reports) * 3, document[:500]
    assert [name for name, scroll, client in measured if int(scroll) > int(client)] == []


def test_the_first_screen_holds_the_answer(tmp_path: Path) -> None:
    """On a laptop both questions, on a phone the first one: with all notes that a rejected laptop run has."""
    cases = {"good": report_data(), "failed": failed_data()}
    frames = "".join(
        f'<iframe width="{width}" title="{name}-{width}" srcdoc="{html.escape(render(data))}"></iframe>'
        for name, data in cases.items()
        for width in (390, 1280)
    )
    script = """<script>addEventListener("load", () => {
      document.title = [...document.querySelectorAll("iframe")].map(frame => {
        const pairs = frame.contentDocument.querySelectorAll(".first .pair");
        const tops = [...pairs[0].querySelectorAll(".answer")].map(side => side.getBoundingClientRect().top);
        const bottoms = [...pairs].map(pair => Math.ceil(pair.getBoundingClientRect().bottom));
        return frame.title + ":" + bottoms.join(",") + (tops[0] == tops[1] ? " beside" : " below");
      }).join(" ");
      for (const frame of [...document.querySelectorAll("iframe")]) frame.remove();
    });</script>"""
    document = chromium(tmp_path, f"<!DOCTYPE html><title></title>{script}{frames}", "--window-size=1400,900")
    bottoms = {name: (int(one), int(two)) for name, one, two in re.findall(r"([a-z]+-\d+):(\d+),(\d+)", document)}
    assert len(bottoms) == 4, document[:500]
    assert document.count(" beside") == 4 + script.count(" beside"), document[:500]
    assert bottoms["good-1280"][1] <= 800 and bottoms["failed-1280"][1] <= 800, bottoms
    assert bottoms["good-390"][0] <= 844 and bottoms["failed-390"][0] <= 844, bottoms


def test_rows_that_the_evaluation_cut_are_shown() -> None:
    data, label = report_data(), "Validation rows cut in the evaluation"
    cut = dataclasses.replace(data, evaluation=data.evaluation | {"num_truncated_rows": 17})
    assert label in render(cut) and label not in render(data)
