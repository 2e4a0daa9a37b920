"""Lines with the prefix reach the user, everything reaches the log, and errors reach the runner as data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tailtune.errors import UserError
from tailtune.log import EVENTS, LINE_PREFIX, log, read_step_errors, step

PROGRAM = """
import subprocess, sys
from pathlib import Path
from pipeline_local import quiet
with quiet(Path(sys.argv[1])):
    print("pages of JSON")
    print("    tailtune | fetch: done", flush=True)
    for number in (1, 2):
        print(f"tailtune | train: step {number}/2 loss 3", flush=True)
    subprocess.run(["sh", "-c", "echo 'tailtune | train: done' >&2; echo noise"])
print("outside")
"""


def test_only_lines_with_the_prefix_are_shown(tmp_path: Path) -> None:
    log_path = tmp_path / "deep" / "log"
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(log_path)], capture_output=True, text=True, check=True)
    shown = ["fetch: done", "train: step 1/2 loss 3", "train: step 2/2 loss 3", "train: done"]
    assert result.stderr.splitlines() == shown
    assert result.stdout.splitlines() == ["outside"]
    logged = log_path.read_text()
    assert "pages of JSON" in logged and "noise" in logged and f"{LINE_PREFIX}train: step 2/2 loss 3" in logged


@pytest.fixture
def stderr_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log goes to the stderr of the test."""
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)


def end_with(error: UserError, name: str = "parquet") -> None:
    with pytest.raises(SystemExit) as stop, step(name):
        raise error
    assert stop.value.code == 1


@pytest.mark.usefixtures("stderr_log")
def test_a_step_reports_its_error_as_data_and_leaves_it_to_the_runner_to_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(EVENTS, str(path))
    end_with(UserError("no data: error: none; really\nsecond line", "give data"))
    end_with(UserError("the model did not pass the gate"), "gate")
    assert json.loads(path.read_text().splitlines()[1]) == {
        "step": "gate", "problem": "the model did not pass the gate", "remedy": ""}  # fmt: skip
    errors = [(name, error.problem, error.remedy) for name, error in read_step_errors(path)]
    assert errors == [
        ("parquet", "no data: error: none; really\nsecond line", "give data"),
        ("gate", "the model did not pass the gate", ""),
    ]
    shown = capsys.readouterr().err
    assert "gate: error: the model did not pass the gate\n" in shown and LINE_PREFIX not in shown


@pytest.mark.usefixtures("stderr_log")
def test_without_a_reader_of_events_a_step_logs_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(EVENTS, raising=False)
    end_with(UserError("no data", "give data"))
    assert capsys.readouterr().err == f"{LINE_PREFIX}parquet: error: no data; give data\n"
    assert read_step_errors(tmp_path / "events.jsonl") == []
