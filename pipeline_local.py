"""The pipeline on this machine: the same graph through kfp.local, one run at a time in runs/NAME/."""

import io
import os
import re
import secrets
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import click

from tailtune.errors import UserError, explain, printable
from tailtune.files import matching_paths
from tailtune.jobs.local import count_gpus
from tailtune.lifeline import lifeline, locked, processes_lock
from tailtune.log import BAR_LINES, BAR_PREFIX, EVENTS, LINE_MARK, LINE_PREFIX, Terminal, read_step_errors
from tailtune.progress import LINE_SECONDS
from tailtune.recipe.load import (
    ENVIRONMENT,
    PATH_KEYS,
    list_recipes,
    load_recipe,
    with_environment,
    with_local_overlay,
    with_overrides,
)
from tailtune.recipe.schema import Recipe, show_sources
from tailtune.run import Run, local_directories
from tailtune.signals import on_stop

EVENTS_FILE = "events.jsonl"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""What KFP colours its own lines with."""
WAIT_SECONDS = 60
"""How long a start waits for what an earlier one of the same run has left, and which is saving a checkpoint."""


def run_local(pipeline: Callable[..., Any], parameters: dict[str, Any], recipe: Recipe, run_name: str) -> bool:
    """Run a recipe's pipeline on this machine in runs/NAME/. Return whether it succeeded."""
    from kfp import local
    from kfp.local import subprocess_task_handler

    subprocess_task_handler.replace_python_executable = _with_this_python
    directory = Path("runs").resolve() / run_name
    log_path = directory / "workspace" / "pipeline.log"
    with _lock(directory), _temporary_files() as temporary, _forward_stop() as stopped:
        click.echo(f"{recipe.name} in {relative(directory)}; all output in {relative(log_path)}", err=True)
        succeeded, failure = True, f"failed: a step ended without a word; see {relative(log_path)}"
        with quiet(log_path), lifeline(processes_lock(directory)):
            local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(temporary))
            try:
                pipeline(
                    **parameters,
                    **local_directories(directory),
                    run_name=run_name,
                    local=True,
                    recipe=recipe.to_json(),
                )
            except (RuntimeError, KeyboardInterrupt):  # KFP's own text names only the task
                succeeded = False
            except OSError as error:
                succeeded, failure = False, f"failed: {explain(error)}"
        errors = read_step_errors(temporary / EVENTS_FILE)
    if not succeeded:
        message = failure
        if stopped:
            message = f"stopped by a signal; run again with --run-name {run_name} to continue"
        elif errors:
            step, reported = errors[0]
            message = f"failed: {step}: {reported}"
        click.echo(message, err=True)
    judged = any(step == "gate" for step, _ in errors)  # a rejected model has a report too
    if (succeeded or (judged and not stopped)) and (directory / "report.html").is_file():
        click.echo(f"report: {relative(directory / 'report.html')}", err=True)
    return succeeded


def _with_this_python(command: list[str], executable: str) -> list[str]:
    """Return KFP's command of a step with another Python, which imports nothing from the working directory (`-P`).

    KFP's own function would change `python3` in data too.
    """
    python = f"{shlex.quote(executable)} -P"
    return [part.replace("python3", python) if "kfp.dsl.executor_main" in part else part for part in command]


@contextmanager
def quiet(log_path: Path) -> Iterator[None]:
    """Send the output of this process and its children to `log_path`, and to stderr only tailtune's own lines.

    If stderr is a terminal, it also shows the progress bar, which the log describes in a line at most every 30 seconds.
    """
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_file = log_path.open("ab", buffering=0)
    except OSError as error:
        raise UserError(f"the log cannot be written: {explain(error).problem}", explain(error).remedy) from None
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # KFP prints the steps' lines there, and they are shown at once
    terminal, saved = os.fdopen(os.dup(2), "w", encoding="utf-8"), (os.dup(1), os.dup(2))
    if terminal.isatty():
        os.environ[BAR_LINES] = "1"
    mark = os.environ[LINE_MARK] = f"{secrets.token_hex(8)} "
    reader, writer = os.pipe()
    thread = threading.Thread(target=_copy_lines, args=(reader, mark, terminal, log_file))
    thread.start()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        thread.join()  # ends when every process that holds the pipe has ended
        with suppress(OSError):  # nobody reads it any more
            terminal.close()
        log_file.close()
        os.environ.pop(BAR_LINES, None)
        del os.environ[LINE_MARK]


