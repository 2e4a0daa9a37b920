"""The local back end: torchrun on this machine."""

import os
import sys

from tailtune.jobs.job import Job, JobFailed
from tailtune.jobs.torchrun import run_torchrun


def count_gpus() -> int:
    """Number of NVIDIA GPUs in this machine. Asks the driver, because importing torch takes seconds."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0  # no driver, no GPU


def share_cores() -> None:
    """Let OpenMP threads sleep while they wait. Call this before torch is imported.

    By default they spin. That is a little faster when nothing else runs on the machine, but next to another program a
    step of a small model takes up to 2.6 times as long (BENCHMARKS.md, "Busy cores").
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run_job(job: Job) -> None:
    """Run a job until it has ended. Raises JobFailed. SIGTERM and SIGINT are forwarded to torchrun.

    Restarted ranks resume from their last complete checkpoint.
    """
    assert job.num_nodes == 1, "the resolve step checks it"
    job.clear_progress()
    result = run_torchrun(
        ["--standalone", "--nnodes=1"],
        job.module,
        job.args,
        ranks_per_node=job.ranks_per_node,
        max_restarts=job.max_restarts,
        shutdown_seconds=job.shutdown_seconds,
        environment=job.environment,
        show=lambda line: print(line, end="", file=sys.stderr, flush=True),
    )
    if result.user_error:
        raise JobFailed(result.user_error.problem, result.user_error.remedy)
    if result.stopped:
        raise JobFailed(f"job '{job.name}' was stopped by a signal", "run again to resume from its checkpoint")
    if result.status:
        raise JobFailed(
            f"job '{job.name}' failed: {result.failure}",
            "its last lines are in the log",
            details=["its last lines:", *result.last_lines],
        )
