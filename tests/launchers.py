"""The launcher in a process of its own, as a pipeline's step runs it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes_server import Server

HERE = Path(__file__).resolve().parent


def start_launcher(server: Server, program: str, *arguments: str) -> "subprocess.Popen[str]":
    """Python that runs `program` beside the tests' modules, logged in to the server; its stderr is a pipe."""
    paths = os.pathsep.join([str(HERE.parent), str(HERE), str(HERE / "unit"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig), "PYTHONPATH": paths}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True,
                            env=environment)  # fmt: skip


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)
