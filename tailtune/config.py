"""The base class of every configuration, the length of rows, and templates over their columns."""

import re
import string
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen; refuses unknown keys and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Truncation:
    """How rows are cut, in training by TRL and in evaluation alike: `max_length` and `truncation_mode` of a stage."""

    max_length: int | None = None
    """Tokens that are kept, with question and system prompt; None keeps all."""
    keep_end: bool = False


WHOLE_ROWS = Truncation()


def template_fields(template: str) -> list[str]:
    """The `{names}` of a template such as `For {topic}, {question}`, in order.

    Raises ValueError on broken braces, and on `{a:b}` and `{a!r}`.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"template '{template}': {error}; write {{name}}, and {{{{ or }}}} for a brace") from None
    for _, name, specification, conversion in parts:
        if specification or conversion:
            raise ValueError(f"template '{template}': '{name}' is followed by ':' or '!'; write {{{name}}}")
    return [name for _, name, _, _ in parts if name]


def refuse_doubled(key: str, template: str, columns: Container[str]) -> None:
    """Raise ValueError for a column in doubled braces, as other template languages have them: here they are a text."""
    for name in re.findall(r"(?<!\{)\{\{\s*([^{}]+?)\s*\}\}(?!\})", template):
        if name in columns:
            raise ValueError(f"{key} has {{{{{name}}}}}, which is the text {{{name}}} for every row; write {{{name}}}")


def copied_column(template: str) -> str | None:
    """The column that a template such as `{tags}` copies; None for a template with more than a name."""
    names = template_fields(template)
    return names[0] if len(names) == 1 and template == f"{{{names[0]}}}" else None


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's values in place of its `{names}`. Braces in a value stay as they are."""
    return "".join(
        literal + (str(row[name]) if name else "") for literal, name, _, _ in string.Formatter().parse(template)
    )
