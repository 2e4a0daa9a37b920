"""Every error of a command is one line, and what it prints can neither control the terminal nor forge a line."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tailtune.cli import main as tailtune
from tailtune.console import SHOW_TRACEBACK, command_line, echo_lines
from tailtune.errors import MAX_PROBLEM, UserError, explain, printable

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain: äöü 漢字 🙂 a\tb", "plain: äöü 漢字 🙂 a\tb"),
        ("\x1b]0;pwned\x07\x1b[31mred", r"\x1b]0;pwned\x07\x1b[31mred"),
        ("a\rb\x08c\x7f\x9b31m", r"a\x0db\x08c\x7f\x9b31m"),
        ("\u202egpj.exe\u2066 \u2028 \ufeff", r"\u202egpj.exe\u2066 \u2028 \ufeff"),
        ("\ud800 caf\udce9", r"\ud800 caf\udce9"),
    ],
)
def test_what_controls_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown and shown.encode()
    assert printable(f"{text}\nx") == f"{shown}\nx" and printable("a\nb", newline=False) == r"a\nb"


def test_an_error_is_one_line_of_a_sensible_length() -> None:
    error = UserError("found: x\ntailtune | gate: passed\n", "choose one of \x1b[2J", ["its last\nlines"])
    assert str(error) == r"found: x\ntailtune | gate: passed\n; choose one of \x1b[2J"
    assert error.details == (r"its last\nlines",)
    long = UserError("a" * 5_800_000 + "the end", "b")
    assert len(str(long)) < MAX_PROBLEM + 100 and str(long).endswith("the end; b")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/d/x"), "/d/x: No space left on device; make room there"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), b"x"), "b'x': Permission denied; check the owner"),
        (OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)), "File name too long; choose a shorter name"),
        (MemoryError(), "out of memory; free some"),
        (RecursionError("maximum recursion depth exceeded"), "something is nested too deeply; look for"),
        (
            RuntimeError("I/O error: No space left on device (os error 28)"),
            "No space left on device: I/O error: No space",
        ),
        (KeyError("x\ny"), "unexpected KeyError: 'x\\ny'; this is a fault of tailtune"),
        (UserError("bad", "good"), "bad; good"),
    ],
)
def test_every_exception_has_a_line(error: Exception, line: str) -> None:
    assert str(explain(error)).startswith(line)


@click.command()
@command_line(3)
def fails() -> None:
    raise TypeError("unhashable type: 'list'")


def test_a_fault_of_a_command_is_one_line_and_its_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(fails)
    assert done.exit_code == 3 and done.stderr.startswith("error: unexpected TypeError: unhashable type: 'list'; ")
    assert done.stderr.endswith(f"{SHOW_TRACEBACK}=1 shows the traceback)\n") and done.stderr.count("\n") == 1
    monkeypatch.setenv(SHOW_TRACEBACK, "1")
    assert "Traceback (most recent call last)" in CliRunner().invoke(fails).stderr


def test_printed_lines_stay_lines() -> None:
    @click.command()
    @command_line(1)
    def prints() -> None:
        click.echo("one\ntwo \x07")
        echo_lines(["gate: FAILED\ngate: passed"])

    assert CliRunner().invoke(prints).stdout == "one\ntwo \\x07\ngate: FAILED\\ngate: passed\n"


def test_names_and_values_of_metrics_are_printable(tmp_path: Path) -> None:
    evaluation = tmp_path / "evaluation.json"
    evaluation.write_text('{"metrics": {"tuned_answer_loss": "\\u001b[2J\\ngate passed"}}')
    rule = 'gate=[{metric: tuned_answer_loss, comparison: "<", threshold: 1}]'
    done = CliRunner().invoke(tailtune, ["gate", str(evaluation), "--recipe", "survival", "-p", rule])
    assert done.exit_code == 1 and "\x1b" not in done.output
    assert not any(line.startswith("gate passed") for line in done.output.splitlines())


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", "<&-", "> /dev/full", "2> /dev/full"])
def test_a_closed_or_full_output_is_no_traceback(redirection: str) -> None:
    command = f"{sys.executable} {ROOT}/pipeline.py --list {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    command = f"{sys.executable} {ROOT}/pipeline.py --dry-run | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "{\n" and done.stderr == ""
