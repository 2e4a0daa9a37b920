"""The report's charts: training curves as SVG paths, with their axes and labels."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from tailtune.report.format import as_number, count, short, significant

MAX_POINTS = 400
"""Points of a curve; more than a chart has pixels would only make the file larger."""
Points = list[tuple[float, float]]
"""(step, value), in order of step."""


def make_charts(
    history: Mapping[str, Any], best_step: Any, loss_unit: str, base_loss: float | None
) -> list[dict[str, Any]]:
    """Loss, learning rate, gradient norm and throughput over the steps of a `training_history.json`.

    `base_loss` is the base model's validation loss, where it was measured.
    """
    keys = ("loss", "learning_rate", "grad_norm", "tokens_per_second")
    loss, rate, norm, speed = (history_points(history, "train", key) for key in keys)
    validation = history_points(history, "eval", "eval_loss")
    best = next((point for point in validation if point[0] == best_step), None)
    losses = [("training", "base", loss), ("validation", "tuned", validation)]
    peak = short(max((y for _, y in rate), default=None), 3)
    return [
        _chart("Loss", loss_unit, losses, base_loss, best),
        _chart("Learning rate", "", [(f"peak {peak}", "tuned", rate)]),
        _chart("Gradient norm", "", [(f"last {significant(norm and norm[-1][1])}", "tuned", norm)]),
        _chart("Throughput", "tokens/s", [(f"mean {significant(mean(speed))}", "tuned", speed)]),
    ]


def history_points(history: Mapping[str, Any], kind: str, key: str) -> Points:
    """The values of `key` in order of step; a step that was repeated after a resume counts once, the last time."""
    pairs = ((as_number(entry.get("step")), as_number(entry.get(key))) for entry in history.get(kind) or [])
    return sorted({step: value for step, value in pairs if step is not None and value is not None}.items())


def mean(points: Points) -> float | None:
    """The mean of the values; None when there are none."""
    return fmean(y for _, y in points) if points else None


def _thin(points: Points) -> Points:
    """At most MAX_POINTS points: each stretch keeps its lowest and its highest point, so that spikes stay visible."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    extremes = {choose(stretch, key=lambda point: point[1]) for stretch in stretches for choose in (min, max)}
    return sorted(extremes | {points[0], points[-1]})


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round values that cover `low` to `high` in three to six steps of 1, 2 or 5 times a power of ten, with labels."""
    rough = (high - low) / 5
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [step * index for index in range(first, last + 1)]
    labels = [short(tick, plain_from=1e-2 if high < 1e-2 else 0) for tick in ticks]
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
    """A chart in a field of 100 × 100. The drawing is stretched; the labels around it are HTML and are not.

    `series` holds (label, CSS class, points) of each curve. Two curves are to be compared closely, so their axis covers
    only their values; the axis of a single one includes zero.
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

    def at(point: tuple[float, float]) -> tuple[float, float]:  # from the left, from the top
        return round(100 * point[0] / right, 2), round(100 * (high - point[1]) / (high - low), 2)

    lines = []
    for label, css, points in drawn:
        positions = [f"{x:g} {y:g}" for x, y in map(at, _thin(points))]
        dotted = len(series) > 1 and css == "tuned" and len(positions) <= 40
        last = "" if len(series) == 1 else f" {significant(points[-1][1])}"
        dots = "".join(f"M{position}h0" for position in positions) if dotted else ""
        path = f"M{'L'.join(positions)}h0"  # h0 draws a dot where there is only one point
        lines.append({"label": label + last, "css": css, "path": path, "dots": dots})
    ranges = [f"{name}, from {significant(p[0][1])} to {significant(p[-1][1])}" for name, _, p in drawn]
    return {
        "title": title,
        "unit": unit,
        "lines": lines,
        "y_ticks": [(at((0, y))[1], label) for y, label in y_ticks],
        "x_ticks": [(at((x, 0))[0], label) for x, label in _ticks(0, right) if x <= right],
        "reference": reference and (at((0, reference))[1], f"base model {significant(reference)}"),
        "best": best and (at(best), f"best {significant(best[1])} at step {count(best[0])}"),
        "description": f"{title} over {count(right)} steps: {'; '.join(ranges)}",
    }
