"""How answers are written: words, numbered steps and warnings, of texts and of a Parquet file."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from conftest import tiny_recipe, write_rows
from converted import data_of

from tailtune.evaluate import compare_models
from tailtune.kinds.chat.config import METRICS, Prompt
from tailtune.kinds.chat.inference import Answers
from tailtune.kinds.chat.style import measure_data, measure_texts
from tailtune.parquet.write import write_parquet


def style_of(*texts: str) -> dict[str, float]:
    return measure_texts([pa.array(texts, pa.string())])


def test_words_are_counted_between_white_space_and_their_median_is_over_all_batches() -> None:
    assert style_of("one two", " a  b\n\nc\td ", "")["answer_words"] == 2
    batches = [
        pa.array(["a", "a b c"]),
        pa.array(["a b c d e f"]),
        pa.array([], pa.string()),
        pa.array(["a b c d " * 10]),
    ]
    assert measure_texts(batches)["answer_words"] == 4.5
    assert style_of("Don't use a 1.5-litre bottle – cut it.")["answer_words"] == 8


@pytest.mark.parametrize(
    "text",
    [
        "1. Sit up.\n2. Pinch the nose.",
        "Do this:\n\n1) sit up\n2) pinch",
        "1. Sit up. 2. Pinch the nose. 3. Wait.",
        "**1.** Sit up.\n**2.** Pinch.",
        "### Step 1: sit up\n### Step 2: pinch",
        "In step 1 you sit up; in STEP 2 you pinch.",
        "(1) Sit up, (2) pinch the nose.",
    ],
)
def test_numbered_steps_are_found(text: str) -> None:
    assert style_of(text)["answers_with_steps"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "1 inch is equal to 2.54 centimeters.",
        "1.5 to 2.5 litres, or 1.2.",
        "Wait 1. Then use 2.5 litres for 20 minutes.",
        "2. Pinch the nose.\n1. Sit up.",
        "First sit up, then pinch the nose.",
        "- Sit up.\n- Pinch the nose.",
        "See step 10 and step 20.",
        "",
    ],
)
def test_other_numbers_are_no_steps(text: str) -> None:
    assert style_of(text)["answers_with_steps"] == 0


@pytest.mark.parametrize(
    "text",
    [
        "Warning: hot.",
        "Never run.",
        "DO NOT move them.",
        "don’t rub",
        "Avoid ice.",
        "Seek medical attention.",
        "Call 911.",
    ],
)
def test_warnings_are_found(text: str) -> None:
    assert style_of("Cool the burn.", text)["answers_with_warnings"] == 0.5


@pytest.mark.parametrize(
    "text", ["Use a hazardless rope.", "An avoidable knot, nevertheless.", "Call 9112.", "Tie a bowline."]
)
def test_other_words_are_no_warnings(text: str) -> None:
    assert style_of(text)["answers_with_warnings"] == 0


def test_the_data_is_measured_through_the_prompts_template(tmp_path: Path) -> None:
    recipe = tiny_recipe(**{"prompt.assistant": "{answer} Never forget {full-question}"})
    path = write_parquet(write_rows(tmp_path / "rows.jsonl"), tmp_path / "data", recipe.data).path
    measured = measure_data(recipe.prompt, path)
    # "It is 8, as counted." and "Never forget For Topic 1, What is 7 plus 0?"
    assert measured == {"answer_words": 5 + 10, "answers_with_steps": 0, "answers_with_warnings": 1}
    assert list(measured) == [metric.name for metric in METRICS.of_texts]


def test_all_answers_of_conversations_are_measured(tmp_path: Path) -> None:
    """And nothing but the answers: neither questions nor system messages."""
    said = {"system": "Always avoid step 1, then step 2.", "human": "Never mind. 1. Why 2. How?", "gpt": "Never run."}
    rows = [[*said.items()], [*said.items(), ("human", "And now?"), ("gpt", "1. Sit 2. Go now")]]
    lines = [json.dumps({"turns": [{"from": role, "value": text} for role, text in row]}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    prompt = Prompt(system="Avoid step 1, then step 2.", messages="turns")
    data = data_of({"turns": "{turns}"}, split_by="turns")
    measured = measure_data(prompt, write_parquet(tmp_path / "rows.jsonl", tmp_path / "data", data, prompt).path)
    assert measured == {"answer_words": 2, "answers_with_steps": 1 / 3, "answers_with_warnings": 2 / 3}


def test_base_tuned_and_references_are_measured_alike(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base model answers with ten words and a warning, the tuned one with two steps of two words each."""
    texts = iter(["Never do it, " + "word " * 7, "1. Sit 2. Go"])
    monkeypatch.setattr(
        "tailtune.kinds.chat.evaluate.answer", lambda *args, **options: Answers([next(texts)] * len(args[1]), 9, 1.0)
    )
    base = prepared / "base"
    metrics = compare_models(tiny_recipe(), prepared / "data" / "data.parquet", {"base": base, "tuned": base})[
        "metrics"
    ]
    words = [metrics[f"{side}_answer_words"] for side in ("base", "tuned", "reference")]
    assert (
        words == [10, 4, 5] and metrics["answer_words_vs_base"] == 0.4 and metrics["answer_words_vs_reference"] == 0.8
    )
    assert [metrics[f"{side}_answers_with_steps"] for side in ("base", "tuned", "reference")] == [0, 1, 0]
    assert [metrics[f"{side}_answers_with_warnings"] for side in ("base", "tuned", "reference")] == [1, 0, 0]
