"""Runs that are killed, whose output nobody reads, or whose disk is full, are finished by the same command.

The weights are then those of an undisturbed run, and no process is left.
"""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from pipelines import start, write_recipe

LONG = {"stages.0.trainer.num_train_epochs": 4, "stages.0.trainer.logging_steps": 11}
DEADLINE_SECONDS = 300


def weights(folder: Path, name: str) -> str:
    path = folder / "runs" / name / "models" / "best_model" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def processes_of(folder: Path) -> list[psutil.Process]:
    """All processes that a run below the folder has started, however deep, and also when their starter is gone."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("TAILTUNE_TEST_RUN") == str(folder):
                found.append(process)
    return found


def finish(folder: Path, recipe: Path, name: str) -> str:
    """Finish a run by the same command; return what it printed."""
    process = start(folder, "--recipe", str(recipe), "--run-name", name)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, err
    wait_until_gone(folder)
    return err


def wait_until_gone(folder: Path, seconds: float = 60) -> None:
    give_up_at = time.monotonic() + seconds
    while left := processes_of(folder):
        assert time.monotonic() < give_up_at, [process.cmdline() for process in left]
        time.sleep(0.1)


def wait_for_step(process: "subprocess.Popen[str]") -> None:
    """Read the output until training has logged a step."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("train: step"):
            return
    raise AssertionError("it ended before a training step")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAILTUNE_TEST_RUN", str(tmp_path))
    return tmp_path


def whole_tree(folder: Path, started: "subprocess.Popen[str]") -> list[psutil.Process]:
    return processes_of(folder)


def pipeline_alone(folder: Path, started: "subprocess.Popen[str]") -> list[psutil.Process]:
    return [psutil.Process(started.pid)] if started.poll() is None else []


def with_words(*words: str) -> Callable[[Path, "subprocess.Popen[str]"], list[psutil.Process]]:
    def find(folder: Path, started: "subprocess.Popen[str]") -> list[psutil.Process]:
        found = []
        for process in processes_of(folder):
            with suppress(psutil.Error):
                command = process.cmdline()
                if command[:1] != ["sh"] and all(any(word in part for part in command) for word in words):
                    found.append(process)
        return found[:1]

    return find


