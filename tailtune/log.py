"""Log lines of one format, in a pod, on a terminal and in the local pipeline.

Every line of a step starts with the step's name. The local pipeline shows the user exactly the lines that carry
`LINE_PREFIX`; everything else (KFP's own output) is only in the log file.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailtune.errors import UserError

LINE_PREFIX = "tailtune | "
EVENTS = "TAILTUNE_EVENTS"
"""Environment variable with the path of a file to which `step` appends the UserErrors that end steps."""
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
    """Run one step of the pipeline: log its duration; on a UserError, report it in one line and exit with status 1.

    Raises SystemExit rather than the UserError itself, because a step's log in the dashboard should end with the line
    that helps, not with KFP's frames.
    """
    configure()
    start = time.monotonic()
    try:
        yield
    except UserError as error:
        _report(name, error)
        raise SystemExit(1) from None
    if (seconds := time.monotonic() - start) >= 1:
        log.info("%s: done in %.1f s", name, seconds)


def _report(step_name: str, error: UserError) -> None:
    """Log the error; where a program reads the events, leave it to that program to show the error to the user."""
    path = os.environ.get(EVENTS)
    if path is None:
        log.error("%s: error: %s", step_name, error)
        return
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step_name, "problem": error.problem, "remedy": error.remedy}) + "\n")
    print(f"{step_name}: error: {error}", file=sys.stderr, flush=True)


def read_step_errors(path: Path) -> list[tuple[str, UserError]]:
    """Return (step, error) for each event in the file, in order; empty when there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    events = [json.loads(line) for line in lines]
    return [(event["step"], UserError(event["problem"], event["remedy"])) for event in events]
