"""Which pipeline run a run's directories belong to, when several have the same name."""

from collections.abc import Callable
from pathlib import Path

from tailtune.errors import UserError
from tailtune.files import read_json, write_json
from tailtune.run import Run

MAX_FORMER = 100
"""How many earlier owners are remembered."""
WORKFLOW_GONE = "delete the run in the dashboard if its workflow is gone"
"""Remedy for a run whose workflow somebody has deleted: for the pipeline server, it is RUNNING for ever."""


def take_ownership(run: Run, is_active: Callable[[str], bool]) -> None:
    """Make this pipeline run the owner of the run's directories.

    Raises UserError as `refuse_if_not_free` does. Of two that start at the same moment, the last one to write owns
    them, and `refuse_if_taken_over` ends the other.
    """
    refuse_if_not_free(run, is_active)
    owner, former = _read(run.owner_path)
    if owner != run.pipeline_run:
        former = [*former, owner][-MAX_FORMER:] if owner else []
        write_json(run.owner_path, {"pipeline_run": run.pipeline_run, "former": former})


def refuse_if_not_free(run: Run, is_active: Callable[[str], bool]) -> None:
    """Raise UserError if the directories belong to another pipeline run that has not ended, by `is_active(id)`.

    An earlier owner does not get them back: what its finished steps wrote may be replaced.
    """
    owner, former = _read(run.owner_path)
    if owner in ("", run.pipeline_run):
        return
    if run.pipeline_run in former:
        raise _taken_over(owner)
    if is_active(owner):
        raise in_progress(run.name, owner)


def in_progress(name: str, pipeline_run: str) -> UserError:
    """The error for a second run of a name."""
    return UserError(
        f"run '{name}' is already in progress, as pipeline run {pipeline_run}",
        f"wait for it, end it with python pipeline.py --cancel {pipeline_run}, choose another --run-name, or "
        f"{WORKFLOW_GONE}",
    )


def own_run(run_json: str) -> Run:
    """The run of a step that goes on with what earlier steps wrote. Raises UserError if another has taken it over."""
    run = Run.from_json(run_json)
    refuse_if_taken_over(run.owner_path, run.pipeline_run)
    return run


def refuse_if_taken_over(path: Path, pipeline_run: str) -> None:
    """Raise UserError when the file names another pipeline run as the owner."""
    owner = read_owner(path)
    if owner not in ("", pipeline_run):
        raise _taken_over(owner)


def read_owner(path: Path) -> str:
    """Return the owner's id, empty if there is none."""
    return _read(path)[0]


def _taken_over(owner: str) -> UserError:
    return UserError(
        f"pipeline run {owner} has taken over this run's directories, so nothing more is saved",
        "let that run finish, or give each run a --run-name of its own; to go on here, submit again, do not retry",
    )


def _read(path: Path) -> tuple[str, list[str]]:
    """The id of the owner, empty if there is none, and those of earlier owners, oldest first."""
    content = read_json(path)
    if not isinstance(content, dict):
        return "", []
    return str(content.get("pipeline_run", "")), list(content.get("former", []))