def _copy_lines(reader: int, mark: str, stderr: TextIO, log_file: io.RawIOBase) -> None:
    """Copy every line to the log, lines with the mark to stderr, without mark and prefix, and show the bar there.

    A reader of stderr that has gone, or a log that cannot be written any more, does not stop the run.
    """
    terminal: Terminal | None = Terminal(stderr)
    log_is_written, bar_logged_at = True, time.monotonic()

    def show(action: Callable[[Terminal], None]) -> None:
        nonlocal terminal
        try:
            if terminal:
                action(terminal)
        except OSError:
            terminal = None

    def write(line: str) -> None:
        nonlocal log_is_written
        try:
            log_file.write(f"{line}\n".encode())
            log_is_written = True
        except OSError as error:
            if log_is_written:
                reason = error.strerror
                show(lambda terminal: terminal.write(f"lines are missing in the log: {reason}\n"))
            log_is_written = False

    with os.fdopen(reader, encoding="utf-8", errors="backslashreplace") as lines:
        for raw in lines:
            line = printable(COLOURS.sub("", raw.rstrip("\n")), newline=False)
            before, is_bar, bar = line.partition(mark + BAR_PREFIX)
            if is_bar:
                show(lambda terminal, bar=bar: terminal.show_bar(bar))  # type: ignore[misc]
                if bar and time.monotonic() >= bar_logged_at + LINE_SECONDS:
                    bar_logged_at = time.monotonic()
                    write(f"{before}{BAR_PREFIX}{bar}")
                continue
            before, is_ours, text = line.partition(mark + LINE_PREFIX)
            write(f"{before}{LINE_PREFIX}{text}" if is_ours else line)
            if is_ours:
                show(lambda terminal, text=text: terminal.write(f"{text}\n"))  # type: ignore[misc]
    show(lambda terminal: terminal.show_bar(""))


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Refuse a second run in the same directory as long as any process of the first is alive."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".lock").touch()
    except OSError as error:
        raise UserError(f"cannot write into {directory}: {error.strerror}", "start in another folder") from None
    for seconds in range(WAIT_SECONDS, -1, -1):
        with locked(directory) as taken:
            if not taken:
                yield
                return
        if taken == "run":
            break
        if seconds == WAIT_SECONDS:
            click.echo("waiting for the processes of an earlier start, which save and end", err=True)
        time.sleep(1)
    raise UserError(f"run '{directory.name}' is in progress", "wait for it, or choose another --run-name")


@contextmanager
def _temporary_files() -> Iterator[Path]:
    """Yield a directory for KFP's artifacts, the steps' events, and the temporary files that KFP and torchrun leave."""
    with tempfile.TemporaryDirectory(prefix="tailtune-", ignore_cleanup_errors=True) as directory:
        variables = {"TMPDIR": directory, EVENTS: str(Path(directory) / EVENTS_FILE)}
        before = {name: os.environ[name] for name in variables if name in os.environ}
        os.environ |= variables
        try:
            yield Path(directory)
        finally:
            for name in variables:
                del os.environ[name]
            os.environ |= before


@contextmanager
def _forward_stop() -> Iterator[list[int]]:
    """Pass SIGTERM and SIGINT on to the steps' processes, which save what they have; yield the signals received."""
    import psutil

    def forward(received: list[int]) -> None:
        steps = psutil.Process().children(recursive=True)
        for child in steps:
            with suppress(psutil.NoSuchProcess):
                if child.name() != "sh":  # KFP's shell around a step: its death would orphan the step
                    child.send_signal(signal.SIGTERM)
        if not steps:
            raise KeyboardInterrupt  # between two steps, nothing else would stop

    with on_stop(forward) as received:
        yield received


def local_recipe(recipe_name: str | None, run_name: str | None, overrides: dict[str, Any]) -> Recipe:
    """Return the recipe of a local run: that of the run to continue, or the named one with its `local:` overlay."""
    stored = Path("runs") / (run_name or ".") / "workspace" / "run.json"
    if recipe_name is None and run_name and stored.is_file():
        recipe = Run.from_json(stored.read_text(encoding="utf-8", errors="replace")).recipe
        click.echo(f"continuing {stored.parents[1]} with its own recipe", err=True)
    else:
        loaded = load_recipe(recipe_name or "survival")
        recipe = with_local_overlay(loaded)
        replaced = recipe.data.source != loaded.data.source and not {"data_source", "data.source"} & overrides.keys()
        if replaced and recipe_name and recipe_name not in list_recipes():  # a copy of survival trains on its samples
            used, own = show_sources(recipe.data.source), show_sources(loaded.data.source)
            click.echo(f"{recipe_name} reads {used} instead of {own}: its local: sets data.source", err=True)
    recipe = with_overrides(recipe, overrides)
    for variable in sorted(name for name in ENVIRONMENT if os.environ.get(name)):
        click.echo(f"{variable}={os.environ[variable]} in the environment overrides {ENVIRONMENT[variable]}", err=True)
    recipe = with_environment(recipe, os.environ)
    num_gpus = count_gpus()
    for index, stage in enumerate(recipe.stages):
        num_ranks = recipe.resources_of(stage).ranks_per_node
        if 0 < num_gpus < num_ranks:
            click.echo(f"ranks_per_node {num_ranks} becomes {num_gpus}: one rank per GPU", err=True)
            recipe = with_overrides(recipe, {recipe.resource_key(index, "ranks_per_node"): num_gpus})
    for source in recipe.data.all_sources:
        path = Path(os.path.expanduser(source))
        if "://" not in source and source != "embedded" and not path.exists() and not matching_paths(path):
            raise UserError(
                f"data source {source} does not exist", "give -p data_source= a path, an address, or embedded"
            )
    model = recipe.model.base_model
    if model.startswith(("/", ".", "~")) and not Path(os.path.expanduser(model)).is_dir():
        remedy = "give -p base_model= a directory, OWNER/NAME, or small"
        raise UserError(f"base model {model} is not a directory", remedy)
    return recipe


def relative(path: Path) -> str:
    """Return the path as a user would type it: relative where it is below the current directory."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def local_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the `-p` values with existing paths made absolute: relative ones are the user's, not the run's."""
    return {key: _absolute(value) if key in PATH_KEYS else value for key, value in parameters.items()}


def _absolute(value: Any) -> Any:
    if isinstance(value, list):
        return [_absolute(each) for each in value]
    if not isinstance(value, str) or value in ("", "small", "embedded"):
        return value
    path = Path(os.path.expanduser(value))
    return str(path.resolve()) if path.exists() or matching_paths(path) else value
