"""How far a training is, read from its ranks' lines and left where OpenShift AI's dashboard looks for it.

The dashboard reads one annotation of a TrainJob: `getTrainerStatus` in opendatahub-io/odh-dashboard,
packages/model-training/src/global/trainingJobList/utils.ts. What is in it, its controller defines: `AnnotationStatus`
in opendatahub-io/trainer, pkg/rhai/progression/progression.go. That controller writes only for jobs that ask for it
(`trainer.opendatahub.io/progression-tracking: "true"`) and serve their progress on a port; ours do not, so that
nobody else writes it.
"""

import json
import math
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError

from tailtune.jobs.kubernetes import in_words
from tailtune.log import LINE_PREFIX, log

TELL_SECONDS = 15
"""How often the annotation may change: every change is one more version of the job in the cluster's store."""
LINE = re.compile(rf"{re.escape(LINE_PREFIX)}train: step (\d+)/(\d+)((?:(?!{re.escape(LINE_PREFIX)}).)*)")
"""A progress line of train/callbacks.py; two ranks that write at once may share a line."""
TRAIN = {
    "loss": r"\bloss (\S+)",
    "learning_rate": r"\blr (\S+)",
    "grad_norm": r"\bgrad_norm (\S+)",
    "tokens_per_second": r"(\S+) tokens/s",
}
EVALUATION = {"eval_loss": r"\beval_loss (\S+)"}
REMAINING = r"\bETA (\S+) s\b"


class Progress:
    """What the lines have said so far."""

    def __init__(self) -> None:
        self._status: dict[str, Any] = {}

    def read(self, line: str) -> None:
        """Take what a line says; other lines say nothing."""
        found = LINE.search(line)
        if found is None:
            return
        step, total, rest = int(found[1]), int(found[2]), found[3]
        status = {**self._status, "currentStep": step, "totalSteps": total}
        status["progressPercentage"] = min(100, 100 * step // total) if total else 0
        for name, patterns in (("trainMetrics", TRAIN), ("evalMetrics", EVALUATION)):
            values = {key: value for key, pattern in patterns.items() if (value := _number(pattern, rest)) is not None}
            if values:
                status[name] = {**status.get(name, {}), **values}
        if (seconds := _number(REMAINING, rest)) is not None:
            status["estimatedRemainingSeconds"] = max(0, round(seconds))
            status["estimatedRemainingTimeSummary"] = _duration(seconds)
        self._status = status  # at once: another thread may be looking

    def annotation(self, succeeded: bool | None = None) -> str | None:
        """JSON for the dashboard, of a job that goes on or has ended; None while nothing is known."""
        status = dict(self._status)
        if succeeded:
            status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0,
                       "estimatedRemainingTimeSummary": "complete"}  # fmt: skip
        if not status:
            return None
        if succeeded is False:
            status.pop("estimatedRemainingSeconds", None)
            status["estimatedRemainingTimeSummary"] = f"failed at {status['progressPercentage']}%"
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return json.dumps({**status, "lastUpdatedTime": now})


class Reporter:
    """Passes the progress on now and then. It never fails: the job is worth more than its progress bar."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._progress = write, Progress()
        self.read = self._progress.read
        self._told_at = -math.inf
        self._refused = False

    def tell(self, succeeded: bool | None = None) -> None:
        """Write the annotation, when it is time to, or the job has ended."""
        if self._refused or (succeeded is None and time.monotonic() - self._told_at < TELL_SECONDS):
            return
        text = self._progress.annotation(succeeded)
        if text is None:
            return
        self._told_at = time.monotonic()
        try:
            self._write(text)
        except client.ApiException as error:
            self._refused = error.status in (400, 403, 415, 422)
            if self._refused:
                log.warning("train: the dashboard shows no progress: %s; it is in this log", in_words(error))
        except (HTTPError, OSError):
            pass  # the launcher's own calls say what is wrong with the API


def _number(pattern: str, text: str) -> float | None:
    """JSON knows neither nan nor inf."""
    try:
        found = re.search(pattern, text)
        value = float(found[1]) if found else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _duration(seconds: float) -> str:
    """The two largest units."""
    minutes = int(seconds) // 60
    units = (("day", minutes // 1440), ("hour", minutes // 60 % 24), ("minute", minutes % 60))
    words = [f"{count} {unit}{'s' * (count != 1)}" for unit, count in units if count]
    return " ".join(words[:2]) or "less than a minute"
