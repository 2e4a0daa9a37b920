"""Import torch and what is built on it a quarter faster."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import modules without garbage collection, and leave them out of every later one.

    Modules are never garbage. Yet while thousands of them are imported, and again when the process ends, the collector
    examines all of their objects: a quarter of the CPU time of starting a rank (BENCHMARKS.md, "Imports").
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
