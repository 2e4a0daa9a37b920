"""Base against tuned on the validation rows. The kind scores one model; this compares the two and writes the result."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailtune.files import read_json, sha256_json, write_json
from tailtune.kinds import kind_module, metric_table
from tailtune.log import log
from tailtune.manifest import RESULTS_VERSION, content_sha256, directory_identity
from tailtune.metrics import FEW_ROWS, REFERENCE, MetricTable, ModelScores
from tailtune.parquet.split import read_split
from tailtune.recipe.schema import Recipe
from tailtune.train.arguments import truncation


def evaluate_models(recipe: Recipe, data: Path, base: Path, tuned: Path, output: Path) -> dict[str, Any]:
    """Evaluate two models on the validation rows of a Parquet file and write `output` (JSON).

    Returns the written document; one with the same key is left untouched.
    """
    key = sha256_json({
        "recipe": recipe.model_dump(mode="json", include={"prompt", "generation", "evaluation", "seed", "data"}),
        "version": RESULTS_VERSION,
        "truncation": asdict(truncation(recipe.stages[0])),
        "measured": list(metric_table(recipe.stages[0].kind).labels),
        "models": [directory_identity(base), directory_identity(tuned)],
        "data": content_sha256(data.parent, data.name),
    })  # fmt: skip
    if (old := read_json(output)) and old.get("key") == key:
        log.info("evaluate: %s is complete", output.name)
        return dict(old)
    document = {"key": key, **compare_models(recipe, data, {"base": base, "tuned": tuned})}
    write_json(output, document)
    _log_headline(metric_table(recipe.stages[0].kind), document["metrics"], document["num_rows"])
    return document


def compare_models(recipe: Recipe, data: Path, models: dict[str, Path]) -> dict[str, Any]:
    """Evaluate `tuned`, and `base` where it is given, on the validation rows of a Parquet file.

    The metrics' names are those of the kind's `MetricTable`. Raises UserError when a model cannot be loaded or the
    data cannot be split.
    """
    kind, table = kind_module(recipe.stages[0].kind, "evaluate"), metric_table(recipe.stages[0].kind)
    train, validation = read_split(recipe, data)
    limits = truncation(recipe.stages[0])
    scores: dict[str, ModelScores] = {
        side: kind.evaluate_model(directory, validation, recipe.prompt, recipe.generation, recipe.evaluation, limits)
        for side, directory in models.items()
    }
    metrics = {f"{side}_{name}": value for side, score in scores.items() for name, value in score.metrics.items()}
    if table.floor:  # by the tuned model's tokenizer
        floor = kind.measure_floor(models["tuned"], train, validation, recipe.prompt, limits)
        metrics[table.headline_of(table.floor.name)] = floor
    metrics |= {f"{REFERENCE}_{name}": value for name, value in scores["tuned"].references.items()}
    metrics |= _ratios(table, metrics)
    if num_truncated := scores["tuned"].num_truncated:
        log.info(
            "evaluate: %d validation rows are longer than max_length %d and are cut, as in training",
            num_truncated, limits.max_length,
        )  # fmt: skip
    examples = zip(*(score.examples for score in scores.values()), strict=True)
    return {
        "num_rows": validation.num_rows,
        "num_generated": scores["tuned"].num_generated,
        "num_truncated_rows": num_truncated,
        "metrics": metrics,
        "examples": [
            {name: text for name, text in row[0].items() if name != "answer"}
            | {side: example["answer"] for side, example in zip(scores, row, strict=True)}
            for row in examples
        ],
    }


def _ratios(table: MetricTable, metrics: dict[str, float]) -> dict[str, float]:
    """The table's ratios of which both values were measured; NaN where the divisor is 0."""
    values = (
        (f"{metric.name}_vs_{side}", metrics.get(f"tuned_{metric.name}"), metrics.get(f"{side}_{metric.name}"))
        for metric, side in table.ratios
    )
    return {
        name: tuned / divisor if divisor else math.nan
        for name, tuned, divisor in values
        if tuned is not None and divisor is not None
    }


def _log_headline(table: MetricTable, metrics: dict[str, float], num_rows: int) -> None:
    """Log the headline of both models and its floor; warn where few rows were measured."""
    values = f"{metrics[table.headline_of('tuned')]:.4f}, base {metrics[table.headline_of('base')]:.4f}"
    if table.floor:
        values += f", {table.floor.name} floor {metrics[table.headline_of(table.floor.name)]:.4f}"
    unit = f"{table.headline.unit}, " if table.headline.unit else ""
    log.info("evaluate: %s %s (%s%d validation rows)", table.headline.name.replace("_", " "), values, unit, num_rows)
    if num_rows < FEW_ROWS:
        log.warning("evaluate: only %d validation rows: differences may be due to chance", num_rows)
