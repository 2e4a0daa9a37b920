"""What the report says, as one HTML file that loads nothing and runs nothing.

Its first screen says whether the model is better and may be used: the verdict, three numbers against the base model,
answers side by side. Then the data, the curves, the cost and how to load the model; at last everything in full.
The dashboard shows the file in a sandboxed frame, so it has no script. It is also written for a failed gate, so every
value may be missing. The same input gives the same bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tailtune.metrics import FEW_ROWS, REFERENCE, SIDES, Metric, MetricTable
from tailtune.report.charts import history_points, make_charts, mean
from tailtune.report.format import MISSING, as_number, percent, short, significant
from tailtune.report.template import report_template

SIGNS = {"<": "<", "<=": "≤", ">": ">", ">=": "≥"}


@dataclass(frozen=True)
class ReportData:
    """What the steps of a run wrote. Any dictionary may be empty, any value None, NaN or missing."""

    run_name: str
    recipe: dict[str, Any]
    data: dict[str, Any]
    """Facts of fetch, parquet and split."""
    summary: dict[str, Any]
    """`training_summary.json`."""
    history: dict[str, Any]
    """`training_history.json`: `train` and `eval`, one entry for each logged step."""
    evaluation: dict[str, Any]
    """`evaluation.json`."""
    verdict: dict[str, Any]
    """`verdict.json`."""
    demo: dict[str, Any]
    """`answers.json` of `demo_outputs/`."""
    usage: dict[str, Any]
    """`lines` of Python that use the model, in the `folder` that contains it."""


def render_report(data: ReportData, table: MetricTable) -> str:
    """The whole report as one HTML text. `table` declares the metrics of the run's kind."""
    metrics = data.evaluation.get("metrics") or {}
    loss = table.trainer_loss
    rules = [_rule(table, rule) for rule in data.verdict.get("rules") or []]
    metric_rows = [_metric_row(metric, metrics) for metric in table.metrics]
    return report_template().render(
        vars(data),
        metrics=metrics,
        table=table,
        few_rows=FEW_ROWS,
        verdict_words=_verdict(data.verdict.get("passed"), rules, (data.summary.get("base_model") or {}).get("kind")),
        ladder=_ladder(table, metrics),
        tiles=[row for row in metric_rows if row["metric"] in (table.headline, *table.highlights)],
        rules=rules,
        text_rows=_text_rows(table, metrics, data.data.get("check") or {}),
        hours=_hours(data.summary),
        charts=make_charts(
            data.history,
            data.summary.get("best_step"),
            loss.unit if loss else "",
            as_number(metrics.get(f"base_{loss.name}")) if loss else None,
        ),
        metric_rows=metric_rows,
        generated_metrics=" and ".join(m.label for m in table.metrics if m.of_generated and m.better != "neither"),
        other_metrics=_other_metrics(table, metrics),
        recipe_yaml=yaml.safe_dump(data.recipe, sort_keys=False, allow_unicode=True),
        gpu_utilisation=mean(history_points(data.history, "train", "gpu_utilisation_percent")),
    )


def _verdict(passed: Any, rules: Sequence[Mapping[str, Any]], base_model_kind: Any) -> dict[str, str]:
    """The verdict in a word, and why, in a sentence."""
    if passed is True:
        met = f"it meets {f'all {len(rules)} rules' if len(rules) > 1 else 'the rule'} of the gate"
        trial = f"A trial: {met}, but a small model is not for use."
        return {
            "css": "good",
            "word": "✓ Promoted",
            "why": trial if base_model_kind == "small" else f"It may be used: {met}.",
        }
    if passed is not False:
        return {"css": "soft", "word": "Not judged", "why": "The gate has not judged this model. Do not use it yet."}
    failed = [
        f"{rule['label']}: {'not measured' if rule['value'] == MISSING else rule['value']}, required {rule['required']}"
        for rule in rules
        if not rule["met"]
    ]
    which = f" {len(failed)} of {len(rules)} rules not met. {'; '.join(failed)}." if rules else ""
    return {"css": "bad", "word": "✕ Rejected", "why": f"It must not be used.{which}"}


