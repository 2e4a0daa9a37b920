"""The before/after report: one HTML file that loads nothing, runs nothing, and hides nothing.

It is shown in the dashboard's sandboxed frame, so it has no script and needs none, and it is
written for a failed gate too, so every value may be missing. Whatever a model or a data set wrote
is text: the template escapes it, and characters that would change what a reader sees are named.
The same input gives the same bytes.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml
from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from markupsafe import Markup

MISSING = "—"
MAX_TEXT_CHARACTERS = 8_000
"""A longer text is cut in the report, and the cut is stated; the run's JSON files hold all of it."""
MAX_POINTS = 400
"""A curve's points: more than a chart has pixels only makes the file larger."""


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
    """`train` and `eval`: one entry per logged step."""
    evaluation: dict[str, Any]
    verdict: dict[str, Any]
    demo: dict[str, Any]


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

Points = list[tuple[float, float]]
"""(step, value), in order of step."""

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
        charts=_charts(data, metrics),
        metric_rows=_metric_rows(metrics),
        other_metrics=_other_metrics(metrics),
        recipe_yaml=yaml.safe_dump(data.recipe, sort_keys=False, allow_unicode=True),
        gpu_utilisation=_mean(_points(data.history, "train", "gpu_utilisation_percent")),
    )


def _number(value: Any) -> float | None:
    """The value when it is a number that can be drawn; NaN, infinity, texts and None are not."""
    return float(value) if isinstance(value, int | float) and -1e300 < value < 1e300 else None


def _or_missing(show: Callable[..., str]) -> Callable[..., str]:
    """A formatter that shows a dash for what is no number."""

    @wraps(show)
    def shown(value: Any, *options: Any, **named: Any) -> str:
        number = _number(value)
        return MISSING if number is None else show(number, *options, **named)

    return shown


@_or_missing
def _significant(number: float, digits: int = 3) -> str:
    """Three significant digits, but whole digits are never rounded away: 2.47, 0.657, 5,231."""
    number = float(f"{number:.{digits - 1}e}") if abs(number) < 10 ** (digits - 1) else round(number)
    if 0 < abs(number) < 1e-4:
        return _short(number)
    exponent = math.floor(math.log10(abs(number))) if number else 0
    return f"{number:,.{max(0, digits - 1 - exponent)}f}".replace("-", "−")


@_or_missing
def _short(number: float, digits: int = 6, plain_from: float = 1e-3) -> str:
    """As a person writes it: 0.95, 5e-5, 1,000."""
    plain = number == 0 or abs(number) >= plain_from
    text = f"{number:,.{digits}g}" if plain else f"{number:.{digits - 1}e}"
    return re.sub(r"\.?0*e([+-])0*", r"e\1", text).replace("e+", "e")


@_or_missing
def _count(number: float) -> str:
    return f"{number:,.0f}"


@_or_missing
def _percent(share: float, digits: int = 3, signed: bool = False) -> str:
    return ("+" if signed and share > 0 else "") + _significant(100 * share, digits) + "\u00a0%"


@_or_missing
def _large(number: float, base: int = 1000, units: Sequence[str] = ("", "K", "M", "B", "T")) -> str:
    """A number of parameters: 3.08 B, 124 M, 812 K."""
    power = min(len(units) - 1, int(math.log(number, base) + 1e-9)) if number >= 1 else 0
    return f"{_significant(number / base**power) if power else _count(number)}\u00a0{units[power]}".strip()


def _bytes(number: Any) -> str:
    return _large(number, 1024, ("bytes", "KiB", "MiB", "GiB", "TiB"))


@_or_missing
def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{_significant(seconds)}\u00a0s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}\u00a0h {minutes:02}\u00a0min" if hours else f"{minutes}\u00a0min {rest:02}\u00a0s"


