"""The command of every pod of a job: torchrun for the pod's ranks, and a termination message for the launcher.

The operator (of PyTorchJob or TrainJob) sets environment variables with the number of nodes, this node's number and the
first node's address. Nodes meet through torchrun's c10d rendezvous on the first one: with static rendezvous, only the
ranks of one node would restart when a rank dies.
"""

import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import click

from tailtune.jobs.torchrun import TorchrunResult, run_torchrun
from tailtune.log import configure, log
from tailtune.signals import STOPPED

TERMINATION_LOG = "/dev/termination-log"
"""File from which Kubernetes reads a container's termination message, up to 4,096 bytes."""
NUM_WAITING_LINES = 10_000
CLOSE_SECONDS = 5.0


def torchrun_options(job: str, start_seconds: int, environment: Mapping[str, str]) -> list[str]:
    """torchrun's options for this node of the job. Raises KeyError for a variable that the operator did not set."""
    first = environment.get("PET_MASTER_ADDR") or environment["MASTER_ADDR"]
    port = environment.get("PET_MASTER_PORT") or environment["MASTER_PORT"]
    is_first = environment["PET_NODE_RANK"] == "0"
    return [
        f"--nnodes={environment['PET_NNODES']}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first}:{port}",
        f"--rdzv-id={job}",
        # is_host: the first node might not recognise itself by name. Timeouts: others may still be pulling their image;
        # the c10d backend connects with read_timeout, 60 s by default (torch's c10d_rendezvous_backend.py)
        f"--rdzv-conf=is_host={int(is_first)},"
        + ",".join(f"{name}={start_seconds}" for name in ("join_timeout", "timeout", "read_timeout")),
        # other pods cannot resolve this one's name
        *([f"--local-addr={environment['POD_IP']}"] if environment.get("POD_IP") else []),
        "--tee=3",
    ]


def termination_message(result: TorchrunResult, limit: int = 4000) -> str:
    """JSON for the launcher: what failed, and as many of the last lines as fit into `limit` characters."""
    error = result.user_error
    user_error = {"problem": error.problem, "remedy": error.remedy} if error else None
    lines = list(result.last_lines)
    while True:
        text = json.dumps({"status": result.status, "user_error": user_error, "failure": result.failure,
                           "restarts_used_up": result.restarts_used_up, "lines": lines})  # fmt: skip
        if len(text) <= limit or not lines:
            return text
        del lines[0]


class NodeLog:
    """Prints a node's lines, and appends them to a file on a volume, where they outlive the pod.

    A thread writes the file, so that a volume that is full or hangs does not hold up the training; lines that it cannot
    take in time are missing there.
    """

    def __init__(self, path: Path | None) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(NUM_WAITING_LINES)
        self._writer = threading.Thread(target=self._write, args=(path,), daemon=True) if path else None
        if self._writer:
            self._writer.start()

    def __call__(self, line: str) -> None:
        print(line, end="", flush=True)
        if self._writer:
            with suppress(queue.Full):
                self._lines.put_nowait(line)

    def close(self) -> None:
        """Give the writer some seconds for the lines that wait."""
        if self._writer:
            with suppress(queue.Full):
                self._lines.put_nowait(None)
            self._writer.join(CLOSE_SECONDS)

    def _write(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1) as file:
                file.write(f"==== {datetime.now(UTC).isoformat(timespec='seconds')} {socket.gethostname()}\n")
                while (line := self._lines.get()) is not None:
                    file.write(line)
        except OSError as error:
            log.warning("train: no longer writing the log to the volume: %s", error.strerror)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--job", required=True)
@click.option("--max-restarts", type=int, required=True)
@click.option("--shutdown-seconds", type=int, required=True)
@click.option("--start-seconds", type=int, required=True)
@click.option("--log-dir", type=click.Path(path_type=Path))
@click.argument("module")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(job: str, max_restarts: int, shutdown_seconds: int, start_seconds: int, log_dir: Path | None, module: str,
         args: tuple[str, ...]) -> None:  # fmt: skip
    """Run this pod's ranks of a job."""
    configure()
    node = os.environ["PET_NODE_RANK"]
    show = NodeLog(log_dir / f"{job}-node-{node}.log" if log_dir else None)
    result = run_torchrun(
        torchrun_options(job, start_seconds, os.environ),
        module,
        args,
        ranks_per_node=int(os.environ["PET_NPROC_PER_NODE"]),
        max_restarts=max_restarts,
        shutdown_seconds=shutdown_seconds,
        environment={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] "},
        show=show,
    )
    show.close()
    if result.status and not result.stopped:
        path = Path(os.environ.get("TERMINATION_LOG", TERMINATION_LOG))
        try:
            path.write_text(termination_message(result))
        except OSError as error:  # the launcher then reads the end of the log instead
            log.warning("train: cannot write %s: %s", path, error.strerror)
    sys.exit(STOPPED if result.stopped and result.status else result.status)


if __name__ == "__main__":
    main()
