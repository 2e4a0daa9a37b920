"""The pipeline on this machine: the same function through kfp.local, one run at a time in runs/NAME/."""

import fcntl
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from tailtune.errors import UserError
from tailtune.jobs.local import count_gpus
from tailtune.log import LINE_PREFIX
from tailtune.recipe.load import ENVIRONMENT, load_recipe, with_environment, with_local_overlay, with_overrides
from tailtune.recipe.schema import Recipe
from tailtune.run import Run, local_directories
from tailtune.signals import on_stop


def run_local(pipeline: Callable[..., Any], parameters: dict[str, Any], recipe: Recipe, run_name: str) -> bool:
    """Run a recipe's pipeline on this machine in runs/NAME/; whether it succeeded."""
    from kfp import local
    from kfp.local import subprocess_task_handler

    subprocess_task_handler.replace_python_executable = _with_this_python
    directory = Path("runs").resolve() / run_name
    log_path = directory / "workspace" / "pipeline.log"
    with _lock(directory), _temporary_files() as artifacts, _forward_stop() as stopped:
        click.echo(f"{recipe.name} in {relative(directory)}; all output in {relative(log_path)}", err=True)
        error: BaseException | None = None
        with quiet(log_path) as shown:
            local.init(local.SubprocessRunner(use_venv=False), pipeline_root=artifacts)
            try:
                pipeline(
                    **parameters,
                    **local_directories(directory),
                    run_name=run_name,
                    local=True,
                    recipe=recipe.to_json(),
                )
            except (RuntimeError, KeyboardInterrupt) as failure:  # KFP's own text names only the task
                error = failure
        if error:
            again = f"run again with --run-name {run_name} to go on"
            reason = shown[0] if shown else f"a step ended without a word; see {relative(log_path)}"
            click.echo(f"stopped by a signal; {again}" if stopped else f"failed: {reason}", err=True)
    judged = any(line.startswith("gate: ") for line in shown)  # the report of a rejected model is this run's too
    if (error is None or (judged and not stopped)) and (directory / "report.html").is_file():
        click.echo(f"report: {relative(directory / 'report.html')}", err=True)
    return error is None


def _with_this_python(command: list[str], executable: str) -> list[str]:
    """KFP's command of a step with another Python. KFP's own function changes `python3` in paths and data as well."""
    return [part.replace("python3", executable) if "kfp.dsl.executor_main" in part else part for part in command]


PROGRESS = re.compile(r"step \d+/\d+ ")


@contextmanager
def quiet(log_path: Path) -> Iterator[list[str]]:
    """Send the process's output to `log_path`; yield the list of the steps' errors, which are not shown."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    errors: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    terminal, saved = os.dup(2), (os.dup(1), os.dup(2))
    reader, writer = os.pipe()
    thread = threading.Thread(target=_pass_on, args=(reader, terminal, log_path, errors))
    thread.start()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield errors
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        thread.join()  # ends when every process that holds the pipe has ended
        os.close(terminal)


def _pass_on(reader: int, terminal: int, log_path: Path, errors: list[str]) -> None:
    """Copy lines to the log; show marked ones, the training's steps over each other on a terminal."""
    live = os.isatty(terminal)
    over_written = False
    with (
        os.fdopen(reader, errors="backslashreplace") as lines,
        log_path.open("a", encoding="utf-8") as log_file,
    ):
        for line in lines:
            log_file.write(line)
            log_file.flush()
            _, mark, text = line.partition(LINE_PREFIX)
            if not mark:
                continue
            text = text.rstrip("\n")
            if ": error: " in text:
                step, _, message = text.partition(": error: ")
                if f"{step}: {message}" not in errors:
                    errors.append(f"{step}: {message}")
                continue
            progress = live and bool(PROGRESS.search(text)) and "eval_loss" not in text
            start = "\r\x1b[K" if over_written else ""
            os.write(terminal, f"{start}{text}{'' if progress else chr(10)}".encode())
            over_written = progress


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Refuse a second run in the same directory at the same time."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write into {directory}: {error.strerror}; start in another folder") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"run '{directory.name}' is in progress; wait for it, or choose another --run-name"
            ) from None
        yield


@contextmanager
def _temporary_files() -> Iterator[str]:
    """A directory for KFP's artifacts and all temporary files of the steps, which KFP and torchrun leave behind."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="tailtune-", ignore_cleanup_errors=True) as directory:
        os.environ["TMPDIR"] = directory
        try:
            yield directory
        finally:
            del os.environ["TMPDIR"]
            os.environ |= {} if before is None else {"TMPDIR": before}


@contextmanager
def _forward_stop() -> Iterator[list[int]]:
    """SIGTERM and SIGINT reach the steps' processes, which save what they have; yields those received."""
    import psutil

    def forward(received: list[int]) -> None:
        steps = psutil.Process().children(recursive=True)
        for child in steps:
            with suppress(psutil.NoSuchProcess):
                if child.name() != "sh":  # KFP's shell around a step: its death would orphan the step
                    child.send_signal(signal.SIGTERM)
        if not steps:
            raise KeyboardInterrupt  # between two steps nobody else would stop

    with on_stop(forward) as received:
        yield received


def local_recipe(recipe_name: str | None, run_name: str | None, given: dict[str, Any]) -> Recipe:
    """The recipe of a local run: of the run that is continued, or the one that is named."""
    stored = Path("runs") / (run_name or ".") / "workspace" / "run.json"
    if recipe_name is None and run_name and stored.is_file():
        recipe = Run.from_json(stored.read_text(encoding="utf-8")).recipe
        click.echo(f"continuing {stored.parents[1]} with its own recipe", err=True)
    else:
        recipe = with_local_overlay(load_recipe(recipe_name or "survival"))
    recipe = with_overrides(recipe, given)
    for variable in sorted(name for name in ENVIRONMENT if os.environ.get(name)):
        click.echo(f"{variable}={os.environ[variable]} in the environment overrides {ENVIRONMENT[variable]}", err=True)
    recipe = with_environment(recipe, os.environ)
    num_gpus, num_ranks = count_gpus(), recipe.resources.ranks_per_node
    if 0 < num_gpus < num_ranks:
        click.echo(f"ranks_per_node {num_ranks} becomes {num_gpus}: one rank per GPU", err=True)
        recipe = with_overrides(recipe, {"ranks_per_node": num_gpus})
    source = recipe.data.source
    if "://" not in source and source != "embedded" and not Path(source).expanduser().is_file():
        raise UserError(f"data source {source} is no file; give -p data_source= a file's path, an address, or embedded")
    model = recipe.model.base_model
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise UserError(f"base model {model} is no directory; give -p base_model= a directory, OWNER/NAME, or small")
    return recipe


def relative(path: Path) -> str:
    """As a user types it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value not in ("", "small", "embedded") and Path(value).expanduser().exists()


def local_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """`-p` values with existing paths made absolute: relative ones are the user's, not the run's."""
    path_keys = ("data_source", "data.source", "base_model", "model.base_model")
    return {key: str(Path(value).expanduser().resolve())
            if key in path_keys and _is_path(value) else value
            for key, value in parameters.items()}  # fmt: skip