# Controls that cannot stand in HTML get their Unicode pictures; those that reorder the text around
# them ("Trojan Source", Boucher & Anderson 2021) get their names; halves of a pair have no character.
_VISIBLE: dict[int, str] = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"}
_VISIBLE |= {0x7F: "\u2421"}
_VISIBLE |= {code: f"⟨U+{code:X}⟩" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


def _shown(value: Any) -> Any:
    """What the template prints for a value: the last stop of every text before it is escaped."""
    if isinstance(value, Markup):
        return value
    if value is None or isinstance(value, ChainableUndefined) or value != value:
        return MISSING
    text = str(value)
    if len(text) > MAX_TEXT_CHARACTERS:
        text = f"{text[:MAX_TEXT_CHARACTERS]}… ({len(text) - MAX_TEXT_CHARACTERS:,} more characters)"
    return text.translate(_VISIBLE)


def _label(name: str) -> str:
    """A metric's name for readers: `tuned_token_accuracy` → Token accuracy, tuned."""
    side, _, short = name.partition("_")
    if side in ("base", "tuned") and short in METRICS:
        return f"{METRICS[short].label}, {side}"
    return SINGLE_METRICS.get(name, name)


def _outcome(metrics: Mapping[str, Any], verdict: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The outcome in one sentence, as (text, class) parts."""
    base, tuned = _number(metrics.get("base_answer_loss")), _number(metrics.get("tuned_answer_loss"))
    gates = {True: ("gate passed", "good"), False: ("gate failed", "bad"), None: ("gate not judged", "soft")}
    gate = gates[verdict["passed"] if isinstance(verdict.get("passed"), bool) else None]
    if tuned is None:
        return [("Answer loss not measured; ", ""), gate]
    before = f"{_significant(base)} → " if base is not None else ""
    parts = [("Answer loss ", ""), (f"{before}{_significant(tuned)}", "figure")]
    if base:
        parts += [(f" ({_percent(tuned / base - 1, 2, signed=True)})", "")]
    if floor := _number(metrics.get("unigram_answer_loss")):
        side = "below" if tuned <= floor else "above"
        parts += [(f", {_percent(abs(tuned / floor - 1), 2)} {side} the word-frequency floor", "")]
    return [*parts, ("; ", ""), gate]


def _ladder(metrics: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Answer loss of word frequencies, base and tuned model: name, value, percent of the largest."""
    found = [(name, _number(metrics.get(f"{name}_answer_loss"))) for name in ("unigram", "base", "tuned")]
    bars = [(name, value) for name, value in found if value is not None and value > 0]
    return [(name, value, round(100 * value / max(v for _, v in bars), 2)) for name, value in bars]


def _rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule with as many digits as it takes to see on which side of the threshold the value is."""
    value, threshold = rule.get("value"), rule.get("threshold")
    differing = (n for n in range(3, 18) if _significant(value, n) != _significant(threshold, n))
    return {
        **rule,
        "label": _label(str(rule.get("metric"))),
        "value": _significant(value, next(differing, 3)),
        "required": f"{COMPARISONS.get(str(rule.get('comparison')), MISSING)} {_short(threshold)}",
    }


def _metric_rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Base and tuned value of each metric and what the change means, in METRICS' order."""
    rows = []
    for name, metric in METRICS.items():
        base, tuned = (_number(metrics.get(f"{side}_{name}")) for side in ("base", "tuned"))
        show = _percent if metric.is_share else _significant
        change, mark = MISSING, None
        if base is not None and tuned is not None:
            if metric.is_share:
                change = _percent(tuned - base, 3, signed=True).replace("%", "points")
            else:
                change = _percent((tuned - base) / abs(base or math.nan), 2, signed=True)
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
    return [(_label(name), _significant(metrics[name])) for name in names]


def _charts(data: ReportData, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    keys = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
    loss, rate, norm, speed = (_points(data.history, "train", key) for key in keys)
    validation = _points(data.history, "eval", "eval_loss")
    best = next((point for point in validation if point[0] == data.summary.get("best_step")), None)
    losses = [("training", "base", loss), ("validation", "tuned", validation)]
    peak = _short(max((y for _, y in rate), default=None), 3)
    return [
        _chart("Loss", "nats per token", losses, _number(metrics.get("base_answer_loss")), best),
        _chart("Learning rate", "", [(f"peak {peak}", "tuned", rate)]),
        _chart("Gradient norm", "", [(f"last {_significant(norm and norm[-1][1])}", "tuned", norm)]),
        _chart("Throughput", "tokens/s", [(f"mean {_significant(_mean(speed))}", "tuned", speed)]),
    ]


def _points(history: Mapping[str, Any], kind: str, key: str) -> Points:
    """(step, value) in order of step; a step that was repeated after a resume counts once, the last time."""
    pairs = ((_number(entry.get("step")), _number(entry.get(key))) for entry in history.get(kind) or [])
    return sorted({step: value for step, value in pairs if step is not None and value is not None}.items())


def _mean(points: Points) -> float | None:
    return fmean(y for _, y in points) if points else None


def _thin(points: Points) -> Points:
    """At most MAX_POINTS points: each stretch keeps its lowest and highest one, so that spikes stay."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    kept = {by(stretch, key=lambda point: point[1]) for stretch in stretches for by in (min, max)}
    return sorted(kept | {points[0], points[-1]})


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round values that cover low to high in three to six steps of 1, 2 or 5, and their labels."""
    rough = (high - low) / 5
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [step * index for index in range(first, last + 1)]
    labels = [_short(tick, plain_from=1e-2 if high < 1e-2 else 0) for tick in ticks]
    if not any("e" in label for label in labels):
        decimals = max(len(label.partition(".")[2]) for label in labels)
        labels = [f"{tick:,.{decimals}f}" for tick in ticks]
    return list(zip(ticks, labels, strict=True))


def _chart(
    title: str,
    unit: str,
    series: list[tuple[str, str, Points]],
    reference: float | None = None,
    best: Any = None,
) -> dict[str, Any]:
    """A chart in a 100 × 100 field: the drawing stretches, the labels around it are HTML and do not.

    Two curves are compared closely, so their axis starts where they do; a single one starts at zero.
    """
    drawn = [line for line in series if line[2]]
    if not drawn:
        return {"title": title, "unit": unit}
    heights = [y for _, _, points in drawn for _, y in points]
    heights += [0.0] if len(series) == 1 else [] if reference is None else [reference]
    low, high = min(heights), max(heights)
    if high - low <= max(1e-9 * abs(high), 1e-30):
        low, high = low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1)
    y_ticks = _ticks(low, high)
    low, high = y_ticks[0][0], y_ticks[-1][0]
    right = max(0.0, *(x for _, _, points in drawn for x, _ in points)) or 1.0

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return round(100 * point[0] / right, 2), round(100 * (high - point[1]) / (high - low), 2)

    lines = []
    for label, css, points in drawn:
        places = [f"{x:g} {y:g}" for x, y in map(at, _thin(points))]
        dotted = len(series) > 1 and css == "tuned" and len(places) <= 40
        last = "" if len(series) == 1 else f" {_significant(points[-1][1])}"
        dots = "".join(f"M{place}h0" for place in places) if dotted else ""
        path = f"M{'L'.join(places)}h0"  # h0 draws a dot where there is only one point
        lines.append({"label": label + last, "css": css, "path": path, "dots": dots})
    ranges = [f"{name}, from {_significant(p[0][1])} to {_significant(p[-1][1])}" for name, _, p in drawn]
    return {
        "title": title,
        "unit": unit,
        "lines": lines,
        "y_ticks": [(at((0, y))[1], label) for y, label in y_ticks],
        "x_ticks": [(at((x, 0))[0], label) for x, label in _ticks(0, right) if x <= right],
        "reference": reference and (at((0, reference))[1], f"base model {_significant(reference)}"),
        "best": best and (at(best), f"best {_significant(best[1])} at step {_count(best[0])}"),
        "description": f"{title} over {_count(right)} steps: {'; '.join(ranges)}",
    }


_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=ChainableUndefined)
_ENVIRONMENT.loader = FileSystemLoader(Path(__file__).parent)
_ENVIRONMENT.finalize = _shown
_FILTERS = (_bytes, _count, _duration, _large, _percent, _short, _significant)
_ENVIRONMENT.filters.update({function.__name__[1:]: function for function in _FILTERS})
