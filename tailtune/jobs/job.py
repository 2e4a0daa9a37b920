"""What a training job is, whichever back end runs it."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tailtune.errors import UserError


@dataclass(frozen=True)
class PodSpec:
    """What one node of the job is, on a cluster. Quantities are Kubernetes' own (`20Gi`, `6`)."""

    image: str
    cpu: str
    memory: str
    cpu_request: str
    memory_request: str
    gpu: str
    """Name of the GPU resource, of which a pod asks one per rank; empty for training on the CPU."""
    volumes: tuple[tuple[str, str], ...]
    """(claim, the directory where every pod sees it)."""
    kind: str = "auto"
    """`pytorchjob`, `trainjob`, or what the cluster has."""
    queue: str = ""
    """Kueue's LocalQueue."""
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
    """Restarts of all ranks after one has died, before the job counts as failed."""
    shutdown_seconds: int = 300
    """Time between SIGTERM and SIGKILL: long enough for a checkpoint."""
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    """Run, recipe and stage; valid as values of Kubernetes labels."""
    start_seconds: int = 3600
    """How long all pods may take until they run."""
    deadline_seconds: int = 24 * 3600
    """How long the whole job may take."""
    pod: PodSpec | None = None
    """None for jobs of this machine."""


class JobFailed(UserError):
    """A job that did not succeed: the first failing rank, its exit status, and what to look at."""


class BadInput(JobFailed):
    """A job that would fail in the same way again: the line that a rank wrote for the user."""


NAME_LENGTH = 40
"""Leaves room for what operators add: pods are called NAME-worker-12, at most 63 characters."""


def job_name(run: str, stage: str) -> str:
    """The same DNS label (RFC 1123) for the same run and stage, so that a retried step finds its job."""
    text = re.sub(r"[^a-z0-9]+", "-", f"{run}-{stage}".lower()).strip("-")
    digest = hashlib.sha256(f"{run}/{stage}".encode()).hexdigest()[:8]
    head = text[: NAME_LENGTH - len(digest) - 1].strip("-")
    head = head if head[:1].isalpha() else f"t{head}"[: NAME_LENGTH - len(digest) - 1].strip("-")
    return f"{head}-{digest}"


def label_value(text: str) -> str:
    """The text as a value of a Kubernetes label: letters, digits, '-', '_', '.', at most 63.

    Another text has another value: one that had to be changed carries a digest.
    """
    value = re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.")
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return value if value == text else f"{value[:54].strip('-_.')}-{digest}".strip("-")