VICTIMS = {
    "tree": whole_tree,
    "pipeline": pipeline_alone,
    "step": with_words("kfp.dsl.executor_main"),
    "torchrun": with_words("tailtune.train.torchrun"),
    "rank": with_words("tailtune.train", "--model-dir"),
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize(("victim", "number"), [("pipeline", signal.SIGKILL), ("pipeline", signal.SIGHUP)])
def test_a_trainer_does_not_outlive_its_run(folder: Path, victim: str, number: signal.Signals) -> None:
    """The second start has another learning rate: what it reports must be about the weights that are there."""
    recipe = write_recipe(folder, **LONG)
    command = ("--recipe", str(recipe), "--run-name", "x")
    first = start(folder, *command, "-p", "learning_rate=1e-3", "-p", "epochs=40")
    wait_for_step(first)
    for process in VICTIMS[victim](folder, first):
        process.send_signal(number)
    if number != signal.SIGKILL:
        _, err = first.communicate(timeout=DEADLINE_SECONDS)
        assert err.endswith("stopped by a signal; run again with --run-name x to continue\n"), err
    second = start(folder, *command, "-p", "learning_rate=1e-6")
    _, err = second.communicate(timeout=DEADLINE_SECONDS)
    assert (
        second.returncode == 1 and "this run was trained with other settings: stages.0.trainer.learning_rate" in err
    ), err  # the first has saved a checkpoint, and ended
    wait_until_gone(folder)
    assert not (folder / "runs" / "x" / "models" / "best_model").exists()


def test_output_whose_reader_is_gone_does_not_stop_a_run(folder: Path) -> None:
    recipe = write_recipe(folder)
    process = start(folder, "--recipe", str(recipe), "--run-name", "x")
    wait_for_step(process)
    assert process.stderr is not None and process.stdout is not None
    process.stderr.close()
    process.stdout.close()
    assert process.wait(timeout=DEADLINE_SECONDS) == 0
    assert (folder / "runs" / "x" / "report.html").is_file()
    assert "report: " in (folder / "runs" / "x" / "workspace" / "pipeline.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments(folder: Path, seed: int) -> None:
    """25 kills for each seed."""
    recipe = write_recipe(folder, **LONG)
    start_time = time.monotonic()
    finish(folder, recipe, "whole")
    duration = time.monotonic() - start_time
    expected, generator = weights(folder, "whole"), random.Random(seed)
    kills, runs = 0, 0
    while kills < 25:
        runs += 1
        name = f"run-{runs}"
        for _ in range(4):  # and then it may finish
            victim, number = generator.choice(list(VICTIMS)), generator.choice(SIGNALS)
            process = start(folder, "--recipe", str(recipe), "--run-name", name)
            give_up_at = time.monotonic() + generator.uniform(0, duration)
            while time.monotonic() < give_up_at and process.poll() is None:
                time.sleep(0.05)
            while not (found := VICTIMS[victim](folder, process)) and process.poll() is None:
                time.sleep(0.02)
            for each in found:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)
            kills += bool(found)
            process.communicate(timeout=DEADLINE_SECONDS)
        err = finish(folder, recipe, name)
        assert weights(folder, name) == expected, (name, err)


def fill(disk: Path) -> Callable[[], None]:
    """Leave no byte on the disk; return what makes room again."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16) if shutil.disk_usage(disk).free > 1 << 16 else b"0")
    return filler.unlink


def make_immutable(disk: Path) -> Callable[[], None]:
    """Let nothing be created, renamed or deleted on the disk, also by root; return what allows it again."""
    directories = [str(path) for path in [disk, *disk.rglob("*")] if path.is_dir()]
    subprocess.run(["chattr", "-f", "+i", *directories])  # some may be gone by now

    def undo() -> None:
        subprocess.run(["chattr", "-f", "-R", "-i", str(disk)])

    return undo


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("fault", [fill, make_immutable])
def test_a_disk_that_is_full_or_read_only_at_random_moments(
    folder: Path, fault: Callable[[Path], Callable[[], None]]
) -> None:
    """25 times each."""
    disk = folder / "runs"
    disk.mkdir()
    recipe = write_recipe(folder, **LONG)
    options = ["-t", "tmpfs", "-o", "size=200m", "none"]
    if fault is fill:
        subprocess.run(["mount", *options, str(disk)], check=True)
    elif subprocess.run(["chattr", "+i", str(disk)], capture_output=True).returncode:
        pytest.skip("this file system has no immutable directories")
    else:
        subprocess.run(["chattr", "-i", str(disk)], check=True)
    try:
        start_time = time.monotonic()
        finish(folder, recipe, "whole")
        duration = time.monotonic() - start_time
        expected, generator = weights(folder, "whole"), random.Random(7)
        failed = 0
        for number in range(25):
            process = start(folder, "--recipe", str(recipe), "--run-name", "x")
            time.sleep(generator.uniform(0, duration))
            undo = fault(disk)
            try:
                _, err = process.communicate(timeout=DEADLINE_SECONDS)
            finally:
                undo()
            wait_until_gone(folder)
            if process.returncode:
                failed += 1
                last = err.splitlines()[-1]
                assert last.startswith(("failed: ", "error: ")) and "Traceback" not in err, err
                assert "without a word" not in err and "unexpected" not in last, err
            if number % 5 == 4 or not process.returncode:
                finish(folder, recipe, "x")
                assert weights(folder, "x") == expected
                shutil.rmtree(disk / "x")
        assert failed > 5, "the fault came too late each time"
    finally:
        if fault is fill:
            subprocess.run(["umount", "-l", str(disk)], check=True)
