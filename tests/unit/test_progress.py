"""When progress is shown and how, by a clock that the tests turn; on terminals and pipes."""

import io
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from terminals import open_pty, screen

from tailtune import log as tailtune_log
from tailtune import progress
from tailtune.log import BAR_LINES, BAR_PREFIX, LINE_PREFIX, Terminal, log
from tailtune.progress import Progress, track


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    """Time stands still, and the threads that show progress sleep: `work` lets both go on."""
    caplog.set_level(logging.INFO, "tailtune")
    clock = Clock()
    monkeypatch.setattr(progress, "_clock", clock)
    monkeypatch.setattr(progress, "_last_line_at", -1e9)
    monkeypatch.setattr(progress, "TICK_SECONDS", 3600.0)
    return clock


def work(clock: Clock, shown: Progress, seconds: float, rate: float = 0.0) -> list[float]:
    """Do `rate` per second in steps of half a second; return the times at which a line was logged."""
    records: list[float] = []

    class Times(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(clock.now - 1000)

    times = Times()
    log.addHandler(times)
    for _ in range(round(2 * seconds)):
        clock.now += 0.5
        shown.update(rate / 2)
        shown._tick()
    log.removeHandler(times)
    return records


def test_lines_come_after_ten_seconds_and_then_every_thirty(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with Progress("evaluate: base, answer", 1000, "answers") as shown:
        assert work(clock, shown, 100, rate=8) == [10, 40, 70, 100]
    assert caplog.messages == [
        "evaluate: base, answer 80/1,000 8 answers/s ETA 1 min 55 s",
        "evaluate: base, answer 320/1,000 8 answers/s ETA 1 min 25 s",
        "evaluate: base, answer 560/1,000 8 answers/s ETA 55 s",
        "evaluate: base, answer 800/1,000 8 answers/s ETA 25 s",
        "evaluate: base, answer 800/1,000 8 answers/s in 1 min 40 s",
    ]


def test_short_work_leaves_no_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with Progress("fetch: data.jsonl", 1000, "bytes") as shown:
        assert work(clock, shown, 9.5, rate=100) == []
    assert caplog.messages == []


def test_work_that_fails_has_no_last_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EOFError), Progress("fetch: data.jsonl", 1000, "bytes") as shown:
        work(clock, shown, 12, rate=10)
        raise EOFError
    assert caplog.messages == ["fetch: data.jsonl 0.1/1.0 kB 0.0 kB/s ETA 1 min 30 s"]
    assert progress._active == []


def test_works_that_follow_each_other_share_the_interval(clock: Clock) -> None:
    """Otherwise many works of eleven seconds would log a line each eleven seconds, and two for each of them."""
    times = []
    for _ in range(5):
        with Progress("parquet: row", unit="rows") as shown:
            times += work(clock, shown, 9, rate=10)
    with Progress("parquet: row", unit="rows") as shown:
        assert times == [] and work(clock, shown, 25, rate=10) == [45 + 10]
    with Progress("parquet: row", unit="rows") as shown:  # 70: the last line of the one before
        assert work(clock, shown, 60, rate=10) == [100, 130]


def test_only_the_innermost_work_is_shown(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with Progress("train: step", 100, "steps") as steps:
        with Progress("train: evaluating row", 50, "rows") as rows:
            for _ in range(30):
                clock.now += 1
                rows.update()
                steps._tick()
                rows._tick()
            assert [m.split(" 1")[0] for m in caplog.messages] == ["train: evaluating row"]
        steps.update(10)
        assert work(clock, steps, 29) == []
        assert work(clock, steps, 1) == [60]
    assert caplog.messages[1:] == [
        "train: evaluating row 30/50 1 rows/s in 30 s",
        "train: step 10/100 0.17 steps/s ETA 9 min 00 s",
        "train: step 10/100 0.17 steps/s in 1 min 00 s",
    ]


def test_a_line_of_the_work_itself_postpones_the_next_one(clock: Clock) -> None:
    with Progress("train: step", 100, "steps") as steps:
        work(clock, steps, 8, rate=1)
        steps.log("train: step 8/100 loss 3.0")
        assert work(clock, steps, 40, rate=1) == [38]


@pytest.mark.parametrize(
    ("arguments", "rate", "line", "last"),
    [
        pytest.param(("fetch: a", 2.9e9, "bytes"), 1e8, "fetch: a 1.0/2.9 GB 100.0 MB/s ETA 19 s",
                     "fetch: a 1.0/2.9 GB 100.0 MB/s in 10 s", id="bytes"),
        pytest.param(("fetch: a", None, "bytes"), 2.5e5, "fetch: a 2.5 MB 250.0 kB/s",
                     "fetch: a 2.5 MB 250.0 kB/s in 10 s", id="unknown-total"),
        pytest.param(("parquet: row", None, "rows"), 51234, "parquet: row 512,340 51,234 rows/s",
                     "parquet: row 512,340 51,234 rows/s in 10 s", id="unknown-number"),
        pytest.param(("model: loading base",), 0, "model: loading base 10 s so far", "model: loading base in 10 s",
                     id="only-time"),
        pytest.param(("evaluate: base, answer", 12, "answers"), 0, "evaluate: base, answer 0/12 10 s so far",
                     "evaluate: base, answer 0/12 in 10 s", id="nothing-done-yet"),
        pytest.param(("train: step", 100_000, "steps"), 0.4, "train: step 4/100,000 0.4 steps/s ETA 69 h 26 min",
                     "train: step 4/100,000 0.4 steps/s in 10 s", id="slow"),
    ],
)  # fmt: skip
def test_what_a_line_says(
    arguments: tuple[Any, ...], rate: float, line: str, last: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with Progress(*arguments) as shown:
        work(clock, shown, 10, rate)
    assert caplog.messages == [line, last]


def test_what_was_done_before_does_not_count_in_the_rate(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with Progress("train: step", unit="steps") as steps:
        clock.now += 50
        steps.restart(100, 60)
        steps.note = "loss 3.0460"
        work(clock, steps, 10, rate=1)
    assert caplog.messages[0] == "train: step 70/100 loss 3.0460 1 steps/s ETA 30 s"


def test_progress_is_measured_where_it_is_not_counted(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with Progress("fetch: model a/b", 40e6, "bytes", done=10e6, measure=lambda: (clock.now - 990) * 1e6) as shown:
        work(clock, shown, 10)
    assert caplog.messages[0] == "fetch: model a/b 20.0/40.0 MB 1.0 MB/s ETA 20 s"


def test_tracked_items_count_by_their_size(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for item in track([3, 1, 6], "tail: token", "tokens", size=float):
        clock.now += 2 * item
    assert caplog.messages == ["tail: token 10/10 0.5 tokens/s in 20 s"]


def test_a_silenced_process_shows_nothing(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_is_silent", False)
    progress.silence()
    with Progress("train: step", 100, "steps"):
        clock.now += 100
    assert caplog.messages == [] and progress._active == []


# -- terminals and pipes ----------------------------------------------------------------------------


@pytest.fixture
def to_stream(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that sends tailtune's lines to a stream, as `configure` does for stderr."""

    def send(stream: Any) -> None:
        monkeypatch.setattr(log, "handlers", [])
        monkeypatch.setattr(log, "propagate", True)
        monkeypatch.setattr(sys, "stderr", stream)
        tailtune_log.configure()

    return send


@pytest.fixture
def terminal(to_stream: Callable[..., None]) -> Iterator[Callable[[], str]]:
    """Stderr is a terminal of 60 columns; returns a function that returns what it has received."""
    with open_pty(60) as pty, open(pty.slave, "w", encoding="utf-8", closefd=False) as stream:
        to_stream(stream)
        yield pty.output


def test_a_terminal_has_a_bar_below_the_lines(clock: Clock, terminal: Callable[[], str]) -> None:
    with Progress("fetch: data.jsonl", 100e6, "bytes") as shown:
        assert terminal() == "", "nothing before the first tick"
        work(clock, shown, 0.5, rate=20e6)
        assert screen(terminal()) == ["█░░░░░░░░░ fetch: data.jsonl 10.0/100.0 MB 20.0 MB/s ETA 4 s"[:59]]
        log.info("fetch: a line")
        work(clock, shown, 2, rate=20e6)
        log.info(
            "fetch: another one, which is longer than the bar and the terminal are wide, so that it takes two lines"
        )
        assert screen(terminal()) == [
            f"{LINE_PREFIX}fetch: a line",
            f"{LINE_PREFIX}fetch: another one, which is longer than the bar and the terminal are wide, so that it "
            "takes two lines",
            "█████░░░░░ fetch: data.jsonl 50.0/100.0 MB 20.0 MB/s ETA 2 s"[:59],
        ]
    assert screen(terminal())[-1] == "", "the bar is gone"


def test_long_work_leaves_one_line_on_a_terminal(clock: Clock, terminal: Callable[[], str]) -> None:
    with Progress("parquet: row", unit="rows") as shown:
        assert work(clock, shown, 100, rate=50) == [], "only the bar"
        assert screen(terminal()) == ["parquet: row 5,000 50 rows/s"]
    assert screen(terminal()) == [f"{LINE_PREFIX}parquet: row 5,000 50 rows/s in 1 min 40 s", ""]


def test_inner_work_takes_the_bar_and_returns_it(clock: Clock, terminal: Callable[[], str]) -> None:
    with Progress("train: step", 100, "steps") as steps:
        work(clock, steps, 1, rate=2)
        with Progress("train: evaluating row", unit="rows") as rows:
            work(clock, rows, 1, rate=3)
            steps._tick()
            assert screen(terminal()) == ["train: evaluating row 3 3 rows/s"]
        work(clock, steps, 1, rate=2)
        assert screen(terminal()) == ["░░░░░░░░░░ train: step 4/100 1.3 steps/s ETA 1 min 12 s"]


class Slow(io.StringIO):
    """A terminal on which writing takes a while, in which other threads run."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        time.sleep(0.0005)
        return super().write(text)


def test_lines_of_other_threads_stay_whole(to_stream: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.0001)
    monkeypatch.setattr(Terminal, "_num_columns", lambda self: 60)
    stream = Slow()
    to_stream(stream)

    def write(name: str) -> None:
        for i in range(200):
            log.info("%s %d", name, i)

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with Progress("train: step", 100, "steps"):
            time.sleep(0.003)
    shown = screen(stream.getvalue())
    expected = {f"{LINE_PREFIX}{name} {i}" for name in "ab" for i in range(200)}
    assert set(shown[:-1]) == expected and len(shown) == 401 and shown[-1] == ""
    assert "train: step 0/100" in stream.getvalue()


PROGRAM = """
import sys, time
from tailtune import progress
from tailtune.log import configure, log
progress.TICK_SECONDS, progress.FIRST_LINE_SECONDS = 0.01, 0.05
configure()
with progress.Progress("parquet: row", 10, "rows") as shown:
    shown.update(5)
    time.sleep(0.2)
    log.info("parquet: a line")
    time.sleep(0.1)
"""


def program_output(**environment: str) -> str:
    environment = {**{k: v for k, v in os.environ.items() if k != BAR_LINES}, **environment}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, check=True, env=environment
    ).stderr


def test_a_pipe_receives_whole_lines_and_no_bar() -> None:
    assert re.sub(r"[\d.]+ rows/s (ETA|in) \d s", r"R \1", program_output()) == (
        f"{LINE_PREFIX}parquet: row 5/10 R ETA\n{LINE_PREFIX}parquet: a line\n{LINE_PREFIX}parquet: row 5/10 R in\n"
    )


def test_a_reader_that_draws_the_bar_receives_it_as_lines() -> None:
    lines = program_output(**{BAR_LINES: "1"}).splitlines()
    states = [line for line in lines if line.startswith(BAR_PREFIX)]
    assert len(states) > 3 and all(
        line.startswith(f"{BAR_PREFIX}█████░░░░░ parquet: row 5/10 ") for line in states[:-1]
    )
    assert states[-1] == BAR_PREFIX, "which removes the bar"
    others = [line for line in lines if line not in states]
    assert len(others) == 2 and others[0] == f"{LINE_PREFIX}parquet: a line"


def test_a_stream_that_is_no_terminal_shows_no_bar() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    terminal.show_bar("half")
    terminal.write("a line\n")
    assert stream.getvalue() == "a line\n" and not terminal.shows_bars


def test_counting_costs_next_to_nothing() -> None:
    with Progress("parquet: row", 10, "rows") as shown:
        start = time.perf_counter()
        for _ in range(100_000):
            shown.update()
        seconds = (time.perf_counter() - start) / 100_000
    assert seconds < 5e-6, "less than a microsecond where other programs leave time for it"
