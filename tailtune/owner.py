"""Which pipeline run a run's directories belong to, when several have the same name."""

from collections.abc import Callable
from pathlib import Path

from tailtune.errors import UserError
from tailtune.files import read_json, write_json
from tailtune.run import Run

WORKFLOW_GONE = "delete the run in the dashboard if its workflow is gone"
"""Remedy for a run whose workflow somebody has deleted: for the pipeline server, it is RUNNING for ever."""


def take_ownership(run: Run, is_active: Callable[[str], bool]) -> None:
    """Make this pipeline run the owner of the run's directories.

    Raises UserError while the owner is another pipeline run that has not ended, according to `is_active(id)`. Of two
    that start at the same moment, the last one to write owns them, and `refuse_if_taken_over` ends the other.
    """
    owner = read_owner(run.owner_path)
    if owner not in ("", run.pipeline_run) and is_active(owner):
        raise in_progress(run.name, owner)
    write_json(run.owner_path, {"pipeline_run": run.pipeline_run})


def in_progress(name: str, pipeline_run: str) -> UserError:
    """The error for a second run of a name."""
    return UserError(
        f"run '{name}' is already in progress, as pipeline run {pipeline_run}",
        f"wait for it, end it with python pipeline.py --cancel {pipeline_run}, choose another --run-name, or "
        f"{WORKFLOW_GONE}",
    )


def refuse_if_taken_over(path: Path, pipeline_run: str) -> None:
    """Raise UserError when the file names another pipeline run as the owner."""
    owner = read_owner(path)
    if owner not in ("", pipeline_run):
        raise UserError(
            f"pipeline run {owner} has taken over this run's directories, so nothing more is saved",
            "let that run finish, or give each run a --run-name of its own",
        )


def read_owner(path: Path) -> str:
    """Return the owner's id, empty if there is none."""
    content = read_json(path)
    return str(content.get("pipeline_run", "")) if isinstance(content, dict) else ""
