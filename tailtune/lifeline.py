"""No process of a local run outlives the one that started it, and no second run starts while one of them is alive.

The standard input of a step, of torchrun and of its ranks is a pipe to which nobody writes, and whose other end only
the process that started them holds. However that process ends, the pipe ends with it, and a thread here sends its own
process SIGTERM, on which a rank saves a checkpoint. Each of these processes also holds a shared lock, for which a
second run of the same name waits.
"""

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailtune.signals import STOPPED

LIFELINE = "TAILTUNE_LIFELINE"
"""Environment variable that is set where the standard input is such a pipe: the seconds that a process may take to end
after SIGTERM, 0 for any."""
PROCESSES_LOCK = "TAILTUNE_PROCESSES_LOCK"
"""Environment variable with the path of the file that every process of a local run locks, shared."""
POLL_SECONDS = 1.0
_held: list[int] = []


def hold_lifeline() -> None:
    """From now on, end this process when the one that started it has ended. Call this before doing anything.

    Does nothing in a process that was started with a standard input of another kind.
    """
    seconds = os.environ.get(LIFELINE)
    if seconds is None or _held:
        return
    lock = os.environ.get(PROCESSES_LOCK)
    _held.append(os.open(lock or os.devnull, os.O_RDWR | os.O_CREAT, 0o666))
    if lock:
        fcntl.flock(_held[0], fcntl.LOCK_SH)  # before the look at the pipe: see `locked`
    if _is_cut(0):
        sys.exit(STOPPED)
    threading.Thread(target=_watch, args=(os.getppid(), float(seconds)), daemon=True, name="lifeline").start()


def _is_cut(seconds: float) -> bool:
    return bool(select.select([0], [], [], seconds)[0])  # nobody writes, so it can only be the end


def _watch(parent: int, seconds: float) -> None:
    while not _is_cut(POLL_SECONDS):
        if os.getppid() != parent:  # torchrun was killed, and the launcher that holds the pipe lives
            break
    os.kill(os.getpid(), signal.SIGTERM)
    if seconds:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def lifeline(lock: Path) -> Iterator[None]:
    """Within the block, the standard input of this process's children is a pipe that ends with this process."""
    variables = {LIFELINE: "0", PROCESSES_LOCK: str(lock)}
    reader, writer = os.pipe()
    saved = os.dup(0)
    os.dup2(reader, 0)
    os.close(reader)
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.close(writer)
        os.dup2(saved, 0)
        os.close(saved)


def end(process: "subprocess.Popen[str]", seconds: float) -> None:
    """End a child whose standard input is its lifeline: SIGTERM, and SIGKILL if it has not ended after `seconds`."""
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=seconds)  # reads on, so that a full pipe does not keep it from ending
        except subprocess.TimeoutExpired:
            process.kill()
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()
    process.wait()


@contextmanager
def locked(directory: Path) -> Iterator[str]:
    """Hold the locks of a local run's directory, if both are free. Yield which one is not: "run", "processes" or "".

    A process that `hold_lifeline` lets go on had a starter that was alive when it already had the shared lock. So
    whoever gets `run` after that starter's end, and then `processes`, is alone.
    """
    with (directory / ".lock").open("a") as run, processes_lock(directory).open("a") as processes:
        if not _try_lock(run.fileno()):
            yield "run"
        elif not _try_lock(processes.fileno()):
            yield "processes"
        else:
            fcntl.flock(processes, fcntl.LOCK_UN)  # for the processes that this run starts
            yield ""


def processes_lock(directory: Path) -> Path:
    """Return the file that the processes of a run in this directory lock."""
    return directory / ".processes"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
