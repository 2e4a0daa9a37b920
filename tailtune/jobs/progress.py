"""Show training progress in OpenShift AI's dashboard.

Rank 0 keeps the job's `progress.json` up to date. The launcher copies it into the one annotation of a TrainJob that the
dashboard reads: `getTrainerStatus` in opendatahub-io/odh-dashboard,
packages/model-training/src/global/trainingJobList/utils.ts. Its fields are those of `AnnotationStatus` in
opendatahub-io/trainer, pkg/rhai/progression/progression.go. The controller there writes the same annotation, but only
for jobs that request it (`trainer.opendatahub.io/progression-tracking: "true"`). Ours do not.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError

from tailtune.files import read_json
from tailtune.jobs.kubernetes import in_words
from tailtune.log import log

REPORT_SECONDS = 15
"""Shortest time between two changes of the annotation: each is a new version of the job in the cluster's store."""


class ProgressReporter:
    """Writes a job's progress into its annotation. Never raises: the training does not depend on it."""

    def __init__(self, path: Path | None, write: Callable[[str], None]) -> None:
        self._path, self._write = path, write
        self._reported_at = -math.inf

    def report(self, succeeded: bool | None = None) -> None:
        """Write the annotation if it is due, or if the job has ended (`succeeded` is not None)."""
        is_due = succeeded is not None or time.monotonic() - self._reported_at >= REPORT_SECONDS
        if self._path is None or not is_due:
            return
        try:
            if status := trainer_status(read_json(self._path), succeeded):
                self._reported_at = time.monotonic()
                self._write(json.dumps(status))
        except client.ApiException as error:
            if error.status in (400, 403, 415, 422):
                log.warning("train: the dashboard shows no progress (%s); follow it in this log", in_words(error))
                self._path = None
        except (HTTPError, OSError):
            pass  # the volume or the API is failing; the launcher's other calls report it


def trainer_status(progress: Any, succeeded: bool | None = None) -> dict[str, Any]:
    """The dashboard's status from the content of `progress.json`; empty if that says nothing.

    `succeeded` is None for a running job. Numbers that are missing or not finite are left out.
    """
    if not isinstance(progress, dict) or not {"step", "max_steps"} <= progress.keys():
        return {}
    step, max_steps = progress["step"], progress["max_steps"]
    percentage = 100 if succeeded else min(100, 100 * step // max_steps) if max_steps else 0
    status = {"currentStep": step, "totalSteps": max_steps, "progressPercentage": percentage,
              "lastUpdatedTime": progress.get("updated_at"), "trainMetrics": _finite(progress.get("train")),
              "evalMetrics": _finite(progress.get("eval"))}  # fmt: skip
    remaining_seconds = 0 if succeeded else _finite(progress).get("remaining_seconds")
    if succeeded is False:
        status["estimatedRemainingTimeSummary"] = f"failed at {percentage}%"
    elif remaining_seconds is not None:
        status["estimatedRemainingSeconds"] = seconds = max(0, round(remaining_seconds))
        status["estimatedRemainingTimeSummary"] = "complete" if succeeded else _duration(seconds)
    return {name: value for name, value in status.items() if value not in (None, {})}


def _finite(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _duration(seconds: int) -> str:
    """The duration in its two largest units, for example `1 day 3 hours`."""
    minutes = seconds // 60
    units = (("day", minutes // 1440), ("hour", minutes // 60 % 24), ("minute", minutes % 60))
    parts = [f"{count} {unit}{'s' * (count != 1)}" for unit, count in units if count]
    return " ".join(parts[:2]) or "less than a minute"
