"""The plain values of a recipe: read from YAML, bounded, and shown in messages.

Whoever writes the text, it becomes texts, finite numbers, booleans, nulls, lists and mappings whose keys are texts.
"""

import math
import re
import reprlib
from collections.abc import Iterator
from typing import Any

import yaml

from tailtune.errors import UserError
from tailtune.recipe.addresses import without_secrets

MAX_DEPTH = 32
"""Levels of lists and mappings."""
MAX_SIZE = 300_000
"""Characters and values, counted as if every YAML alias were written out."""
MAX_INTEGER = 2**53
"""KFP's parameters and many readers of JSON take numbers as doubles."""
SHOWN_CHARS = 80


def shown(value: Any, limit: int = SHOWN_CHARS) -> str:
    """Return a value as messages quote it: its start, without secrets in addresses."""
    return cut(_SHORT.repr(value), limit)


def cut(text: str, limit: int = SHOWN_CHARS) -> str:
    """Return a text, or its start."""
    return text if len(text) <= limit else f"{text[:limit]}…"


class _Short(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_secrets(x), level)

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if abs(x) < 10**40 else f"a number of about {x.bit_length() * 3 // 10} digits"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = SHOWN_CHARS
_SHORT.fillvalue = "…"


class _Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2 does: `5e-5` is a number; `off`, `12:30:45` and `2024-10-01` are texts.

    So are numbers with zeros before them, such as `010`. Errors where PyYAML would go on, or fail without a line: tags,
    duplicate keys (of which it takes the last), keys that are no texts, deep nesting.
    """

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(problem=f"a tag ({cut(event.tag)}); leave it out", problem_mark=event.start_mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            problem = f"lists and mappings in more than {MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, value in node.value:
            if key.tag not in (_STR, _MERGE) or not isinstance(key, yaml.ScalarNode):
                problem = "a key that is no text; put it in quotes"
                if isinstance(key, yaml.MappingNode):
                    problem = 'a mapping as a key; for a template, write "{column}" in quotes'
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.tag == _MERGE and not isinstance(value, yaml.MappingNode):
                raise yaml.MarkedYAMLError(problem="'<<' takes one mapping", problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"duplicate key '{cut(key.value)}'"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return node

    def construct_yaml_int(self, node: Any) -> int:
        digits = node.value.replace("_", "")
        if len(digits) > 20:
            problem = f"a number of {len(digits):,} digits; for a text, put it in quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return int(digits)


_STR, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
              r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))", "-+0123456789."),
    ("merge", r"<<", "<"),
):  # fmt: skip
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
    )
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_yaml(text: str) -> Any:
    """Return the plain values of a YAML text. Raises ValueError with the line and what is wrong there."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{where}{cut(error.problem or 'not YAML', 200)}") from None
    except yaml.reader.ReaderError as error:
        raise ValueError(f"character {error.position + 1} (#x{error.character:04x}) is not allowed") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # "\UFFFFFFFF" among others
        raise ValueError(f"not YAML ({cut(str(error))})") from None


def parse_value(text: str) -> Any:
    """Return the typed value of a `-p KEY=VALUE` text: a YAML scalar, list or `{a: 1}`.

    `{answer}` and `Answer: briefly` are mappings in YAML, but here they are strings.
    """
    try:
        value = parse_yaml(text) if text.strip() else text
    except ValueError:
        return text
    is_text = isinstance(value, dict) and value and not (text.lstrip().startswith("{") and ":" in text)
    return text if is_text else value


def check_values(raw: Any, source: str) -> None:
    """Raise UserError, which names the key, for a value that a recipe cannot hold, wherever it is."""
    size = 0
    rest: list[tuple[Any, tuple[Any, ...]]] = [(raw, ())]
    while rest:
        value, path = rest.pop()
        size += len(value) if isinstance(value, str) else 1
        if size > MAX_SIZE:
            problem = f"recipe {source} is larger than {MAX_SIZE:,} characters, with its aliases written out"
            raise UserError(problem, "shorten it")
        if problem := _why_not_plain(value, len(path)):
            key = cut(".".join(map(str, path)) or "recipe")
            raise UserError(f"recipe {source}: {key}: {problem}")
        if isinstance(value, dict):
            for key, each in value.items():
                rest += [(key, path), (each, (*path, key))]
        elif isinstance(value, list):
            rest += [(each, (*path, index)) for index, each in enumerate(value)]


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key of every text in plain values, and the text."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts(each, f"{key}.{name}" if key else str(name))


def _why_not_plain(value: Any, depth: int) -> str:
    if depth > MAX_DEPTH:
        return f"lists and mappings in more than {MAX_DEPTH} levels; write it flatter"
    if isinstance(value, str):
        if wrong := re.search(r"[\x00\ud800-\udfff]", value):
            return f"contains {ascii(wrong[0])[1:-1]}, which is no character of a text; remove it, and write UTF-8"
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"Input should be a finite number (got {value})"
    if isinstance(value, int):
        return "" if abs(value) <= MAX_INTEGER else f"a number above 2**53 (got {shown(value)}); for a text, quote it"
    return "" if value is None or isinstance(value, list | dict) else f"is {type(value).__name__}; give a text"
