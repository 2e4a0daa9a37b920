"""The pipeline on this machine: the same graph through kfp.local, one run at a time in runs/NAME/."""

import fcntl
import io
import os
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

from tailtune.errors import UserError
from tailtune.files import matching_paths
from tailtune.jobs.local import count_gpus
from tailtune.log import BAR_LINES, BAR_PREFIX, EVENTS, LINE_PREFIX, Terminal, read_step_errors
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


def run_local(pipeline: Callable[..., Any], parameters: dict[str, Any], recipe: Recipe, run_name: str) -> bool:
    """Run a recipe's pipeline on this machine in runs/NAME/. Return whether it succeeded."""
    from kfp import local
    from kfp.local import subprocess_task_handler

    subprocess_task_handler.replace_python_executable = _with_this_python
    directory = Path("runs").resolve() / run_name
    log_path = directory / "workspace" / "pipeline.log"
    with _lock(directory), _temporary_files() as temporary, _forward_stop() as stopped:
        click.echo(f"{recipe.name} in {relative(directory)}; all output in {relative(log_path)}", err=True)
        succeeded = True
        with quiet(log_path):
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
        errors = read_step_errors(temporary / EVENTS_FILE)
    if not succeeded:
        message = f"failed: a step ended without a word; see {relative(log_path)}"
        if stopped:
            message = f"stopped by a signal; run again with --run-name {run_name} to continue"
        elif errors:
            step, error = errors[0]
            message = f"failed: {step}: {error}".splitlines()[0]  # the other lines are in the log
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
    log_path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # KFP prints the steps' lines there, and they are shown at once
    terminal, saved = os.fdopen(os.dup(2), "w", encoding="utf-8"), (os.dup(1), os.dup(2))
    if terminal.isatty():
        os.environ[BAR_LINES] = "1"
    reader, writer = os.pipe()
    thread = threading.Thread(target=_copy_lines, args=(reader, terminal, log_path))
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
        terminal.close()
        os.environ.pop(BAR_LINES, None)


def _copy_lines(reader: int, stderr: TextIO, log_path: Path) -> None:
    """Copy every line to the log, lines with `LINE_PREFIX` to stderr, without it, and show the bar there."""
    terminal, bar_logged_at = Terminal(stderr), time.monotonic()
    with (
        os.fdopen(reader, errors="backslashreplace") as lines,
        log_path.open("a", encoding="utf-8") as log_file,
    ):
        for line in lines:
            _, is_bar, bar = line.rstrip("\n").partition(BAR_PREFIX)
            if is_bar:
                terminal.show_bar(bar)
                if not bar or time.monotonic() < bar_logged_at + LINE_SECONDS:
                    continue
                bar_logged_at = time.monotonic()
            log_file.write(line)
            log_file.flush()
            _, prefix, text = line.partition(LINE_PREFIX)
            if prefix:
                terminal.write(f"{text.rstrip(chr(10))}\n")
    terminal.show_bar("")


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Refuse a second run in the same directory at the same time."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write into {directory}: {error.strerror}", "start in another folder") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"run '{directory.name}' is in progress", "wait for it, or choose another --run-name"
            ) from None
        yield


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
        recipe = Run.from_json(stored.read_text(encoding="utf-8")).recipe
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
        path = Path(source).expanduser()
        if "://" not in source and source != "embedded" and not path.exists() and not matching_paths(path):
            raise UserError(
                f"data source {source} does not exist", "give -p data_source= a path, an address, or embedded"
            )
    model = recipe.model.base_model
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
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
    path = Path(value).expanduser()
    return str(path.resolve()) if path.exists() or matching_paths(path) else value
