"""A process ends with the one that started it, and a second run waits until nothing of the first is alive."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tailtune.lifeline import locked

STARTER = """
import os, subprocess, sys, time
from pathlib import Path
from tailtune.lifeline import lifeline, locked, processes_lock
directory = Path(sys.argv[1])
with locked(directory) as taken, lifeline(processes_lock(directory)):
    assert not taken
    subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]])
"""
CHILD = """
import os, signal, sys, time
from pathlib import Path
from tailtune import lifeline
from tailtune.jobs.torchrun import run_torchrun
lifeline.POLL_SECONDS = 0.1
lifeline.hold_lifeline()
"""
SAVES = """
directory = Path(sys.argv[1])
def save(*_):
    (directory / "saving").touch()
    while not (directory / "saved").exists():
        time.sleep(0.02)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(directory / "ready").write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""
DEAF = """
signal.signal(signal.SIGTERM, lambda *_: None)
(Path(sys.argv[1]) / "ready").write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


def wait_for(path: Path) -> str:
    give_up_at = time.monotonic() + 60
    while not path.is_file() or (path.name == "ready" and not path.read_text()):
        assert time.monotonic() < give_up_at, path
        time.sleep(0.02)
    return path.read_text()


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes that are killed at the end, with all that they have started."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.wait()


def start(started: list["subprocess.Popen[bytes]"], directory: Path, child: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", STARTER, str(directory), CHILD + child])
    started.append(process)
    return process


def test_a_process_saves_and_ends_with_its_starter_and_a_second_run_waits_for_it(
    tmp_path: Path, started: list["subprocess.Popen[bytes]"]
) -> None:
    starter = start(started, tmp_path, SAVES)
    child = psutil.Process(int(wait_for(tmp_path / "ready")))
    with locked(tmp_path) as taken:
        assert taken == "run"
    starter.kill()
    starter.wait()
    wait_for(tmp_path / "saving")
    with locked(tmp_path) as taken:
        assert taken == "processes"
    (tmp_path / "saved").touch()
    child.wait(timeout=20)
    with locked(tmp_path) as taken:
        assert taken == ""
    started.clear()


def test_a_process_whose_starter_has_ended_does_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    environment = {**os.environ, "TAILTUNE_LIFELINE": "0", "TAILTUNE_PROCESSES_LOCK": str(tmp_path / "lock")}
    done = subprocess.run([sys.executable, "-c", CHILD + SAVES, str(tmp_path)], stdin=reader, env=environment)
    os.close(reader)
    assert done.returncode == 143 and not (tmp_path / "ready").exists()


def test_a_rank_that_does_not_end_is_killed_after_the_shutdown_seconds(tmp_path: Path) -> None:
    environment = {**os.environ, "TAILTUNE_LIFELINE": "0.5"}
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD + DEAF, str(tmp_path)], stdin=subprocess.PIPE, env=environment
    )
    wait_for(tmp_path / "ready")
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=20) == -signal.SIGKILL


def test_a_standard_input_that_is_no_lifeline_ends_nothing() -> None:
    program = "from tailtune.lifeline import hold_lifeline; hold_lifeline(); print('alive')"
    environment = {name: value for name, value in os.environ.items() if name != "TAILTUNE_LIFELINE"}
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "alive\n"
