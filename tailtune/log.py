"""Plain log lines, the same in a pod, on a terminal and in the local pipeline.

Every line of a step starts with its name. The local pipeline runner shows the user exactly the
lines that carry this format and keeps everything else (KFP's own pages) in the log file.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tailtune.errors import UserError

LINE_PREFIX = "tailtune | "
log = logging.getLogger("tailtune")


def configure() -> None:
    """Send tailtune's lines to stderr, whatever other libraries do with the root logger."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(LINE_PREFIX + "%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


@contextmanager
def step(name: str) -> Iterator[None]:
    """Frame one step of the pipeline: its duration, and a UserError as one line and exit status 1.

    SystemExit rather than the exception itself, because a step's log in the dashboard should end
    with the line that helps, not with KFP's frames.
    """
    configure()
    start = time.monotonic()
    try:
        yield
    except UserError as error:
        log.error("%s: error: %s", name, error)
        raise SystemExit(1) from None
    if (seconds := time.monotonic() - start) >= 1:
        log.info("%s: done in %.1f s", name, seconds)
