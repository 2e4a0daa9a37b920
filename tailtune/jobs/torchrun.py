"""torchrun as a child process: its ranks' lines passed on, its failure explained. On a laptop and in every pod."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import takewhile
from pathlib import Path

from packaging.version import Version

from tailtune.files import read_json
from tailtune.log import LINE_PREFIX, log
from tailtune.signals import on_stop

NUM_LAST_LINES = 60  # torchrun's account of a failure is about 20 lines
USER_ERROR = re.compile(rf"^(?:\[rank \d+\] )?{re.escape(LINE_PREFIX)}train: error: (.*)")
SHARED_LINE = re.compile(rf"(?:\[rank \d+\] )?{re.escape(LINE_PREFIX)}")
"""Two ranks that write at once may share a line."""
ACCOUNT = re.compile(r"torch/distributed/elastic/.*(failed \(exitcode|Sending process \d+ closing signal)")
"""Where torchrun begins to tell of a failure."""


@dataclass(frozen=True)
class TorchrunResult:
    """How torchrun ended."""

    status: int
    user_error: str | None
    """The line that a rank wrote for the user, without its mark."""
    stopped: bool
    """Whether a signal asked for it."""
    failure: str
    """The rank that failed first, its exit status, and its exception; empty when none did."""
    last_lines: tuple[str, ...]


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
    """Run `python -m module args…` in some ranks of this machine; a SIGTERM or SIGINT is passed on first.

    Ranks that die are restarted, all together, up to `max_restarts` times. Bad input is not tried again.
    """
    last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
    user_error = None
    with tempfile.TemporaryDirectory() as folder:
        error_file = Path(folder) / "error.json"
        process = subprocess.Popen(
            [
                sys.executable, "-m", *torchrun_module(metadata.version("torch"), shutdown_seconds),
                *options,
                f"--nproc-per-node={ranks_per_node}",
                f"--max-restarts={max_restarts}",
                "--monitor-interval=0.5",
                "-m", module,
                *args,
            ],
            env={
                **os.environ,
                **_threads(ranks_per_node),
                "TORCHELASTIC_ERROR_FILE": str(error_file),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else restarts meet stale keys: pytorch issue 135712
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
        )  # fmt: skip
        assert process.stdout is not None

        def stop(received: list[int]) -> None:
            if len(received) == 1:  # Ctrl-C reaches the whole process group, and pipeline.py passes it on too
                log.info("train: signal %s: waiting for a checkpoint", signal.Signals(received[0]).name)
                process.send_signal(signal.SIGTERM)

        with on_stop(stop) as received:
            for line in process.stdout:
                show(line)
                last_lines.append(line.rstrip())
                if user_error is None and (found := USER_ERROR.match(line)):
                    user_error = SHARED_LINE.split(found[1])[0].strip()
                    process.terminate()  # a restart would meet the same bad input
            status = process.wait()
        failure = first_failure("\n".join(last_lines), error_file, status) if status else ""
    return TorchrunResult(status, user_error, bool(received), failure, own_lines(last_lines))


def own_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """The ranks' lines, without the account that torchrun writes below them."""
    return tuple(takewhile(lambda line: not ACCOUNT.search(line), lines))


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


def torchrun_module(torch_version: str, shutdown_seconds: int) -> list[str]:
    """The module that is torchrun, with how long ranks may take to stop: an option since torch 2.12."""
    if Version(torch_version) < Version("2.12"):
        return ["tailtune.train.torchrun_compat", str(shutdown_seconds)]
    return ["torch.distributed.run", f"--shutdown-timeout={shutdown_seconds}"]


def _threads(ranks_per_node: int) -> dict[str, str]:
    """Share the cores between the ranks; torchrun's own default is one thread each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks_per_node)))}
