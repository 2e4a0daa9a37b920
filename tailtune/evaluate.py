"""Base against tuned on the validation rows: teacher-forced loss and generated answers.

Losses are per answer token, the end mark included, over identical prompts. The floor is a unigram
model of the training answers: whatever does not beat it has learned no more than word frequencies.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tailtune.files import read_json, sha256_file, sha256_json, write_json
from tailtune.kinds.chat.evaluate import evaluate_model
from tailtune.log import log
from tailtune.manifest import RESULTS_VERSION, directory_identity
from tailtune.parquet.split import split_rows
from tailtune.recipe.schema import Recipe

FEW_ROWS = 30
"""Below it, figures may be chance, and the terminal and the report say so."""


def evaluate_models(recipe: Recipe, data: Path, base: Path, tuned: Path, output: Path) -> dict[str, Any]:
    """Evaluate two models on the validation rows of a Parquet file and write `output` (JSON).

    Returns the written document; one with the same key is left untouched.
    """
    key = sha256_json({
        "recipe": recipe.model_dump(mode="json", include={"prompt", "generation", "evaluation", "seed", "data"}),
        "version": RESULTS_VERSION,
        "models": [directory_identity(base), directory_identity(tuned)],
        "data": sha256_file(data),
    })  # fmt: skip
    if (done := read_json(output)) and done.get("key") == key:
        log.info("evaluate: %s is complete", output.name)
        return dict(done)
    table = pq.read_table(data)
    document = {"key": key, **compare_models(recipe, table, {"base": base, "tuned": tuned})}
    write_json(output, document)
    metrics = document["metrics"]
    log.info("evaluate: answer loss %.4f, base %.4f, unigram floor %.4f (nats per token, %d validation rows)",
             metrics["tuned_answer_loss"], metrics["base_answer_loss"], metrics["unigram_answer_loss"],
             document["num_rows"])  # fmt: skip
    if document["num_rows"] < FEW_ROWS:
        log.warning("evaluate: %d validation rows are few: these figures may be chance", document["num_rows"])
    return document


def compare_models(recipe: Recipe, table: pa.Table, models: dict[str, Path]) -> dict[str, Any]:
    """Evaluate `tuned`, and `base` where it is given, on the validation rows of `table`.

    Metrics carry the model's name in front; `unigram_answer_loss` is that of the tuned tokenizer.
    """
    train, validation = split_rows(table, recipe.data.split_by, recipe.data.validation_share, recipe.seed)
    results = {name: evaluate_model(recipe, path, train, validation) for name, path in models.items()}
    metrics = {f"{name}_{metric}": value for name, r in results.items() for metric, value in r["metrics"].items()}
    metrics["unigram_answer_loss"] = results["tuned"]["unigram_answer_loss"]
    metrics["answer_loss_vs_unigram"] = metrics["tuned_answer_loss"] / metrics["unigram_answer_loss"]
    if "base" in models:
        metrics["answer_loss_vs_base"] = metrics["tuned_answer_loss"] / metrics["base_answer_loss"]
    answers = zip(*(r["examples"] for r in results.values()), strict=True)
    return {
        "num_rows": validation.num_rows,
        "num_generated": results["tuned"]["num_generated"],
        "metrics": metrics,
        "examples": [
            {
                "question": row[0]["question"],
                "reference": row[0]["reference"],
                **{name: example["answer"] for name, example in zip(results, row, strict=True)},
            }
            for row in answers
        ],
    }
