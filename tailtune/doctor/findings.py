"""What the doctor has found, and how it is told."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, UNKNOWN, WARNING, BLOCKS = "ok", "unknown", "warning", "blocks"
MARKS = {OK: "✓", UNKNOWN: "?", WARNING: "!", BLOCKS: "✗"}
GIGABYTE = 10**9


@dataclass(frozen=True)
class Finding:
    check: str
    status: str
    """`ok`, `unknown` (this account may not look), `warning` or `blocks`."""
    message: str
    fix: str = ""
    """The exact command, or what to do."""


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """For a terminal: a line each, the fix below it."""
    width = max(len(one.check) for one in findings)
    lines = []
    for one in findings:
        lines.append(f"{MARKS[one.status]} {one.check:{width}}  {one.message}")
        if one.fix:
            lines.append(f"  {'':{width}}  → {one.fix}")
    return lines


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [asdict(one) for one in findings]


def blocked(findings: Sequence[Finding]) -> bool:
    return any(one.status == BLOCKS for one in findings)
