"""The texts that the code prints, read from its source: does it print a message that the documentation quotes?"""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _parts(node: ast.AST) -> list[str]:
    """The literal parts of an expression, cut at its fields: those of an f-string or of a log line's format."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values).split("\0")
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [part.replace("%%", "%") for part in re.split(r"(?<!%)%[-.,\d]*[sdrfeg]", node.value)]
    return ["", ""]  # a field, whatever is in it


@cache
def texts() -> tuple[tuple[str, ...], ...]:
    """Every text that the code may print, as its literal parts. `Error(problem, remedy)` is one text, with "; "."""
    found = {((ROOT / "Makefile").read_text(),)}
    for path in [*ROOT.glob("pipeline*.py"), *(ROOT / "tailtune").rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in skipped:
                found.add(tuple(_parts(node)))
            elif isinstance(node, ast.Call) and len(node.args) == 2:
                problem, remedy = map(_parts, node.args)
                found.add((*problem[:-1], f"{problem[-1]}; {remedy[0]}", *remedy[1:]))
    return tuple(text for text in found if sum(map(len, text)) > 3)


@cache
def literals() -> str:
    return "\n".join(part for text in texts() for part in text)


@cache
def whole_texts() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(r"\S*(?: GB)?".join(map(re.escape, text))) for text in texts())


def is_printed(message: str) -> bool:
    """Whether the code prints this message, or a longer one of which it is a part.

    Its words have to be those of one text, whose fields hold one word or a whole second text. Parts before and after
    `…` and parentheses are looked up separately.
    """
    pieces = [piece.strip(" .,:;") for piece in re.split(r"…|[()]", message)]
    return _is_part_of_a_text(message) or all(map(_is_part_of_a_text, pieces))


@cache
def _is_part_of_a_text(message: str) -> bool:
    return len(message) < 3 or message in literals() or any(_is_part_of(text, message) for text in texts())


def _is_part_of(text: tuple[str, ...], message: str) -> bool:
    for i, (literal, following) in enumerate(pairwise(text)):
        if message[:4] in literal:  # it begins within this literal part
            begin = next((n for n in range(len(message), 3, -1) if literal.endswith(message[:n])), 0)
            if begin and _continues(message[begin:], text[i + 1 :]):
                return True
        elif following and following in message and _continues(message, text[i + 1 :]):  # it begins within the field
            return True
    return False


def _continues(message: str, parts: tuple[str, ...]) -> bool:
    """Whether the message is the content of a field, followed by these literal parts, and may end anywhere."""
    for i in range(len(message) + 1) if parts else ():
        content, rest, literal = message[:i], message[i:], parts[0]
        ends, continues = literal.startswith(rest), literal and rest.startswith(literal)
        if (ends or continues) and _is_value(content) and (ends or _continues(rest[len(literal) :], parts[1:])):
            return True
    return not message


@cache
def _is_value(content: str) -> bool:
    """Whether a field may hold this: one word, or a whole text."""
    forms = {content, content.strip()}
    return " " not in content.strip() or any(text.fullmatch(form) for text in whole_texts() for form in forms)
