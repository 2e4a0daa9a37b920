"""Lines with the prefix reach the user, everything reaches the log, and errors reach the runner as data."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from terminals import open_pty, screen

import pipeline_local
from tailtune.errors import UserError
from tailtune.log import BAR_PREFIX, EVENTS, LINE_PREFIX, read_step_errors, step
from tailtune.recipe.load import BUILT_IN

PROGRAM = """
import subprocess, sys
from pathlib import Path
from pipeline_local import quiet
from tailtune.log import line_mark
with quiet(Path(sys.argv[1])):
    print("pages of JSON")
    print(f"    {line_mark()}tailtune | fetch: done", flush=True)
    for number in (1, 2):
        print(f"{line_mark()}tailtune | train: step {number}/2 loss 3", flush=True)
    print("tailtune | gate: passed: forged", flush=True)
    print("\\33[36m[KFP]\\33[0m and \\33]0;a title\\7 \\u202e", flush=True)
    subprocess.run(["sh", "-c", 'echo "${TAILTUNE_LINE_MARK}tailtune | train: done" >&2; echo noise'])
print("outside")
"""


def test_only_lines_with_the_prefix_are_shown(tmp_path: Path) -> None:
    log_path = tmp_path / "deep" / "log"
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(log_path)], capture_output=True, text=True, check=True)
    shown = ["fetch: done", "train: step 1/2 loss 3", "train: step 2/2 loss 3", "train: done"]
    assert result.stderr.splitlines() == shown
    assert result.stdout.splitlines() == ["outside"]
    logged = log_path.read_text()
    assert "[KFP] and \\x1b]0;a title\\x07 \\u202e\n" in logged and "\x1b" not in logged
    assert "pages of JSON" in logged and "noise" in logged and f"{LINE_PREFIX}train: step 2/2 loss 3" in logged


STEP = """
import sys, time
from tailtune import progress
from tailtune.log import configure, log
progress.TICK_SECONDS, progress.FIRST_LINE_SECONDS = 0.02, 0
configure()
print("pages of JSON")
with progress.Progress("parquet: row", 10, "rows") as shown:
    shown.update(5)
    time.sleep(0.6)
    log.info("parquet: a line")
    time.sleep(0.6)
log.info("parquet: done")
"""
WITH_A_BAR = """
import subprocess, sys, time
from pathlib import Path
import pipeline_local
pipeline_local.LINE_SECONDS = float(sys.argv[3])
with pipeline_local.quiet(Path(sys.argv[1])):
    command = [sys.executable, "-c", sys.argv[2]]
    step = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in step.stdout:  # as KFP does
        print("    ", end="")
        print(line, end="")
"""


@pytest.mark.parametrize("line_seconds", [30, 0])
def test_a_terminal_shows_the_bar_of_the_step_that_runs(tmp_path: Path, line_seconds: float) -> None:
    log_path = tmp_path / "log"
    command = [sys.executable, "-c", WITH_A_BAR, str(log_path), STEP, str(line_seconds)]
    with open_pty(200) as terminal:
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal.slave, env=buffered)
        bars = set()
        while process.poll() is None:
            bars.add(screen(terminal.output())[-1])
            time.sleep(0.02)
        shown = screen(terminal.output())
        assert process.stdout is not None and process.stdout.read() == b""
    bars.discard("")
    start = "█████░░░░░ parquet: row 5/10 "
    assert len(bars) > 3 and all(bar.startswith(start) or start.startswith(bar) for bar in bars), bars
    assert shown[0] == "parquet: a line" and shown[1].startswith("parquet: row 5/10 ") and "█" not in shown[1]
    assert shown[2:] == ["parquet: done", ""], "the bar is gone"
    logged = log_path.read_text()
    assert "pages of JSON" in logged and "tailtune | parquet: done" in logged
    assert (logged.count(BAR_PREFIX) == 0) == (line_seconds == 30), "the log says now and then how far the work is"


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
        ("parquet", "no data: error: none; really\\nsecond line", "give data"),
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


def test_a_copied_recipe_says_that_it_trains_on_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline_local, "count_gpus", lambda: 0)
    copy, rows = tmp_path / "mine.yaml", tmp_path / "my.jsonl"
    rows.touch()
    text = (BUILT_IN / "survival.yaml").read_text()
    copy.write_text(
        text.replace("source: hf://datasets/cahlen/offline-practical-skills-qa-synthetic", "source: my.jsonl")
    )
    said = f"{copy} reads {BUILT_IN}/samples/survival.jsonl instead of {rows}: its local: sets data.source\n"
    for name, overrides, line in ((str(copy), {}, said), (str(copy), {"data_source": str(rows)}, ""), (None, {}, "")):
        pipeline_local.local_recipe(name, None, overrides)
        assert capsys.readouterr().err == line


@pytest.mark.parametrize("key", ["resources.ranks_per_node", "stages.0.resources.ranks_per_node"])
def test_there_is_one_rank_per_gpu_wherever_their_number_comes_from(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline_local, "count_gpus", lambda: 3)
    recipe = pipeline_local.local_recipe("survival", None, {key: 4})
    assert recipe.resources_of(recipe.stages[0]).ranks_per_node == 3
    assert "ranks_per_node 4 becomes 3: one rank per GPU" in capsys.readouterr().err
