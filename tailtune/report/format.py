"""Numbers, sizes and durations as the report writes them. Anything that is not a finite number becomes a dash."""

import math
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

MISSING = "—"


def as_number(value: Any) -> float | None:
    """The value as a float, or None when it cannot be drawn: NaN, infinity, a text, None."""
    return float(value) if isinstance(value, int | float) and -1e300 < value < 1e300 else None


def _or_missing(show: Callable[..., str]) -> Callable[..., str]:
    """Make a formatter of numbers accept any value; what is not a number is shown as a dash."""

    @wraps(show)
    def show_any(value: Any, *options: Any, **named: Any) -> str:
        number = as_number(value)
        return MISSING if number is None else show(number, *options, **named)

    return show_any


@_or_missing
def significant(number: float, digits: int = 3) -> str:
    """Three significant digits, but digits before the decimal point are never rounded away: 2.47, 0.657, 5,231."""
    number = float(f"{number:.{digits - 1}e}") if abs(number) < 10 ** (digits - 1) else round(number)
    if 0 < abs(number) < 1e-4:
        return short(number)
    exponent = math.floor(math.log10(abs(number))) if number else 0
    return f"{number:,.{max(0, digits - 1 - exponent)}f}".replace("-", "−")


@_or_missing
def short(number: float, digits: int = 6, plain_from: float = 1e-3) -> str:
    """A setting as a person writes it: 0.95, 5e-5, 1,000."""
    plain = number == 0 or abs(number) >= plain_from
    text = f"{number:,.{digits}g}" if plain else f"{number:.{digits - 1}e}"
    return re.sub(r"\.?0*e([+-])0*", r"e\1", text).replace("e+", "e")


@_or_missing
def count(number: float) -> str:
    """A whole number: 2,845."""
    return f"{number:,.0f}"


@_or_missing
def percent(share: float, digits: int = 3, signed: bool = False) -> str:
    """A share, 1 being 100 %: 47.1 %; with `signed`, a gain is shown as +15.9 %."""
    return ("+" if signed and share > 0 else "") + significant(100 * share, digits) + "\u00a0%"


@_or_missing
def large(number: float, base: int = 1000, units: Sequence[str] = ("", "K", "M", "B", "T")) -> str:
    """A number of parameters: 3.08 B, 124 M, 812 K."""
    power = min(len(units) - 1, int(math.log(number, base) + 1e-9)) if number >= 1 else 0
    return f"{significant(number / base**power) if power else count(number)}\u00a0{units[power]}".strip()


def num_bytes(number: Any) -> str:
    """A size: 512 bytes, 1.75 MiB."""
    return large(number, 1024, ("bytes", "KiB", "MiB", "GiB", "TiB"))


@_or_missing
def duration(seconds: float) -> str:
    """A duration in its two largest units: 8.50 s, 24 min 35 s, 1 h 05 min."""
    if seconds < 60:
        return f"{significant(seconds)}\u00a0s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}\u00a0h {minutes:02}\u00a0min" if hours else f"{minutes}\u00a0min {rest:02}\u00a0s"
