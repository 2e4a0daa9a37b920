"""What the report says, as one HTML file that loads nothing and runs nothing.

Its parts are the outcome, bars for floor, base and tuned model, gate rules and metrics.
The dashboard shows the file in a sandboxed frame, so it has no script. It is also written for a failed gate, so every
value may be missing. The same input gives the same bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tailtune.metrics import FEW_ROWS, SIDES, Metric, MetricTable
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


def render_report(data: ReportData, table: MetricTable) -> str:
    """The whole report as one HTML text. `table` declares the metrics of the run's kind."""
    metrics = data.evaluation.get("metrics") or {}
    loss = table.trainer_loss
    return report_template().render(
        vars(data),
        metrics=metrics,
        table=table,
        few_rows=FEW_ROWS,
        outcome=_outcome(table, metrics, data.verdict),
        ladder=_ladder(table, metrics),
        highlights=[_highlight(metric, metrics) for metric in table.highlights],
        rules=[_rule(table, rule) for rule in data.verdict.get("rules") or []],
        charts=make_charts(
            data.history,
            data.summary.get("best_step"),
            loss.unit if loss else "",
            as_number(metrics.get(f"base_{loss.name}")) if loss else None,
        ),
        metric_rows=[_metric_row(metric, metrics) for metric in table.metrics],
        generated_metrics=" and ".join(m.label for m in table.metrics if m.of_generated and m.better != "neither"),
        other_metrics=_other_metrics(table, metrics),
        recipe_yaml=yaml.safe_dump(data.recipe, sort_keys=False, allow_unicode=True),
        gpu_utilisation=mean(history_points(data.history, "train", "gpu_utilisation_percent")),
    )


def _outcome(table: MetricTable, metrics: Mapping[str, Any], verdict: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The outcome in one sentence, as (text, CSS class) parts."""
    headline, floor = table.headline, table.floor
    base, tuned = _both(headline, metrics)
    gates = {True: ("gate passed", "good"), False: ("gate failed", "bad"), None: ("gate not judged", "soft")}
    gate = gates[verdict["passed"] if isinstance(verdict.get("passed"), bool) else None]
    if tuned is None:
        return [(f"{headline.label} not measured; ", ""), gate]
    before = f"{_show(headline, base)} → " if base is not None else ""
    parts = [(f"{headline.label} ", ""), (f"{before}{_show(headline, tuned)}", "figure")]
    if base:
        parts += [(f" ({_change(headline, base, tuned)})", "")]
    if floor and (value := as_number(metrics.get(table.headline_of(floor.name)))):
        side = "below" if tuned <= value else "above"
        parts += [(f", {percent(abs(tuned / value - 1), 2)} {side} the {floor.label}", "")]
    return [*parts, ("; ", ""), gate]


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


def _highlight(metric: Metric, metrics: Mapping[str, Any]) -> dict[str, str]:
    """A metric next to the bars for floor, base and tuned model; the percent sign is written once."""
    base, tuned = (_show(metric, value) for value in _both(metric, metrics))
    return {"label": metric.label, "base": base.removesuffix("\u00a0%"), "tuned": tuned}


def _rule(table: MetricTable, rule: Mapping[str, Any]) -> dict[str, Any]:
    """A gate rule, with as many digits as it takes to see on which side of the threshold the value is."""
    name, value, threshold = str(rule.get("metric")), rule.get("value"), rule.get("threshold")
    differing = (n for n in range(3, 18) if significant(value, n) != significant(threshold, n))
    return {
        **rule,
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
    paired = {f"{side}_{metric.name}" for metric in table.metrics for side in SIDES}
    names = [name for name in table.labels if name in metrics and name not in paired]
    names += sorted(set(metrics) - set(names) - paired)
    return [(table.labels.get(name, name), significant(metrics[name])) for name in names]


def _both(metric: Metric, metrics: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The base and the tuned value of a metric; None where one is not a number."""
    return as_number(metrics.get(f"base_{metric.name}")), as_number(metrics.get(f"tuned_{metric.name}"))


def _show(metric: Metric, value: float | None) -> str:
    return percent(value) if metric.is_share else significant(value)


def _change(metric: Metric, base: float, tuned: float) -> str:
    """The change in percent of the base value; of a share, the difference in percentage points."""
    if metric.is_share:
        return percent(tuned - base, 3, signed=True).replace("%", "points")
    return percent((tuned - base) / abs(base or math.nan), 2, signed=True)
