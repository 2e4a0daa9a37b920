"""What a training job is, whichever back end runs it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tailtune.errors import UserError


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


class JobFailed(UserError):
    """A job that did not succeed: the first failing rank, its exit status, and what to look at."""
