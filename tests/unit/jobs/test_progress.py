"""What a training's lines say, as the dashboard reads it."""

import json

import pytest
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from tailtune.jobs import progress
from tailtune.jobs.progress import Progress, Reporter

STEP = "[rank 0] tailtune | train: step 450/1000 loss 0.2340 lr 5.00e-05 grad_norm 1.250 4321 tokens/s ETA 3665 s"


def status(*lines: str, succeeded: bool | None = None) -> dict[str, object]:
    read = Progress()
    for line in lines:
        read.read(line)
    text = read.annotation(succeeded)
    return dict(json.loads(text)) if text else {}


def test_a_line_of_a_step_and_one_of_an_evaluation() -> None:
    found = status(STEP, "[rank 0] tailtune | train: step 450/1000 eval_loss 0.4200")
    assert found.pop("lastUpdatedTime")
    assert found == {
        "progressPercentage": 45, "estimatedRemainingSeconds": 3665, "estimatedRemainingTimeSummary": "1 hour 1 minute",
        "currentStep": 450, "totalSteps": 1000, "evalMetrics": {"eval_loss": 0.42},
        "trainMetrics": {"loss": 0.234, "learning_rate": 5e-5, "grad_norm": 1.25, "tokens_per_second": 4321.0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("step 450/1000 loss 0.2", {}),
        ("the answer says: train: step 1/2 loss 3", {}),
        ("[rank 0] tailtune | train: step 3/0 loss nan lr inf", {"currentStep": 3, "progressPercentage": 0}),
        ("[rank 0] tailtune | train: step 9/4 ETA -5 s", {"progressPercentage": 100, "estimatedRemainingSeconds": 0}),
        ("[rank 0] tailtune | train: step 1/4 loss - tokens/s ETA s", {"currentStep": 1}),
        ("[rank 1] x [rank 0] tailtune | train: step 1/4[rank 1] tailtune | train: loss 7 is odd", {"currentStep": 1}),
        ("[rank 0] tailtune | train: stepping 1/4", {}),
    ],
)
def test_lines_that_say_little_or_nothing(line: str, expected: dict[str, object]) -> None:
    found = status(line)
    assert "NaN" not in json.dumps(found) and "trainMetrics" not in found
    assert {key: found[key] for key in expected} == expected and bool(found) == bool(expected)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (5, "less than a minute"),
        (60, "1 minute"),
        (7200, "2 hours"),
        (90000, "1 day 1 hour"),
        (176520, "2 days 1 hour"),
    ],
)
def test_the_remaining_time_in_words(seconds: int, words: str) -> None:
    line = f"tailtune | train: step 1/9 ETA {seconds} s"
    assert status(line)["estimatedRemainingTimeSummary"] == words


def test_how_it_ended() -> None:
    assert status(succeeded=False) == {}
    done = status(STEP, succeeded=True)
    assert (done["progressPercentage"], done["estimatedRemainingTimeSummary"]) == (100, "complete")
    failed = status(STEP, succeeded=False)
    assert failed["estimatedRemainingTimeSummary"] == "failed at 45%" and "estimatedRemainingSeconds" not in failed


def test_it_is_told_now_and_then_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    reporter = Reporter(told.append)
    reporter.tell()
    assert not told, "nothing is known yet"
    for _ in range(3):
        reporter.read(STEP)
        reporter.tell()
    assert len(told) == 1
    reporter.tell(succeeded=True)
    assert len(told) == 2
    monkeypatch.setattr(progress, "TELL_SECONDS", 0)
    reporter.tell()
    assert len(told) == 3


@pytest.mark.parametrize(
    ("error", "calls", "lines"),
    [(ApiException(status=403, reason="Forbidden"), 1, 1), (ApiException(status=503), 3, 0), (HTTPError("x"), 3, 0)],
    ids=["forbidden", "in trouble", "unreachable"],
)
def test_nothing_depends_on_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, calls: int, lines: int
) -> None:
    monkeypatch.setattr(progress, "TELL_SECONDS", 0)
    asked = []

    def write(text: str) -> None:
        asked.append(text)
        raise error

    reporter = Reporter(write)
    reporter.read(STEP)
    for _ in range(3):
        reporter.tell()
    assert len(asked) == calls and caplog.text.count("the dashboard shows no progress") == lines