def _text_rows(table: MetricTable, metrics: Mapping[str, Any], check: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How texts are written: what the recipe expects, what the data, the references and both models have."""
    data, rules = check.get("metrics") or {}, check.get("rules") or []
    return [
        {
            "metric": metric,
            "expected": [_required(metric, rule) for rule in rules if rule.get("metric") == metric.name],
            "met": all(rule.get("passed") is True for rule in rules if rule.get("metric") == metric.name),
            "data": _show(metric, as_number(data.get(metric.name))),
            **{
                side: _show(metric, as_number(metrics.get(f"{side}_{metric.name}")))
                for side in (REFERENCE, "base", "tuned")
            },
        }
        for metric in table.of_texts
    ]


def _required(metric: Metric, rule: Mapping[str, Any]) -> str:
    """A rule's side of the comparison: ≥ 60, ≥ 20 %."""
    threshold = rule.get("threshold")
    shown = percent(threshold, 2) if metric.is_share else short(threshold)
    return f"{SIGNS.get(str(rule.get('comparison')), MISSING)}\u00a0{shown}"


def _hours(summary: Mapping[str, Any]) -> tuple[str, str]:
    """What the training has occupied: label and number of GPU-hours, or of node-hours where there was no GPU."""
    gpus = (summary.get("provenance") or {}).get("gpus")
    label, key = ("GPU-hours", "world_size") if gpus else ("Node-hours", "num_nodes")
    seconds, number = as_number(summary.get("train_seconds")), as_number(summary.get(key))
    return label, MISSING if seconds is None or number is None else significant(seconds * number / 3600)


def _ladder(table: MetricTable, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The headline of floor, base and tuned model as bars. `width` is in percent of the longest bar."""
    sides = {"base": "Base", "tuned": "Tuned"}
    if table.floor:
        sides = {table.floor.name: table.floor.bar_label, **sides}
    values = {side: as_number(metrics.get(table.headline_of(side))) for side in sides}
    bars = {side: value for side, value in values.items() if value is not None and value > 0}
    return [
        {
            "side": side,
            "label": sides[side],
            "value": _show(table.headline, value),
            "width": round(100 * value / max(bars.values()), 2),
        }
        for side, value in bars.items()
    ]


def _rule(table: MetricTable, rule: Mapping[str, Any]) -> dict[str, Any]:
    """A gate rule, with as many digits as it takes to see on which side of the threshold the value is."""
    name, value, threshold = str(rule.get("metric")), rule.get("value"), rule.get("threshold")
    differing = (n for n in range(3, 18) if significant(value, n) != significant(threshold, n))
    return {
        **rule,
        "met": rule.get("passed") is True,
        "label": table.labels.get(name, name),
        "value": significant(value, next(differing, 3)),
        "required": f"{SIGNS.get(str(rule.get('comparison')), MISSING)} {short(threshold)}",
    }


def _metric_row(metric: Metric, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Base and tuned value of a metric, the change, and whether it is better, worse or unchanged."""
    base, tuned = _both(metric, metrics)
    change, mark = MISSING, None
    if base is not None and tuned is not None:
        change = _change(metric, base, tuned)
        if metric.better != "neither":
            improved = (tuned < base) == (metric.better == "lower")
            mark = "unchanged" if tuned == base else "better" if improved else "worse"
    return {
        "metric": metric,
        "base": _show(metric, base),
        "tuned": _show(metric, tuned),
        "change": change,
        "mark": mark,
    }


def _other_metrics(table: MetricTable, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Metrics without a before and after: the floor, the ratios, and whatever else was measured."""
    paired = {f"{side}_{metric.name}" for metric in table.metrics for side in (*SIDES, REFERENCE)}
    names = [name for name in table.labels if name in metrics and name not in paired]
    names += sorted(set(metrics) - set(names) - paired)
    return [(table.labels.get(name, name), significant(metrics[name])) for name in names]


def _both(metric: Metric, metrics: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The base and the tuned value of a metric; None where one is not a number."""
    return as_number(metrics.get(f"base_{metric.name}")), as_number(metrics.get(f"tuned_{metric.name}"))


def _show(metric: Metric, value: float | None) -> str:
    return percent(value) if metric.is_share else short(value) if metric.of_texts else significant(value)


def _change(metric: Metric, base: float, tuned: float) -> str:
    """The change in percent of the base value; of a share, the difference in percentage points."""
    if metric.is_share:
        return percent(tuned - base, 3, signed=True).replace("%", "points")
    return percent((tuned - base) / abs(base or math.nan), 2, signed=True)
