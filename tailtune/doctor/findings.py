"""What the doctor finds, as lines and as JSON."""

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
    """`ok`, `unknown` (this account is not allowed to look), `warning` or `blocks`."""
    message: str
    fix: str = ""
    """The exact command, or what to do. Empty if nothing is to be done."""


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """Return the findings for a terminal: a line each, with the fix below it."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.status]} {finding.check:{width}}  {finding.message}")
        if finding.fix:
            lines.append(f"  {'':{width}}  → {finding.fix}")
    return lines


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]


def blocked(findings: Sequence[Finding]) -> bool:
    """Return whether a finding would stop the run."""
    return any(finding.status == BLOCKS for finding in findings)
