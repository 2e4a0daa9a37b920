"""Write a recipe file for other data: a built-in recipe with sections of its own, for `pipeline.py --inspect`."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tailtune.errors import UserError
from tailtune.files import write_text
from tailtune.recipe.load import BUILT_IN, list_recipes, load_recipe

TIED_TO_DATA = re.compile(r"  (data|prompt|demo|expect)\b")
"""Entries of a built-in recipe's `local:` that are about its own data."""
TIED_TO_PROMPT = "answer_words"
"""Metrics whose rules follow from what the built-in recipe's prompt asks for."""


def quoted(text: str) -> str:
    """Return a text as YAML in double quotes: as in JSON, and without the characters that YAML refuses."""
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in escaped)


def check_new_file(path: Path) -> None:
    """Raise UserError unless a recipe can be written to the path."""
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--write-recipe {path} is not the name of a recipe file", "give a path that ends in .yaml")
    try:
        path.lstat()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UserError(f"--write-recipe {path}: there is no directory {path.parent}", "create it") from None
    except OSError as error:
        raise _unwritable(path, error) from None
    else:
        raise UserError(f"--write-recipe {path} already exists", "choose another name, or remove it")


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"--write-recipe {path} cannot be written: {error.strerror}", "choose another name or folder")


def write_recipe(
    path: Path, base: str, sections: Mapping[str, Sequence[str]], *, description: str, questions: Sequence[str]
) -> str:
    """Write the built-in recipe `base` with other sections to a new file, and return the new recipe's name.

    `sections` are lines of YAML by top-level key. Comments of all other sections stay. What was made for the built-in
    recipe's own data or prompt is left out: its expectations, its rule on the answers' length, its sample rows.
    """
    check_new_file(path)
    name = _recipe_name(path.stem)
    recipe = load_recipe(base)
    dropped = [index for index, rule in enumerate(recipe.gate) if rule.metric.startswith(TIED_TO_PROMPT)]
    assert dropped in ([], [len(recipe.gate) - 1]), "local: names rules of the gate by their index"
    found = _sections((BUILT_IN / f"{base}.yaml").read_text(encoding="utf-8"))
    found |= {key: ["", *lines] for key, lines in sections.items()}
    found |= {
        "name": [f"# Made from the built-in recipe {base} for other data.", f"name: {name}"],
        "description": [f"description: {quoted(description)}"],
        "demo": ["", "demo:", "  questions:", *(f"    - {quoted(question)}" for question in questions)],
        "gate": _without(found["gate"], lambda line: TIED_TO_PROMPT in line),
        "local": _without(
            found["local"],
            lambda line: (
                bool(TIED_TO_DATA.match(line)) or any(line.startswith(f"  gate.{index}.") for index in dropped)
            ),
        ),
    }
    found.pop("expect", None)
    try:
        write_text(path, "".join(f"{line}\n" for lines in found.values() for line in lines))
    except OSError as error:
        raise _unwritable(path, error) from None
    return name


def _recipe_name(stem: str) -> str:
    """Return a file's name as that of a recipe, which a built-in one does not have."""
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return name if name[:1].isalpha() and name not in list_recipes() else f"my-{name}".rstrip("-")


def _sections(text: str) -> dict[str, list[str]]:
    """Return the lines of each top-level key, with the comments and blank lines before it."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    before: list[str] = []
    for line in text.splitlines():
        if key := re.match(r"(\w+):", line):
            current = sections[key[1]] = [*before, line]
        elif line.startswith(" "):
            current += [*before, line]
        else:
            before.append(line)
            continue
        before = []
    return sections


def _without(lines: Sequence[str], unwanted: Callable[[str], bool]) -> list[str]:
    """Return a section's lines without those of some entries and the comments before these."""
    kept: list[str] = []
    before: list[str] = []
    drop = False
    for line in lines:
        if line.startswith("  #"):
            before.append(line)
            continue
        if re.match(r"  \S", line):
            drop = unwanted(line)
        kept += [] if drop else [*before, line]
        before = []
    return kept
