"""The local back end: torchrun on this machine."""

import os
import sys

from tailtune.jobs.job import Job, JobFailed
from tailtune.jobs.torchrun import run_torchrun


def count_gpus() -> int:
    """NVIDIA GPUs of this machine; asks the driver, because importing torch takes seconds."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0  # no driver, no GPU


def share_cores() -> None:
    """Make waiting OpenMP threads sleep. Call it before torch is imported.

    By default they spin. Alone on the machine that is a little faster, but beside another program a
    step of a small model takes up to 2.6 times as long (BENCHMARKS.md, "Busy cores").
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run_job(job: Job) -> None:
    """Run a job to its end. Raises JobFailed; a SIGTERM or SIGINT is passed to torchrun first.

    Ranks that were restarted resume from their last complete checkpoint.
    """
    if job.num_nodes != 1:
        raise JobFailed(f"resources.num_nodes is {job.num_nodes}, but this machine is one node; set -p num_nodes=1")
    ended = run_torchrun(
        ["--standalone", "--nnodes=1"],
        job.module,
        job.args,
        ranks_per_node=job.ranks_per_node,
        max_restarts=job.max_restarts,
        shutdown_seconds=job.shutdown_seconds,
        environment=job.environment,
        show=lambda line: print(line, end="", file=sys.stderr, flush=True),
    )
    if ended.user_error:
        raise JobFailed(ended.user_error)
    if ended.stopped:
        raise JobFailed(f"job '{job.name}' was stopped by a signal; run again to resume from its checkpoint")
    if ended.status:
        output = "\n".join(f"    {line}" for line in ended.last_lines)
        raise JobFailed(f"job '{job.name}' failed: {ended.failure}; its last lines:\n{output}")
