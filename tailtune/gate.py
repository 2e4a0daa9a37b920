"""The promotion gate: the recipe's rules against the evaluation's metrics. What cannot be judged fails.

The same rules, under `expect`, compare the data with what the prompt asks for, before anything is trained.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tailtune.errors import UserError, printable
from tailtune.files import parse_json, read_json, write_json
from tailtune.kinds import kind_module, metric_table
from tailtune.log import log
from tailtune.recipe.schema import GateRule, Recipe
from tailtune.recipe.values import cut, shown

COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def judge(rules: Sequence[GateRule], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict: `passed`, and for each rule its value and, where it failed, the reason.

    A metric that is missing, NaN, infinite or not a number fails its rule. An empty list of rules fails as well,
    because nothing was checked.
    """
    results = [_judge_rule(rule, metrics) for rule in rules]
    return {"passed": bool(results) and all(result["passed"] for result in results), "rules": results}


def _judge_rule(rule: GateRule, metrics: Mapping[str, Any]) -> dict[str, Any]:
    value: Any = metrics.get(rule.metric)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if rule.metric not in metrics:
        reason = printable(f"the metric is missing; measured: {cut(', '.join(sorted(metrics)), 500) or 'none'}")
    elif not is_number:
        reason = f"the metric is {type(value).__name__} {shown(value)}, not a number"
    elif not _is_finite(value):
        reason = f"the metric is {shown(value)}"
    elif not COMPARISONS[rule.comparison](value, rule.threshold):
        reason = f"{value:.4g} is not {rule.comparison} {rule.threshold:g}"
    else:
        reason = ""
    return {
        "metric": rule.metric,
        "value": value if is_number and _is_finite(value) else None if value is None else shown(value),
        "comparison": rule.comparison,
        "threshold": rule.threshold,
        "passed": not reason,
        "reason": reason,
    }


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # integers in JSON have no limit
        return False


def read_metrics(evaluation: Path) -> dict[str, Any]:
    """Return the metrics of an `evaluation.json`. Raises UserError with the reason where there are none."""
    remedy = "give the evaluation.json of a run"
    if not evaluation.is_file():
        raise UserError(f"{evaluation} is not a file", remedy)
    try:
        document = parse_json(evaluation.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{evaluation} is not JSON that can be judged: {error}", remedy) from None
    metrics = document.get("metrics") if isinstance(document, dict) else None
    if not isinstance(metrics, dict):
        raise UserError(f'{evaluation} contains no "metrics"', remedy)
    return metrics


def judge_file(recipe: Recipe, evaluation: Path, output: Path) -> dict[str, Any]:
    """Judge an `evaluation.json`, log the verdict and write it (JSON). An equal file is left untouched."""
    verdict = judge(recipe.gate, read_metrics(evaluation))
    write_json(output, verdict)
    for line in verdict_lines(verdict):
        log.info("gate: %s", line.removeprefix("gate "))
    return verdict


def check_data(recipe: Recipe, data: Path, output: Path) -> dict[str, Any]:
    """Measure what a Parquet file teaches, warn where the recipe expects something else, and write `output` (JSON).

    Returns `metrics`, those of the kind that describe texts, and `rules`, the judged ones of `expect`. Nothing fails.
    """
    kind = recipe.stages[0].kind
    metrics = kind_module(kind, "style").measure_data(recipe.prompt, data)
    document = {"metrics": metrics, "rules": judge(recipe.expect, metrics)["rules"]}
    write_json(output, document)
    declared = {metric.name: metric for metric in metric_table(kind).of_texts}
    taught = ", ".join(declared[name].describe(value) for name, value in metrics.items())
    log.info("parquet: the rows teach %s", taught)
    if failed := [rule for rule in document["rules"] if not rule["passed"]]:
        wanted = (declared[rule["metric"]].describe(rule["threshold"], rule["comparison"]) for rule in failed)
        log.warning("parquet: the recipe expects %s; a model learns from its rows, whatever the prompt says: "
                    "change the rows, the prompt or `expect`", ", ".join(wanted))  # fmt: skip
    return document


def raise_verdict(verdict_path: Path, report: str) -> NoReturn:
    """Raise UserError with the rules that failed: the last line of the run's log."""
    verdict = read_json(verdict_path) or {"rules": []}
    failures = [f"{rule['metric']}: {rule['reason']}" for rule in verdict["rules"] if not rule["passed"]]
    raise UserError(f"the model did not pass the gate ({'; '.join(failures)})", f"see {report}")


def verdict_lines(verdict: Mapping[str, Any]) -> list[str]:
    """The verdict for a terminal, one line for each rule."""
    lines = [f"gate {'passed' if verdict['passed'] else 'FAILED'}"]
    for rule in verdict["rules"]:
        value = _cell(rule["value"]) or "—"
        mark = "pass" if rule["passed"] else "FAIL"
        reason = f" — {rule['reason']}" if rule["reason"] else ""
        lines.append(f"  {mark}  {rule['metric']} {value} ({rule['comparison']} {rule['threshold']:g}){reason}")
    return lines


def verdict_markdown(verdict: Mapping[str, Any]) -> str:
    """The verdict as a page for the dashboard."""
    rows = [
        f"| {rule['metric']} | {_cell(rule['value'])} | {rule['comparison']} {rule['threshold']:g} "
        f"| {'pass' if rule['passed'] else '**FAIL**'} | {_cell(rule['reason'])} |"
        for rule in verdict["rules"]
    ]
    title = f"# Gate {'passed' if verdict['passed'] else 'FAILED'}"
    return "\n".join([title, "", "| metric | value | rule | verdict | reason |", "|---|---|---|---|---|", *rows, ""])


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, int | float) else str("" if value is None else value)
    return text.replace("|", "\\|").replace("\n", " ")
