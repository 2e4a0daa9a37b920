"""torchrun as a child process, on a laptop and in every pod: forwards its ranks' lines and explains a failure."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tailtune.errors import UserError
from tailtune.files import read_json
from tailtune.jobs.job import parse_user_error
from tailtune.lifeline import LIFELINE, end
from tailtune.log import BAR_PREFIX, LINE_PREFIX, log
from tailtune.recipe.load import ENVIRONMENT
from tailtune.signals import on_stop

END_SECONDS = 30
"""How much longer than its ranks torchrun may take to end."""
NUM_LAST_LINES = 60
NUM_KEPT_LINES = 300  # torchrun's report of a failure has about 20 lines, and the traceback of the first rank
REPORT = re.compile(r"torch/distributed/elastic/.*(failed \(exitcode|Sending process \d+ closing signal)")
"""First line of torchrun's report of a failure."""

ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
"""What torchrun prints when a rank has used up its restarts: torch/distributed/elastic/multiprocessing/errors."""

STOP_REPORT = re.compile(r"Received \d+ death signal|^Traceback \(most recent call last\)")
"""First line of what torchrun prints about a signal."""


@dataclass(frozen=True)
class TorchrunResult:
    """How torchrun ended."""

    status: int
    user_error: UserError | None
    """The error that a rank reported in TAILTUNE_ERROR_FILE."""
    stopped: bool
    """Whether a signal requested the stop."""
    failure: str
    """The rank that failed first, its exit status, and its exception; empty if none failed."""
    restarts_used_up: bool
    """Whether a rank has failed more than `max_restarts` times. Otherwise torchrun itself has failed or was stopped."""
    last_lines: tuple[str, ...]
    """The ranks' last lines, without torchrun's own report."""


def run_torchrun(
    options: Sequence[str],
    module: str,
    args: Sequence[str],
    *,
    ranks_per_node: int,
    max_restarts: int,
    shutdown_seconds: int,
    environment: Mapping[str, str],
    show: Callable[[str], None],
) -> TorchrunResult:
    """Run `python -m module args…` in `ranks_per_node` processes on this machine.

    After a rank has died, all ranks are restarted, up to `max_restarts` times. A rank that rejects its input reports
    why in the file TAILTUNE_ERROR_FILE (`{"problem": …, "remedy": …}`) and exits; it is not restarted, because it would
    fail again. The first stop signal is forwarded as SIGTERM, so that the ranks save a checkpoint; they
    and torchrun get one too when this process ends without waiting for them.
    """
    last_lines: deque[str] = deque(maxlen=NUM_KEPT_LINES)
    user_error = None
    with tempfile.TemporaryDirectory() as folder:
        exception_path, user_error_path = Path(folder) / "exception.json", Path(folder) / "user_error.json"
        process = subprocess.Popen(
            [
                sys.executable, "-m", "tailtune.train.torchrun", str(shutdown_seconds),
                *options,
                f"--nproc-per-node={ranks_per_node}",
                f"--max-restarts={max_restarts}",
                f"--log-dir={folder}",  # otherwise it leaves a directory behind
                "--monitor-interval=0.5",
                "-m", module,
                *args,
            ],
            env={
                # the recipe has these settings; those of an image would train what the launcher's key does not say
                **{name: value for name, value in os.environ.items() if name not in ENVIRONMENT},
                **_num_threads(ranks_per_node),
                "TORCHELASTIC_ERROR_FILE": str(exception_path),
                # otherwise restarted ranks read stale keys: pytorch issue 135712
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "PYTHONSAFEPATH": "1",  # a random.py in the working directory is nobody's module
                **environment,
                "TAILTUNE_ERROR_FILE": str(user_error_path),
                LIFELINE: str(shutdown_seconds),
            },
            stdin=subprocess.PIPE,  # nothing is written: it ends with this process
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
        )  # fmt: skip
        assert process.stdout is not None

        def stop(received: list[int]) -> None:
            if len(received) == 1:  # Ctrl-C reaches the whole process group, and pipeline.py forwards it as well
                log.info("train: signal %s: waiting for a checkpoint", signal.Signals(received[0]).name)
                process.send_signal(signal.SIGTERM)

        try:
            with on_stop(stop) as received:
                in_own_report = False  # torchrun's traceback of a stop that was asked for
                for line in process.stdout:
                    is_stopping = bool(received) or user_error is not None
                    in_own_report = is_stopping and (in_own_report or bool(STOP_REPORT.search(line)))
                    if not in_own_report or line.startswith("[rank ") or LINE_PREFIX in line:
                        show(line)
                    if BAR_PREFIX not in line:
                        last_lines.append(line.rstrip())
                    if user_error is None and (user_error := parse_user_error(read_json(user_error_path))):
                        process.terminate()  # before torchrun restarts the ranks
                status = process.wait()
        finally:
            end(process, shutdown_seconds + END_SECONDS)
        user_error = user_error or parse_user_error(read_json(user_error_path))
        output = "\n".join(last_lines)
        own = own_lines(last_lines)[-NUM_LAST_LINES:]
        failure = first_failure(output, exception_path, status, next(filter(None, reversed(own)), "")) if status else ""
        restarts_used_up = bool(status and ROOT_CAUSE.search(output))
    return TorchrunResult(status, user_error, bool(received), failure, restarts_used_up, own)


def own_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """The ranks' lines, without the report that torchrun writes below them."""
    return tuple(takewhile(lambda line: not REPORT.search(line), lines))


def first_failure(output: str, exception_path: Path, status: int, last_line: str = "") -> str:
    """The rank that failed first, its exit status, and its exception if it recorded one, else the ranks' last line.

    `output` ends with torchrun's own report; `exception_path` is the file in which torchrun records an exception.
    """
    last = f": {last_line.strip()[:300]}" if last_line else ""
    root_cause = ROOT_CAUSE.search(output)
    if root_cause is None:
        return f"torchrun ended with status {status}{last}"
    code = int(root_cause.group(2))
    signal_name = f" ({signal.Signals(-code).name})" if code < 0 else ""
    record = read_json(exception_path)
    message = record.get("message") if isinstance(record, dict) else None
    text = message.get("message", "") if isinstance(message, dict) else message or ""
    reason = f": {' '.join(text.split())[:500]}" if text else last
    return f"rank {root_cause.group(1)} failed first, exit status {code}{signal_name}{reason}"


def _num_threads(ranks_per_node: int) -> dict[str, str]:
    """Divide the cores among the ranks; torchrun's own default is one thread per rank."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores // ranks_per_node)))}
