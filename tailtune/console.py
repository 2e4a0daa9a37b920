"""What both command lines share: every error in one line, and output that cannot do anything to the terminal."""

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TextIO

import click

from tailtune.errors import UserError, explain, printable
from tailtune.log import configure

SHOW_TRACEBACK = "TAILTUNE_TRACEBACK"
"""Environment variable that makes command lines print the traceback of an unexpected error."""


def command_line(status: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: any exception is printed as one line on stderr, and the exit status is `status`.

    A reader of the output that has gone, or an output that is closed, does not stop the command.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            with _safe_output():
                configure()
                try:
                    function(*args, **kwargs)
                except (click.ClickException, click.exceptions.Exit, click.Abort):
                    raise
                except Exception as error:
                    _report(error)
                    sys.exit(status)

        return wrapped

    return decorate


def _report(error: Exception) -> None:
    known = explain(error)
    if known is not error and SHOW_TRACEBACK in os.environ:
        click.echo(traceback.format_exc(), err=True)
    elif known is not error and not isinstance(error, OSError):
        known = UserError(known.problem, f"{known.remedy} ({SHOW_TRACEBACK}=1 shows the traceback)")
    click.echo(f"error: {known}", err=True)


def echo_lines(lines: Iterable[str], *, err: bool = False) -> None:
    """Print lines, each of which stays one line whatever it contains."""
    for line in lines:
        click.echo(printable(line, newline=False), err=err)


class _Output:
    """A text stream that escapes control characters, and is silent once nobody reads it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        safe = printable(text)
        with suppress(OSError):
            self._stream.write(safe)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _safe_output() -> Iterator[None]:
    """Within the block, stdout and stderr exist, and what is printed there is printable."""
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    saved = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        sys.stdout, sys.stderr = (_Output(stream or nowhere) for stream in saved)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = saved
