"""Work in a process of its own that is killed with SIGKILL, so that no handler and no `finally` runs."""

import os
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir")
"""Functions of `os` that change the file system, apart from writing into files."""


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], object], *, when: Callable[[], bool] | None = None) -> bool:
    """Do something in a process that kills itself or is killed at a moment; return whether it was killed."""
    if not (pid := os.fork()):
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    if when:
        while not when():
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), "it failed"
    return status == signal.SIGKILL


def killed_at(work: Callable[[], object], number: int) -> bool:
    """Do something in a process that is killed before its change number `number` of the file system."""

    def counted() -> None:
        count = 0

        def change(real: Any, *arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                die()
            return real(*arguments, **keywords)

        for name in CHANGES:
            setattr(os, name, partial(change, getattr(os, name)))
        work()

    return killed(counted)
