"""How values are written in the report."""

import math
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from jinja2 import ChainableUndefined
from markupsafe import Markup

MISSING = "—"
MAX_TEXT_CHARACTERS = 8_000
"""A longer text is cut in the report, and the cut is stated; the run's JSON files hold all of it."""


def as_number(value: Any) -> float | None:
    """The value when it is a number that can be drawn; NaN, infinity, texts and None are not."""
    return float(value) if isinstance(value, int | float) and -1e300 < value < 1e300 else None


def _or_missing(show: Callable[..., str]) -> Callable[..., str]:
    """A formatter that shows a dash for what is no number."""

    @wraps(show)
    def shown(value: Any, *options: Any, **named: Any) -> str:
        number = as_number(value)
        return MISSING if number is None else show(number, *options, **named)

    return shown


@_or_missing
def significant(number: float, digits: int = 3) -> str:
    """Three significant digits, but whole digits are never rounded away: 2.47, 0.657, 5,231."""
    number = float(f"{number:.{digits - 1}e}") if abs(number) < 10 ** (digits - 1) else round(number)
    if 0 < abs(number) < 1e-4:
        return short(number)
    exponent = math.floor(math.log10(abs(number))) if number else 0
    return f"{number:,.{max(0, digits - 1 - exponent)}f}".replace("-", "−")


@_or_missing
def short(number: float, digits: int = 6, plain_from: float = 1e-3) -> str:
    """As a person writes it: 0.95, 5e-5, 1,000."""
    plain = number == 0 or abs(number) >= plain_from
    text = f"{number:,.{digits}g}" if plain else f"{number:.{digits - 1}e}"
    return re.sub(r"\.?0*e([+-])0*", r"e\1", text).replace("e+", "e")


@_or_missing
def count(number: float) -> str:
    return f"{number:,.0f}"


@_or_missing
def percent(share: float, digits: int = 3, signed: bool = False) -> str:
    return ("+" if signed and share > 0 else "") + significant(100 * share, digits) + "\u00a0%"


@_or_missing
def large(number: float, base: int = 1000, units: Sequence[str] = ("", "K", "M", "B", "T")) -> str:
    """A number of parameters: 3.08 B, 124 M, 812 K."""
    power = min(len(units) - 1, int(math.log(number, base) + 1e-9)) if number >= 1 else 0
    return f"{significant(number / base**power) if power else count(number)}\u00a0{units[power]}".strip()


def num_bytes(number: Any) -> str:
    return large(number, 1024, ("bytes", "KiB", "MiB", "GiB", "TiB"))


@_or_missing
def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{significant(seconds)}\u00a0s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}\u00a0h {minutes:02}\u00a0min" if hours else f"{minutes}\u00a0min {rest:02}\u00a0s"


# Controls that cannot stand in HTML get their Unicode pictures; those that reorder the text around
# them ("Trojan Source", Boucher & Anderson 2021) get their names; halves of a pair have no character.
_VISIBLE: dict[int, str] = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"}
_VISIBLE |= {0x7F: "\u2421"}
_VISIBLE |= {code: f"⟨U+{code:X}⟩" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


def visible(value: Any) -> Any:
    """What the template prints for a value: the last stop of every text before it is escaped."""
    if isinstance(value, Markup):
        return value
    if value is None or isinstance(value, ChainableUndefined) or value != value:
        return MISSING
    text = str(value)
    if len(text) > MAX_TEXT_CHARACTERS:
        text = f"{text[:MAX_TEXT_CHARACTERS]}… ({len(text) - MAX_TEXT_CHARACTERS:,} more characters)"
    return text.translate(_VISIBLE)
