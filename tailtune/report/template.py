"""The Jinja environment of the report: every text is escaped, and no character is invisible."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader, Template
from markupsafe import Markup

from tailtune.report.format import MISSING, count, duration, large, num_bytes, percent, short, significant

MAX_TEXT_CHARACTERS = 8_000
"""A longer text is cut in the report, which says so; the run's JSON files have all of it."""

# Control characters that HTML does not allow become their Unicode pictures. Those that reorder the text around them
# ("Trojan Source", Boucher & Anderson 2021) become their code points. Half a surrogate pair has no character at all.
_VISIBLE: dict[int, str] = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"}
_VISIBLE |= {0x7F: "\u2421"}
_VISIBLE |= {code: f"⟨U+{code:X}⟩" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


@cache
def report_template() -> Template:
    """`report.html.j2`, ready to render. A value that is missing, None or NaN is shown as a dash."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=visible,  # runs before escaping
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formatters = (count, duration, large, percent, short, significant)
    environment.filters |= {function.__name__: function for function in formatters} | {"bytes": num_bytes}
    return environment.get_template("report.html.j2")


def visible(value: Any) -> Any:
    """The text that the template prints for a value, before it is escaped."""
    if isinstance(value, Markup):
        return value
    if value is None or isinstance(value, ChainableUndefined) or value != value:
        return MISSING
    text = str(value)
    if len(text) > MAX_TEXT_CHARACTERS:
        text = f"{text[:MAX_TEXT_CHARACTERS]}… ({len(text) - MAX_TEXT_CHARACTERS:,} more characters)"
    return text.translate(_VISIBLE)
