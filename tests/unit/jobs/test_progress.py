"""The dashboard's status, made from a training's progress.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from tailtune.jobs import progress
from tailtune.jobs.progress import ProgressReporter, trainer_status

PROGRESS: dict[str, Any] = {
    "step": 450, "max_steps": 1000, "remaining_seconds": 3665.4, "updated_at": "2026-01-01T00:00:00Z",
    "train": {"loss": 0.234, "learning_rate": 5e-5, "grad_norm": 1.25, "tokens_per_second": 4321.0},
    "eval": {"eval_loss": 0.42},
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A job's progress.json."""
    (tmp_path / "progress.json").write_text(json.dumps(PROGRESS))
    return tmp_path / "progress.json"


def test_the_status_of_a_running_job() -> None:
    assert trainer_status(PROGRESS) == {
        "progressPercentage": 45, "estimatedRemainingSeconds": 3665, "estimatedRemainingTimeSummary": "1 hour 1 minute",
        "currentStep": 450, "totalSteps": 1000, "evalMetrics": {"eval_loss": 0.42}, "trainMetrics": PROGRESS["train"],
        "lastUpdatedTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, {}),
        ([], {}),
        ({"train": {"loss": 1.0}}, {}),
        ({"step": 3, "max_steps": 0, "train": {"loss": None}, "remaining_seconds": None},
         {"currentStep": 3, "totalSteps": 0, "progressPercentage": 0}),
        ({"step": 3, "max_steps": 4, "train": {"loss": float("nan"), "grad_norm": float("inf")}, "eval": {}},
         {"currentStep": 3, "totalSteps": 4, "progressPercentage": 75}),
        ({"step": 9, "max_steps": 4, "remaining_seconds": -5},
         {"currentStep": 9, "totalSteps": 4, "progressPercentage": 100, "estimatedRemainingSeconds": 0,
          "estimatedRemainingTimeSummary": "less than a minute"}),
    ],
)  # fmt: skip
def test_what_is_missing_or_not_finite_is_left_out(content: Any, expected: dict[str, Any]) -> None:
    assert trainer_status(content) == expected


@pytest.mark.parametrize(
    ("seconds", "summary"),
    [
        (5, "less than a minute"),
        (60, "1 minute"),
        (7200, "2 hours"),
        (90000, "1 day 1 hour"),
        (176520, "2 days 1 hour"),
    ],
)
def test_the_remaining_time_in_words(seconds: int, summary: str) -> None:
    assert trainer_status({**PROGRESS, "remaining_seconds": seconds})["estimatedRemainingTimeSummary"] == summary


def test_the_status_of_a_job_that_has_ended() -> None:
    assert trainer_status(None, succeeded=False) == {}
    complete = trainer_status(PROGRESS, succeeded=True)
    assert (complete["progressPercentage"], complete["estimatedRemainingTimeSummary"]) == (100, "complete")
    failed = trainer_status(PROGRESS, succeeded=False)
    assert failed["estimatedRemainingTimeSummary"] == "failed at 45%" and "estimatedRemainingSeconds" not in failed


def test_it_is_reported_now_and_then_and_at_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[str] = []
    reporter = ProgressReporter(path, reports.append)
    content = path.read_text()
    path.unlink()
    reporter.report()
    assert not reports, "nothing is known yet"
    path.write_text(content)
    for _ in range(3):
        reporter.report()
    assert len(reports) == 1
    reporter.report(succeeded=True)
    assert len(reports) == 2
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0)
    reporter.report()
    assert len(reports) == 3


def test_a_kind_without_the_annotation_reports_nothing(path: Path) -> None:
    reports: list[str] = []
    ProgressReporter(None, reports.append).report(succeeded=True)
    assert not reports


@pytest.mark.parametrize(
    ("error", "num_calls", "num_warnings"),
    [(ApiException(status=403, reason="Forbidden"), 1, 1), (ApiException(status=503), 3, 0), (HTTPError("x"), 3, 0)],
    ids=["forbidden", "API fails", "unreachable"],
)
def test_a_report_that_fails_raises_nothing(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    num_calls: int,
    num_warnings: int,
) -> None:
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0)
    calls = []

    def write(status: str) -> None:
        calls.append(status)
        raise error

    reporter = ProgressReporter(path, write)
    for _ in range(3):
        reporter.report()
    assert len(calls) == num_calls and caplog.text.count("the dashboard shows no progress") == num_warnings


def test_a_volume_that_cannot_be_read_raises_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_json(path: Path) -> Any:
        raise OSError("Stale file handle")

    monkeypatch.setattr(progress, "read_json", read_json)
    ProgressReporter(path, pytest.fail).report(succeeded=True)
