"""Handling of SIGTERM and SIGINT."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 143
"""Exit status of a training run stopped by a signal: 128 + SIGTERM. Not 0, so that a restart policy restarts it."""


@contextmanager
def on_stop(handle: Callable[[list[int]], None]) -> Iterator[list[int]]:
    """Within the block, every SIGTERM and SIGINT calls `handle` with all signals received so far. Yields that list."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        handle(received)

    previous = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
