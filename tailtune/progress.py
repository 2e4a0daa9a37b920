"""Progress of work that may take long, with its rate and the estimated time to its end.

On a terminal it is a bar. Elsewhere it is a line in the log after ten seconds and then every 30, so that short work
leaves none. Work that took longer than ten seconds leaves a last line with its rate in both cases. A thread shows the
progress, so counting costs next to nothing, and work that hangs is seen to hang.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import TypeVar

from tailtune.log import log, show_bar

TICK_SECONDS = 0.5
"""Interval in which a bar is drawn. Work that ends earlier shows none."""
FIRST_LINE_SECONDS = 10.0
LINE_SECONDS = 30.0
BAR_CELLS = 10

Item = TypeVar("Item")
_clock = time.monotonic
_active: list["Progress"] = []
"""Work within work: only the innermost is shown."""
_last_line_at = -math.inf
_is_silent = False


def silence() -> None:
    """Show no progress from now on: another process shows that of the work that they share."""
    global _is_silent
    _is_silent = True


class Progress:
    """Shows the progress of the work in a `with` block. `update` counts what is done.

    Args:
        what: The work, as the line says it before the amount: `evaluate: base answer`.
        total: The amount of all work; None if it is unknown, which leaves no estimate.
        unit: What is counted, in the plural; `bytes` are shown as MB or GB. Without one, only the time is shown.
        done: The amount that was done earlier; it does not count in the rate.
        measure: Returns the amount that is done, where it is not counted by `update`. Called from another thread.
    """

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "",
        *,
        done: float = 0,
        measure: Callable[[], float] | None = None,
    ) -> None:
        self.what, self.unit, self._measure = what, unit, measure
        self.note = ""
        """What else the line says, for example the loss."""
        self.restart(total, done)
        self._is_drawn = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"progress of {what}", daemon=True)

    def restart(self, total: float | None, done: float = 0) -> None:
        """Begin again, now that the total is known; `done` is as in the constructor."""
        self.total, self.done, self._done_before, self._start = total, done, done, _clock()

    def update(self, amount: float = 1) -> None:
        """Count what has been done since the last call."""
        self.done += amount

    def log(self, line: str) -> None:
        """Log a line that shows how far the work is, so that no other one is due for a while."""
        global _last_line_at
        _last_line_at = _clock()
        log.info("%s", line)

    def eta(self) -> str:
        """Return the estimate of the remaining time, for example `ETA 9 s`; empty without a total or a rate."""
        if self.total is None or self.done <= self._done_before:
            return ""
        seconds = (_clock() - self._start) / (self.done - self._done_before) * max(0, self.total - self.done)
        return f"ETA {_duration(seconds)}" if seconds >= 60 else f"ETA {seconds:.0f} s"

    def __enter__(self) -> "Progress":
        self._start = _clock()
        if not _is_silent:
            _active.append(self)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self not in _active:
            return
        self._ended.set()
        self._thread.join()
        _active.remove(self)
        if self._is_drawn:
            show_bar("")
        seconds = _clock() - self._start
        if kind is None and seconds >= FIRST_LINE_SECONDS:
            self.log(" ".join(filter(None, (self._amount(), self.note, self._rate(seconds), "in", _duration(seconds)))))

    def _watch(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self._tick()

    def _tick(self) -> None:
        """Draw the bar, or log a line if one is due."""
        if _active[-1] is not self:
            return
        now = _clock()
        self._is_drawn = show_bar(self._bar(now - self._start))
        if not self._is_drawn and now >= max(self._start + FIRST_LINE_SECONDS, _last_line_at + LINE_SECONDS):
            self.log(self._line(now - self._start))

    def _bar(self, seconds: float) -> str:
        line = self._line(seconds)
        if not self.total:
            return line
        num_full = int(BAR_CELLS * min(1, self.done / self.total))
        return f"{'█' * num_full}{'░' * (BAR_CELLS - num_full)} {line}"

    def _line(self, seconds: float) -> str:
        amount = self._amount()
        if rate := self._rate(seconds):
            return " ".join(filter(None, (amount, self.note, rate, self.eta())))
        return f"{amount} {_duration(seconds)} so far"

    def _amount(self) -> str:
        if self._measure:
            self.done = self._measure()
        if not self.unit or (self.total is None and not self.done):
            return self.what
        if self.unit == "bytes":
            return f"{self.what} {_num_bytes(self.done, self.total)}"
        return f"{self.what} {int(self.done):,}" + ("" if self.total is None else f"/{int(self.total):,}")

    def _rate(self, seconds: float) -> str:
        """Return the average rate; empty as long as nothing is done."""
        if self.done <= self._done_before or seconds <= 0 or not self.unit:
            return ""
        rate = (self.done - self._done_before) / seconds
        return f"{_num_bytes(rate)}/s" if self.unit == "bytes" else f"{_number(rate)} {self.unit}/s"


def track(
    items: Collection[Item], what: str, unit: str, size: Callable[[Item], float] = lambda item: 1
) -> Iterator[Item]:
    """Yield the items and show the progress of what the caller does with them. `size` is an item's amount of work."""
    with Progress(what, sum(map(size, items)), unit) as progress:
        for item in items:
            yield item
            progress.update(size(item))


def _number(value: float) -> str:
    """Return a number with at least two significant digits: 1,234 or 8.1 or 0.021."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _num_bytes(value: float, total: float | None = None) -> str:
    """Return a size, or `1.2/2.9 GB` of a total: in kB, MB or GB, whichever suits the larger number."""
    largest = max(value, total or 0)
    name, size = next(((n, s) for n, s in (("GB", 1e9), ("MB", 1e6)) if largest >= s), ("kB", 1e3))
    return f"{value / size:,.1f}" + ("" if total is None else f"/{total / size:,.1f}") + f" {name}"


def _duration(seconds: float) -> str:
    """Return a duration in its two largest units: 9 s, 2 min 05 s, 3 h 05 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes_left:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
