"""A few clean lines for the user, everything in the log file: around KFP's local runner.

The runner prints pages of JSON to stdout and stderr. Both are redirected on the level of file
descriptors, so that the steps' processes are covered too; lines that carry tailtune's mark are
passed on to the terminal.
"""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailtune.log import MARK

PROGRESS = re.compile(r"step \d+/\d+ ")


@contextmanager
def quiet(log_path: Path) -> Iterator[list[str]]:
    """Send the process's output to `log_path`; yield the list of the steps' errors, which are not shown."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    errors: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    terminal, saved = os.dup(2), (os.dup(1), os.dup(2))
    reader, writer = os.pipe()
    thread = threading.Thread(target=_pass_on, args=(reader, terminal, log_path, errors))
    thread.start()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield errors
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        thread.join()  # ends when every process that holds the pipe has ended
        os.close(terminal)


def _pass_on(reader: int, terminal: int, log_path: Path, errors: list[str]) -> None:
    """Copy lines to the log; show marked ones, the training's steps over each other on a terminal."""
    live = os.isatty(terminal)
    over_written = False
    with (
        os.fdopen(reader, errors="backslashreplace") as lines,
        log_path.open("a", encoding="utf-8") as log_file,
    ):
        for line in lines:
            log_file.write(line)
            log_file.flush()
            _, mark, text = line.partition(MARK)
            if not mark:
                continue
            text = text.rstrip("\n")
            if ": error: " in text:
                step, _, message = text.partition(": error: ")
                if f"{step}: {message}" not in errors:
                    errors.append(f"{step}: {message}")
                continue
            progress = live and bool(PROGRESS.search(text)) and "eval_loss" not in text
            start = "\r\x1b[K" if over_written else ""
            os.write(terminal, f"{start}{text}{'' if progress else chr(10)}".encode())
            over_written = progress
