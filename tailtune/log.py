"""Log lines of one format, in a pod, on a terminal and in the local pipeline; on a terminal, a progress bar below them.

Every line of a step starts with the step's name. The local pipeline shows the user exactly the lines that carry
`LINE_PREFIX`, and the bar that those with `BAR_PREFIX` describe; everything else (KFP's own output) is only in the log
file.
"""

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tailtune.errors import UserError, explain, printable
from tailtune.lifeline import hold_lifeline

LINE_PREFIX = "tailtune | "
BAR_PREFIX = "tailtune ~ "
BAR_LINES = "TAILTUNE_BAR_LINES"
"""Environment variable that is set where a reader of the output draws the bar: it is then written as lines."""
LINE_MARK = "TAILTUNE_LINE_MARK"
"""Environment variable with a random word that stands before `LINE_PREFIX` and `BAR_PREFIX` in a local pipeline, where
only lines with it are shown: a text in the data cannot know it, and so cannot forge a line."""
EVENTS = "TAILTUNE_EVENTS"
"""Environment variable with the path of a file to which `step` appends the UserErrors that end steps."""
log = logging.getLogger("tailtune")


class Terminal:
    """A stream of lines. If it is a terminal, its last line may be a progress bar, which lines push down."""

    def __init__(self, stream: TextIO, *, bar_lines: bool = False) -> None:
        self._stream, self._bar_lines, self._bar = stream, bar_lines, ""
        self.shows_bars = bar_lines or stream.isatty()

    def write(self, lines: str) -> None:
        """Write whole lines."""
        self._stream.write(f"{self._erased()}{lines}{self._bar}")
        self._stream.flush()

    def flush(self) -> None:
        self._stream.flush()

    def show_bar(self, text: str) -> None:
        """Show `text` as the bar, in place of the last one; "" removes it."""
        if self._bar_lines:
            self.write(f"{line_mark()}{BAR_PREFIX}{text}\n")
        elif self.shows_bars:
            erased, self._bar = self._erased(), text[: self._num_columns() - 1]
            self._stream.write(f"{erased}{self._bar}")
            self._stream.flush()

    def _erased(self) -> str:
        return "\r\x1b[K" if self._bar else ""

    def _num_columns(self) -> int:
        return os.get_terminal_size(self._stream.fileno()).columns or 80  # some terminals do not know their size


class _Lines(logging.Formatter):
    """Every record is one line with the prefix. What it contains of others is made printable."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{line_mark()}{LINE_PREFIX}{printable(super().format(record), newline=False)}"


def line_mark() -> str:
    """Return what stands before the prefix of a line in this process."""
    return os.environ.get(LINE_MARK, "")


def configure() -> None:
    """Send tailtune's lines to stderr, whatever other libraries do with the root logger."""
    if not log.handlers:
        handler = logging.StreamHandler(Terminal(sys.stderr, bar_lines=BAR_LINES in os.environ))
        handler.setFormatter(_Lines())
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def show_bar(text: str) -> bool:
    """Show `text` as the progress bar, "" for none. Return whether there is a terminal to show it on."""
    for handler in log.handlers:
        if isinstance(handler, logging.StreamHandler) and isinstance(handler.stream, Terminal):
            handler.acquire()  # a line that another thread is writing ends first
            try:
                handler.stream.show_bar(text)
            finally:
                handler.release()
            return handler.stream.shows_bars
    return False


@contextmanager
def step(name: str) -> Iterator[None]:
    """Run one step of the pipeline: log its duration; on an error, report it in one line and exit with status 1.

    Raises SystemExit rather than the error itself, because a step's log in the dashboard should end with the line that
    helps, not with KFP's frames. The traceback of any exception but a UserError stands above that line. A step of a
    local run ends with the process that started it.
    """
    configure()
    hold_lifeline()
    start = time.monotonic()
    try:
        yield
    except UserError as error:
        _report(name, error)
        raise SystemExit(1) from None
    except Exception as error:
        print(printable(traceback.format_exc()), file=sys.stderr, flush=True)
        _report(name, explain(error))
        raise SystemExit(1) from None
    if (seconds := time.monotonic() - start) >= 1:
        log.info("%s: done in %.1f s", name, seconds)


def _report(step_name: str, error: UserError) -> None:
    """Log the error; where a program reads the events, leave it to that program to show the error to the user."""
    details = "".join(f"\n    {line}" for line in error.details)
    path = os.environ.get(EVENTS)
    if path is None:
        log.error("%s: error: %s", step_name, error)
        print(details, end="", file=sys.stderr, flush=True)
        return
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step_name, "problem": error.problem, "remedy": error.remedy}) + "\n")
    print(f"{step_name}: error: {error}{details}", file=sys.stderr, flush=True)


def read_step_errors(path: Path) -> list[tuple[str, UserError]]:
    """Return (step, error) for each event in the file, in order; empty when there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    events = [json.loads(line) for line in lines]
    return [(event["step"], UserError(event["problem"], event["remedy"])) for event in events]
