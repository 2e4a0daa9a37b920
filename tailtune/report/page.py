"""The before/after report: one HTML file that loads nothing, runs nothing, and hides nothing.

It is shown in the dashboard's sandboxed frame, so it has no script and needs none, and it is
written for a failed gate too, so every value may be missing. Whatever a model or a data set wrote
is text: the template escapes it, and characters that would change what a reader sees are named.
The same input gives the same bytes.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from tailtune.report.charts import history_points, make_charts, mean
from tailtune.report.data import ReportData
from tailtune.report.format import (
    MISSING,
    as_number,
    count,
    duration,
    large,
    num_bytes,
    percent,
    short,
    significant,
    visible,
)


class Metric(NamedTuple):
    label: str
    unit: str
    lower_is_better: bool | None
    """None: neither is better."""
    is_share: bool = False


METRICS: dict[str, Metric] = {
    "answer_loss": Metric("Answer loss", "nats per token", lower_is_better=True),
    "perplexity": Metric("Perplexity", "", lower_is_better=True),
    "bits_per_byte": Metric("Bits per byte", "", lower_is_better=True),
    "token_accuracy": Metric("Token accuracy", "next token right", lower_is_better=False, is_share=True),
    "rouge_l": Metric("ROUGE-L", "0 to 1", lower_is_better=False),
    "chrf": Metric("chrF", "0 to 100", lower_is_better=False),
    "tokens_per_second": Metric("Generation speed", "tokens/s, depends on the answers' length", lower_is_better=None),
}
"""Metric without its `base_` or `tuned_` → how it is shown."""
SINGLE_METRICS = {
    "unigram_answer_loss": "Answer loss, word-frequency floor",
    "answer_loss_vs_unigram": "Answer loss, tuned ÷ word-frequency floor",
    "answer_loss_vs_base": "Answer loss, tuned ÷ base",
}
COMPARISONS = {"<": "<", "<=": "≤", ">": ">", ">=": "≥"}


def render_report(data: ReportData) -> str:
    """The whole report as one HTML text."""
    metrics = data.evaluation.get("metrics") or {}
    return _ENVIRONMENT.get_template("report.html.j2").render(
        vars(data),
        metrics=metrics,
        outcome=_outcome(metrics, data.verdict),
        ladder=_ladder(metrics),
        rules=[_rule(rule) for rule in data.verdict.get("rules") or []],
        charts=make_charts(data, metrics),
        metric_rows=_metric_rows(metrics),
        other_metrics=_other_metrics(metrics),
        recipe_yaml=yaml.safe_dump(data.recipe, sort_keys=False, allow_unicode=True),
        gpu_utilisation=mean(history_points(data.history, "train", "gpu_utilisation_percent")),
    )


def _label(name: str) -> str:
    """A metric's name for readers: `tuned_token_accuracy` → Token accuracy, tuned."""
    side, _, short = name.partition("_")
    if side in ("base", "tuned") and short in METRICS:
        return f"{METRICS[short].label}, {side}"
    return SINGLE_METRICS.get(name, name)


def _outcome(metrics: Mapping[str, Any], verdict: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The outcome in one sentence, as (text, class) parts."""
    base, tuned = as_number(metrics.get("base_answer_loss")), as_number(metrics.get("tuned_answer_loss"))
    gates = {True: ("gate passed", "good"), False: ("gate failed", "bad"), None: ("gate not judged", "soft")}
    gate = gates[verdict["passed"] if isinstance(verdict.get("passed"), bool) else None]
    if tuned is None:
        return [("Answer loss not measured; ", ""), gate]
    before = f"{significant(base)} → " if base is not None else ""
    parts = [("Answer loss ", ""), (f"{before}{significant(tuned)}", "figure")]
    if base:
        parts += [(f" ({percent(tuned / base - 1, 2, signed=True)})", "")]
    if floor := as_number(metrics.get("unigram_answer_loss")):
        side = "below" if tuned <= floor else "above"
        parts += [(f", {percent(abs(tuned / floor - 1), 2)} {side} the word-frequency floor", "")]
    return [*parts, ("; ", ""), gate]


def _ladder(metrics: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Answer loss of word frequencies, base and tuned model: name, value, percent of the largest."""
    found = [(name, as_number(metrics.get(f"{name}_answer_loss"))) for name in ("unigram", "base", "tuned")]
    bars = [(name, value) for name, value in found if value is not None and value > 0]
    return [(name, value, round(100 * value / max(v for _, v in bars), 2)) for name, value in bars]


def _rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule with as many digits as it takes to see on which side of the threshold the value is."""
    value, threshold = rule.get("value"), rule.get("threshold")
    differing = (n for n in range(3, 18) if significant(value, n) != significant(threshold, n))
    return {
        **rule,
        "label": _label(str(rule.get("metric"))),
        "value": significant(value, next(differing, 3)),
        "required": f"{COMPARISONS.get(str(rule.get('comparison')), MISSING)} {short(threshold)}",
    }


def _metric_rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Base and tuned value of each metric and what the change means, in METRICS' order."""
    rows = []
    for name, metric in METRICS.items():
        base, tuned = (as_number(metrics.get(f"{side}_{name}")) for side in ("base", "tuned"))
        show = percent if metric.is_share else significant
        change, mark = MISSING, None
        if base is not None and tuned is not None:
            if metric.is_share:
                change = percent(tuned - base, 3, signed=True).replace("%", "points")
            else:
                change = percent((tuned - base) / abs(base or math.nan), 2, signed=True)
            won = (tuned < base) == metric.lower_is_better
            mark = "unchanged" if tuned == base else "better" if won else "worse"
            mark = None if metric.lower_is_better is None else mark
        row = {"metric": metric, "base": show(base), "tuned": show(tuned), "change": change, "mark": mark}
        rows.append(row)
    return rows


def _other_metrics(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Metrics without a before and after: the floor, the ratios, and whatever else was measured."""
    paired = {f"{side}_{name}" for name in METRICS for side in ("base", "tuned")}
    names = [name for name in SINGLE_METRICS if name in metrics]
    names += sorted(set(metrics) - set(names) - paired)
    return [(_label(name), significant(metrics[name])) for name in names]


_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=ChainableUndefined)
_ENVIRONMENT.loader = FileSystemLoader(Path(__file__).parent)
_ENVIRONMENT.finalize = visible
_FILTERS = (count, duration, large, percent, short, significant)
_ENVIRONMENT.filters.update({function.__name__: function for function in _FILTERS} | {"bytes": num_bytes})
