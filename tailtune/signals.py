"""Handling of SIGTERM, SIGINT and SIGHUP."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A person or a system asks for the end; SIGHUP when a terminal is closed."""
STOPPED = 143
"""Exit status of a training run stopped by a signal: 128 + SIGTERM. Not 0, so that a restart policy restarts it."""


def handled_signals() -> list[signal.Signals]:
    """Return the stop signals, without a SIGHUP that this process was told to ignore, as nohup does."""
    return [each for each in STOP_SIGNALS if (each, signal.getsignal(each)) != (signal.SIGHUP, signal.SIG_IGN)]


@contextmanager
def on_stop(handle: Callable[[list[int]], None]) -> Iterator[list[int]]:
    """Within the block, every stop signal calls `handle` with all signals received so far. Yields that list."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        handle(received)

    previous = {number: signal.signal(number, receive) for number in handled_signals()}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
