"""A training job, independent of the back end that runs it."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailtune.errors import UserError

PIPELINE_RUN_LABEL = "tailtune.io/pipeline-run"


@dataclass(frozen=True)
class PodSpec:
    """One node of a job on a cluster. Quantities are written as in Kubernetes (`20Gi`, `6`)."""

    image: str
    cpu: str
    memory: str
    cpu_request: str
    memory_request: str
    gpu: str
    """Name of the GPU resource; a pod requests one GPU per rank. Empty for training on the CPU."""
    volumes: tuple[tuple[str, str], ...]
    """(claim, mount path) pairs, the same in every pod."""
    kind: str = "auto"
    """`pytorchjob`, `trainjob`, or `auto` for the first one that the cluster has."""
    queue: str = ""
    """Kueue LocalQueue; empty for none."""
    tolerations: tuple[Mapping[str, str], ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """`python -m module args…` in `num_nodes` x `ranks_per_node` processes."""

    name: str
    module: str
    args: tuple[str, ...]
    num_nodes: int = 1
    ranks_per_node: int = 1
    max_restarts: int = 0
    """How often all ranks are restarted after one has died, before the job counts as failed."""
    shutdown_seconds: int = 300
    """Time between SIGTERM and SIGKILL; it has to be enough to save a checkpoint."""
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    """Run, recipe and stage, as valid Kubernetes label values."""
    start_seconds: int = 3600
    """How long it may take until all pods are running."""
    deadline_seconds: int = 24 * 3600
    """How long the whole job may take."""
    pod: PodSpec | None = None
    """None for a job on this machine."""
    log_dir: Path | None = None
    """Where each node of a job on a cluster keeps its log; None for nowhere."""
    progress_path: Path | None = None
    """File that rank 0 keeps up to date with the training's progress (progress.py); None if it writes none."""

    @property
    def pipeline_run(self) -> str:
        """The pipeline run that the job belongs to, as a label value."""
        return self.labels.get(PIPELINE_RUN_LABEL, "")

    def clear_progress(self) -> None:
        """Delete the progress of an earlier attempt, so that it is not taken for that of a new job."""
        if self.progress_path:
            self.progress_path.unlink(missing_ok=True)


class JobFailed(UserError):
    """A job did not succeed: the rank that failed first, its exit status, and what to do."""


class PermanentFailure(JobFailed):
    """A job failed in a way in which another attempt would fail too: its input, or too little memory."""


def parse_user_error(value: Any) -> UserError | None:
    """The error that a rank reported as `{"problem": …, "remedy": …}`; None for anything else."""
    if not isinstance(value, dict) or not value.get("problem"):
        return None
    return UserError(str(value["problem"]), str(value.get("remedy") or ""))


MAX_NAME_LENGTH = 40
"""Leaves room for what operators append: pods are called NAME-worker-12, with at most 63 characters."""


def job_name(run: str, stage: str) -> str:
    """A DNS label (RFC 1123) that depends only on run and stage, so that a retried step finds its job."""
    text = re.sub(r"[^a-z0-9]+", "-", f"{run}-{stage}".lower()).strip("-")
    digest = hashlib.sha256(f"{run}/{stage}".encode()).hexdigest()[:8]
    head = text[: MAX_NAME_LENGTH - len(digest) - 1].strip("-")
    head = head if head[:1].isalpha() else f"t{head}"[: MAX_NAME_LENGTH - len(digest) - 1].strip("-")
    return f"{head}-{digest}"


def label_value(text: str) -> str:
    """The text as a Kubernetes label value: letters, digits, '-', '_' and '.', at most 63 characters.

    Different texts have different values: a text that has to be changed gets a digest appended.
    """
    value = re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.")
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return value if value == text else f"{value[:54].strip('-_.')}-{digest}".strip("-")
