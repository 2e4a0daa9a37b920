"""The local back end: torchrun on this machine, its ranks' lines passed on, its failure explained."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tailtune.jobs.job import Job, JobFailed
from tailtune.log import MARK, log
from tailtune.manifest import read_json

NUM_LAST_LINES = 60  # torchrun's account of a failure is about 20 lines
USER_ERROR = f"{MARK}train: error: "


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


def command(job: Job) -> list[str]:
    """The torchrun command line of a job."""
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--standalone",
        "--nnodes=1",
        f"--nproc-per-node={job.ranks_per_node}",
        f"--max-restarts={job.max_restarts}",
        f"--shutdown-timeout={job.shutdown_seconds}",
        "--monitor-interval=0.5",
        "-m", job.module,
        *job.args,
    ]  # fmt: skip


def run_job(job: Job) -> None:
    """Run a job to its end. Raises JobFailed; a SIGTERM or SIGINT is passed to torchrun first.

    Ranks that die are restarted, all together, up to `max_restarts` times; they resume from their
    last complete checkpoint. Bad input is not tried again.
    """
    if job.num_nodes != 1:
        raise JobFailed(f"resources.num_nodes is {job.num_nodes}, but this machine is one node; set -p num_nodes=1")
    last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
    user_error = None
    with tempfile.TemporaryDirectory() as folder:
        error_file = Path(folder) / "error.json"
        process = subprocess.Popen(
            command(job),
            env={
                **os.environ,
                **_threads(job),
                "TORCHELASTIC_ERROR_FILE": str(error_file),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else restarts meet stale keys: pytorch issue 135712
                **job.environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
        )
        assert process.stdout is not None
        with _forward_signals(process) as stopped:
            for line in process.stdout:
                print(line, end="", file=sys.stderr, flush=True)
                last_lines.append(line.rstrip())
                if line.startswith(USER_ERROR) and user_error is None:
                    # two ranks that say it at once may share a line
                    user_error = line.removeprefix(USER_ERROR).partition(MARK)[0].strip()
                    process.terminate()  # a restart would meet the same bad input
            status = process.wait()
        if user_error:
            raise JobFailed(user_error)
        if stopped:
            raise JobFailed(f"job '{job.name}' was stopped by a signal; run again to resume from its checkpoint")
        if status != 0:
            output = "\n".join(f"    {line}" for line in last_lines)
            reason = first_failure(output, error_file, status)
            raise JobFailed(f"job '{job.name}' failed: {reason}; its last lines:\n{output}")


def first_failure(output: str, error_file: Path, status: int) -> str:
    """The rank that failed first, its exit status, and its exception where it recorded one.

    `output` ends with torchrun's own account, `error_file` is what a rank's exception left.
    """
    root = re.search(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", output, re.DOTALL)
    if root is None:
        return f"torchrun ended with status {status}"
    code = int(root.group(2))
    name = f" ({signal.Signals(-code).name})" if code < 0 else ""
    recorded = read_json(error_file)
    message = recorded.get("message") if isinstance(recorded, dict) else None
    text = message.get("message", "") if isinstance(message, dict) else message or ""
    reason = f": {' '.join(text.split())[:500]}" if text else ""
    return f"rank {root.group(1)} failed first, exit status {code}{name}{reason}"


def _threads(job: Job) -> dict[str, str]:
    """Share the cores between the ranks; torchrun's own default is one thread each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // job.ranks_per_node)))}


@contextmanager
def _forward_signals(process: "subprocess.Popen[str]") -> Iterator[list[int]]:
    """Pass SIGTERM and SIGINT on to torchrun; yields the list of those received."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:  # Ctrl-C reaches the whole process group, and pipeline.py passes it on too
            return
        log.info("train: signal %s: waiting for a checkpoint", signal.Signals(number).name)
        process.send_signal(signal.SIGTERM)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
