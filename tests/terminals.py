"""Terminals that tests write to, and what is seen on them."""

import fcntl
import os
import re
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager


def screen(output: str) -> list[str]:
    """The lines on a terminal that is wide enough for each of them after this output."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[K|.", output, re.DOTALL):
        if part == "\n":
            lines.append("")
        elif part == "\r":
            column = 0
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + 1 :]
            column += 1
    return lines


class Pty:
    """A terminal: `slave` is the file descriptor that programs write to."""

    def __init__(self, num_columns: int) -> None:
        self._master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, num_columns, 0, 0))
        os.set_blocking(self._master, False)
        self._received = b""

    def output(self) -> str:
        """Return all that has been written so far; a character of which only a part has arrived is left out."""
        while True:
            try:
                self._received += os.read(self._master, 65536)
            except BlockingIOError:
                return self._received.decode(errors="ignore")

    def close(self) -> None:
        os.close(self._master)
        os.close(self.slave)


@contextmanager
def open_pty(num_columns: int) -> Iterator[Pty]:
    """Yield a terminal of so many columns."""
    pty = Pty(num_columns)
    try:
        yield pty
    finally:
        pty.close()
