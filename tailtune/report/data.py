"""What the report is made from."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReportData:
    """What the steps of a run wrote. Any dictionary may be empty, any value None, NaN or missing."""

    run_name: str
    recipe: dict[str, Any]
    data: dict[str, Any]
    """Facts of fetch, parquet and split."""
    summary: dict[str, Any]
    """`training_summary.json`."""
    history: dict[str, Any]
    """`train` and `eval`: one entry per logged step."""
    evaluation: dict[str, Any]
    verdict: dict[str, Any]
    demo: dict[str, Any]
