"""What every pod of a job runs: torchrun, told its place in the job, and its last words for the launcher.

The operator (PyTorchJob or TrainJob) says in the environment how many nodes there are, which one this
is and where the first one is. Nodes meet by torchrun's c10d rendezvous on the first one, because only
that lets all ranks start again when one dies.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from tailtune.jobs.torchrun import TorchrunResult, run_torchrun
from tailtune.log import configure, log
from tailtune.signals import STOPPED

TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes reads a container's last words, up to 4,096 bytes."""


def torchrun_options(job: str, start_seconds: int, environment: Mapping[str, str]) -> list[str]:
    """The node's place in the job, as torchrun's options. Raises KeyError for what the operator did not set."""
    first = environment.get("PET_MASTER_ADDR") or environment["MASTER_ADDR"]
    port = environment.get("PET_MASTER_PORT") or environment["MASTER_PORT"]
    is_first = environment["PET_NODE_RANK"] == "0"
    return [
        f"--nnodes={environment['PET_NNODES']}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first}:{port}",
        f"--rdzv-id={job}",
        # by name the first node might not know itself; others may still wait for their image
        f"--rdzv-conf=is_host={int(is_first)},join_timeout={start_seconds},timeout={start_seconds}",
        # other pods cannot resolve this one's name
        *([f"--local-addr={environment['POD_IP']}"] if environment.get("POD_IP") else []),
        "--tee=3",
    ]


def termination_message(ended: TorchrunResult, limit: int = 4000) -> str:
    """JSON for the launcher: what failed, and as many of the last lines as fit."""
    lines = list(ended.last_lines)
    while True:
        text = json.dumps({"status": ended.status, "user_error": ended.user_error, "failure": ended.failure,
                           "lines": lines})  # fmt: skip
        if len(text) <= limit or not lines:
            return text
        del lines[0]


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--job", required=True)
@click.option("--max-restarts", type=int, required=True)
@click.option("--shutdown-seconds", type=int, required=True)
@click.option("--start-seconds", type=int, required=True)
@click.argument("module")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(job: str, max_restarts: int, shutdown_seconds: int, start_seconds: int, module: str,
         args: tuple[str, ...]) -> None:  # fmt: skip
    """Run this pod's ranks of a job."""
    configure()
    ended = run_torchrun(
        torchrun_options(job, start_seconds, os.environ),
        module,
        args,
        ranks_per_node=int(os.environ["PET_NPROC_PER_NODE"]),
        max_restarts=max_restarts,
        shutdown_seconds=shutdown_seconds,
        environment={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] "},
        show=lambda line: print(line, end="", flush=True),
    )
    if ended.status and not ended.stopped:
        path = Path(os.environ.get("TERMINATION_LOG", TERMINATION_LOG))
        try:
            path.write_text(termination_message(ended))
        except OSError as error:  # the launcher then reads the log's end instead
            log.warning("train: cannot write %s: %s", path, error.strerror)
    sys.exit(STOPPED if ended.stopped and ended.status else ended.status)


if __name__ == "__main__":
    main()
