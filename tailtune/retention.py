"""What old runs may lose, so that a schedule does not fill the volumes.

The newest `keep_runs` runs keep everything, and so does a run that is in progress. Older runs lose what training would
write again: checkpoints and the base model. The newest `keep_models` promoted runs keep their model and data, and so
does the newest promoted run of each base model and data source; all others lose them. Reports, verdicts, metrics and
logs stay, and so does every file that tailtune has not written. A run with a name of its own, and not that of its
pipeline run, is somebody's experiment: only `tailtune gc --runs --named` counts and removes those.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tailtune.errors import UserError
from tailtune.files import delete_garbage, discard, num_bytes, read_json, write_json
from tailtune.lifeline import locked
from tailtune.log import log
from tailtune.manifest import MANIFEST, partial_directory, read_manifest
from tailtune.owner import read_owner
from tailtune.recipe.schema import Recipe
from tailtune.run import Run, RunDirectories
from tailtune.shared_cache import unused_entries

REMOVED = "removed.json"
"""File of a run's directory on a volume: what retention has removed from it, and when."""
QUIET_SECONDS = 7 * 24 * 3600
"""Where the cluster cannot be asked, a run without a report has ended when nothing in it has changed for this long: the
pipeline server starts no other attempt of a step after a week."""
CHECKPOINTS = re.compile(r"checkpoint-\d+|attempts\.jsonl")
STORE_ENTRY = re.compile(r"(?P<entry>.+--.+@[0-9a-f]{40})(\.partial|\.old|\.lease)?")
"""Names in the store of base models."""


@dataclass(frozen=True)
class StoredRun:
    """A run on the volumes, as its files describe it."""

    place: RunDirectories
    recipe: str
    line: tuple[str, str]
    """Base model and data source: two schedules of one recipe are two lines."""
    pipeline_run: str
    started_at: float
    changed_at: float
    """When the last of its steps left something. Seconds since 1970, as `started_at`."""
    trained: bool
    promoted: bool
    keep_runs: int | None
    keep_models: int | None

    @property
    def is_named(self) -> bool:
        return self.place.name != self.pipeline_run


@dataclass(frozen=True)
class Removal:
    """What one run loses, or what no run needs any more."""

    title: str
    why: str
    sizes: dict[Path, int]
    """Bytes of each file or directory."""
    place: RunDirectories | None = None

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{path.name} {in_words(size) if size else ''}".strip() for path, size in self.sizes.items())
        return f"{self.title}: {in_words(self.num_bytes)} ({parts}): {self.why}"


def remove_old_runs(run: Run) -> None:
    """Remove what old runs of the same recipe may lose. The first step of a run on a cluster calls it before it writes.

    A run on one machine removes nothing. What cannot be removed is logged and left.
    """
    keep_runs, keep_models = run.recipe.keep_runs, run.recipe.keep_models
    if run.local or keep_runs is None:
        return
    try:
        stored = stored_runs(run)
        is_active = _ask_cluster(run.name)
        runs = [each for each in stored if each.recipe == run.recipe.name and not each.is_named]
        removals = plan(runs, keep_runs, keep_models, is_active, _in_use(stored, is_active))
        done = 0
        for removal in [*removals, *unused(run, stored, removals, keep_runs, is_active)]:
            log.info("retention: %s", removal)
            done += remove(removal)
        _delete_leftovers(run, stored)
    except OSError as error:  # a run must not fail because of what others have left
        log.warning("retention: old runs are not removed: %s", error)
        return
    if done:
        log.info("retention: %s removed; keep_runs is %s, keep_models is %s", in_words(done), keep_runs, keep_models)


def collect_runs(
    layout: RunDirectories, *, keep_runs: int | None, keep_models: int | None, named: bool, dry_run: bool
) -> Iterator[tuple[str, int]]:
    """Remove what old runs of every recipe may lose; yield a line and the bytes for each run.

    `layout` is any run in the place. The numbers are those of each recipe's newest run where they are not given.
    """
    stored = stored_runs(layout)
    is_active = _has_lock if layout.local else _seems_active
    runs = [each for each in stored if named or not each.is_named]
    in_use, removals, largest = _in_use(stored, is_active), [], 0
    for recipe in sorted({each.recipe for each in runs}):
        of_recipe = [each for each in runs if each.recipe == recipe]
        num_runs, num_models = keep_runs or of_recipe[0].keep_runs, keep_models or of_recipe[0].keep_models
        removals += plan(of_recipe, num_runs, num_models, is_active, in_use)
        largest = max(largest, num_runs or len(stored))
    for removal in [*removals, *unused(layout, stored, removals, largest or len(stored), is_active)]:
        yield str(removal), removal.num_bytes if dry_run else remove(removal)
    if not dry_run:
        _delete_leftovers(layout, stored)


def stored_runs(layout: RunDirectories) -> list[StoredRun]:
    """Return the runs in the same place, the last one to change first. Runs with linked directories are left out."""
    runs = []
    for place in layout.siblings():
        if place.is_linked:
            log.info("retention: run %s is left alone: one of its directories is a link", place.name)
            continue
        document = read_json(place.run_path) or {}
        if document.get("name") == place.name and isinstance(document.get("recipe"), dict):  # else a copy, or another's
            runs.append(_read_run(place, document))
    return sorted(runs, key=lambda run: run.changed_at, reverse=True)


def _read_run(place: RunDirectories, document: dict[str, Any]) -> StoredRun:
    """Describe a run from its `run.json`, which another version may have written."""
    recipe = document["recipe"]
    traces = (place.run_path, place.checkpoints_dir, place.best_model_dir / MANIFEST, place.verdict_path)
    has_model = read_manifest(place.best_model_dir) is not None
    verdict = read_json(place.verdict_path)
    return StoredRun(
        place=place,
        recipe=str(recipe.get("name", "")),
        line=(str((recipe.get("model") or {}).get("base_model")), str((recipe.get("data") or {}).get("source"))),
        pipeline_run=read_owner(place.owner_path) or str(document.get("pipeline_run", "")),
        started_at=place.run_path.stat().st_mtime,
        changed_at=max(path.stat().st_mtime for path in traces if path.exists()),
        trained=has_model or any(place.checkpoints_dir.glob("checkpoint-*")),
        promoted=has_model and isinstance(verdict, dict) and verdict.get("passed") is True,
        keep_runs=recipe.get("keep_runs", Recipe.model_fields["keep_runs"].default),
        keep_models=recipe.get("keep_models", Recipe.model_fields["keep_models"].default),
    )


# --- what may go ------------------------------------------------------------------------------------


def plan(
    runs: list[StoredRun],
    keep_runs: int | None,
    keep_models: int | None,
    is_active: Callable[[StoredRun], bool],
    in_use: set[Path],
) -> list[Removal]:
    """Return what the runs of one recipe, the newest first, may lose, as in the module's description.

    A model that is `in_use` stays.
    A run that ended before it trained, for example for lack of new data, does not take the place of one that trained.
    """
    num_runs = num_trained = num_promoted = 0
    lines: set[tuple[str, str]] = set()
    removals: list[Removal] = []
    if keep_runs is None:
        return []
    for run in runs:
        repeatable, lasting = _repeatable_parts(run.place), _lasting_parts(run.place)
        if not (repeatable or lasting) or is_active(run):
            continue
        is_whole = num_runs < keep_runs or (run.trained and num_trained < keep_runs)
        is_newest = run.promoted and run.line not in lines
        keeps_model = run.promoted and (is_newest or keep_models is None or num_promoted < keep_models)
        num_runs, num_trained, num_promoted = num_runs + 1, num_trained + run.trained, num_promoted + run.promoted
        lines |= {run.line} if run.promoted else set()
        if is_whole:
            continue
        for directory in (
            run.place.checkpoints_dir,
            run.place.best_model_dir,
            run.place.raw_dir,
            run.place.parquet_dir,
        ):
            if others := _others(directory):
                shown = ", ".join(sorted(others)[:3])
                log.warning("retention: %s is left alone: tailtune has not written %s in it", directory, shown)
        if keeps_model:
            parts = [part for part in repeatable if not (is_newest and part == run.place.base_model_dir)]
            why = "the model stays"
        else:
            parts = [part for part in repeatable + lasting if part not in in_use]
            why = f"older than the {f'{keep_models} newest promoted' if run.promoted else f'{keep_runs} newest'}"
        if parts:
            removals.append(Removal(f"run {run.place.name}", why, _sizes(parts), run.place))
    return removals


def _in_use(stored: list[StoredRun], is_active: Callable[[StoredRun], bool]) -> set[Path]:
    """Return the directories that the recipes of runs name as their base model: another run's model, for example."""
    named = [run for run in stored if Path(run.line[0]).is_absolute()]
    return {Path(os.path.normpath(run.line[0])) for run in named if run.trained or is_active(run)}


def _sizes(paths: list[Path]) -> dict[Path, int]:
    return {path: num_bytes(path) for path in paths}


def _repeatable_parts(place: RunDirectories) -> list[Path]:
    """What training writes again: checkpoints, the base model if it is from the hub, and what killed steps have left.

    Links stay, except the one to the store of base models: they are somebody's, and may lead anywhere.
    """
    base = place.base_model_dir
    parts = [place.checkpoints_dir] if _is_ours(place.checkpoints_dir) else []
    parts += [base] if _is_ours(base) and not _is_built(base) else []
    for published in (place.raw_dir, place.parquet_dir, base, place.best_model_dir):
        parts += [partial_directory(published), published.with_name(f"{published.name}.old")]
    parts = [path for path in parts if path.exists() and not path.is_symlink()]
    if base.is_symlink() and Path(os.path.normpath(base.parent / os.readlink(base))).parent == place.base_models_dir:
        parts.append(base)
    return parts


def _lasting_parts(place: RunDirectories) -> list[Path]:
    """What only the run itself has: its model, the data, and a base model that was built from the data."""
    parts = [place.best_model_dir, place.raw_dir, place.parquet_dir]
    parts += [place.base_model_dir] if _is_built(place.base_model_dir) else []
    return [path for path in parts if _is_ours(path)]


def _is_built(directory: Path) -> bool:
    """Whether the directory holds a small model, which was made from the run's data."""
    manifest = read_json(directory / MANIFEST)
    return isinstance(manifest, dict) and isinstance(manifest.get("key"), dict) and "small" in manifest["key"]


def _is_ours(directory: Path) -> bool:
    """Whether a directory, not a link, was made by tailtune, and nobody has added files to it."""
    return directory.is_dir() and not directory.is_symlink() and _others(directory) == set()


def _others(directory: Path) -> set[str] | None:
    """Return what others have written in a run's directory; None if tailtune has not published it."""
    if directory.name == "checkpoints":
        return {path.name for path in directory.glob("*") if not CHECKPOINTS.fullmatch(path.name)}
    manifest = read_json(directory / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return None
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
    return files - {MANIFEST, *manifest["files"]}


def unused(
    layout: RunDirectories,
    stored: list[StoredRun],
    removals: list[Removal],
    keep_runs: int,
    is_active: Callable[[StoredRun], bool],
) -> list[Removal]:
    """Return what no run needs once the removals are done: base models in the store, and hidden states."""
    gone = {path for removal in removals for path in removal.sizes}
    linked = {Path(os.readlink(path)).name for path in layout.base_model_links() if path not in gone}
    linked |= {path.name for path in _in_use(stored, is_active)}
    entries: dict[str, list[Path]] = {}
    for path in [] if layout.base_models_dir.is_symlink() else sorted(layout.base_models_dir.glob("*")):
        match = STORE_ENTRY.fullmatch(path.name)
        if match and match["entry"] not in linked and (path.name != match["entry"] or _is_ours(path)):
            entries.setdefault(match["entry"], []).append(path)
    found = [Removal(f"base model {name}", "of no run that keeps its base model", _sizes(paths))
             for name, paths in entries.items()]  # fmt: skip
    if states := _unused_states(layout, stored, keep_runs, is_active):
        found.append(Removal("hidden states", f"last used before the {keep_runs} newest runs", _sizes(states)))
    return found


def _unused_states(
    layout: RunDirectories, stored: list[StoredRun], keep_runs: int, is_active: Callable[[StoredRun], bool]
) -> list[Path]:
    """Return the cached hidden states that were last used before the newest runs and those in progress started.

    The cluster is not asked about runs that have not changed for a week: states can be computed again.
    """
    newest = [run for run in stored if run.trained][:keep_runs]
    if len(newest) < keep_runs or layout.hidden_state_cache_dir.is_symlink():
        return []
    entries = unused_entries(layout.hidden_state_cache_dir, min(run.started_at for run in newest))
    if not entries:
        return []
    recent = [run for run in stored if _report_is_missing(run) and run.changed_at > time.time() - QUIET_SECONDS]
    started = [run.started_at for run in recent if is_active(run)]
    return [path for path in entries if path.stat().st_mtime < min(started, default=time.time())]


# --- which runs are in progress -----------------------------------------------------------------------


def _ask_cluster(own_name: str) -> Callable[[StoredRun], bool]:
    """Return a function that asks the cluster, once per run, whether a run is in progress; this one is."""
    from tailtune.jobs.cleanup import is_in_progress
    from tailtune.jobs.kubernetes import KubernetesClient

    cluster = KubernetesClient()
    known: dict[str, bool] = {own_name: True}

    def is_active(run: StoredRun) -> bool:
        name = run.place.name
        if name not in known:
            answer = is_in_progress(cluster, run=name, pipeline_run=run.pipeline_run)
            known[name] = _seems_active(run) if answer is None else answer
        return known[name]

    return is_active


def _report_is_missing(run: StoredRun) -> bool:
    report = run.place.report_path
    return not report.is_file() or report.stat().st_mtime < run.started_at


def _seems_active(run: StoredRun) -> bool:
    """Whether a run has no report yet, and something in its directories has changed within a week."""
    if not _report_is_missing(run):
        return False
    for directory in (run.place.data_dir, run.place.models_dir, run.place.workspace_dir):
        for path in directory.rglob("*"):
            with suppress(FileNotFoundError):  # the run itself deletes it just now
                if path.lstat().st_mtime > time.time() - QUIET_SECONDS:
                    return True
    return False


def _has_lock(run: StoredRun) -> bool:
    """Whether a run on this machine is in progress."""
    with _locked(run.place) as is_free:
        return not is_free


@contextmanager
def _locked(place: RunDirectories) -> Iterator[bool]:
    """Hold the locks of a run on this machine; yield False while a process of the run itself holds one."""
    if not (place.local_dir / ".lock").is_file():
        yield True
        return
    with locked(place.local_dir) as not_free:
        yield not not_free


# --- removing ---------------------------------------------------------------------------------------


def remove(removal: Removal) -> int:
    """Delete the parts, and return how many bytes that were. What cannot be deleted is logged and left."""
    if removal.place and removal.place.local:
        with _locked(removal.place) as is_free:
            return _remove(removal) if is_free else 0
    return _remove(removal)


def _remove(removal: Removal) -> int:
    done = 0
    for path, size in removal.sizes.items():
        try:
            if removal.place:
                _record(removal.place, path, size, removal.why)
            if path.is_symlink():
                path.unlink()
            else:
                discard(path)
            done += size
        except FileNotFoundError:  # another run removes the same
            continue
        except OSError as error:
            log.warning("retention: %s cannot be removed: %s", path, error.strerror)
    return done


def _record(place: RunDirectories, path: Path, size: int, why: str) -> None:
    """Write down what is about to be removed; first, so that nothing is ever gone without a word."""
    record_path = path.parent / REMOVED
    removed = (read_json(record_path) or {}).get("removed", {})
    entry = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "bytes": size, "why": why}
    write_json(record_path, {"run": place.name, "removed": {**removed, path.name: entry}})


def _delete_leftovers(layout: RunDirectories, stored: list[StoredRun]) -> None:
    """Delete what a retention that was killed had already renamed."""
    directories = [layout.base_models_dir, layout.hidden_state_cache_dir]
    for run in stored:
        directories += [run.place.data_dir, run.place.models_dir]
    for directory in directories:
        try:
            delete_garbage(directory)
            for path in directory.glob(f".{REMOVED}.*"):  # of a retention that was killed while it wrote
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("retention: leftovers in %s cannot be removed: %s", directory, error.strerror)


def in_words(size: int) -> str:
    """Return a number of bytes as a person reads it."""
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB"


# --- what later steps and commands say ----------------------------------------------------------------


def removed_at(path: Path) -> str:
    """Return the day on which retention removed a run's directory; empty if it did not, or if it is back."""
    record = {} if path.exists() else read_json(path.parent / REMOVED)
    removed = record.get("removed") if isinstance(record, dict) else None
    entry = removed.get(path.name) if isinstance(removed, dict) else None
    return str(entry["at"])[:10] if entry else ""


def refuse_removed(*paths: Path) -> None:
    """Raise UserError for the first directory that retention has removed from its run."""
    for path in paths:
        if day := removed_at(path):
            run = read_json(path.parent / REMOVED)["run"]
            raise UserError(
                f"retention removed {path.name} of run '{run}' on {day}",
                f"train it again with --run-name {run}; the recipe's keep_runs and keep_models set how many stay",
            )


def start_anew(run: Run) -> None:
    """If retention has removed the model or the data of an earlier run of this name, forget what is left of it."""
    if day := removed_at(run.best_model_dir) or removed_at(run.parquet_dir):
        log.info("retention: model and data of an earlier run '%s' were removed on %s; it starts anew", run.name, day)
        for path in (run.verdict_path, run.evaluation_path, run.report_path, run.permanent_failure_path):
            path.unlink(missing_ok=True)
        for directory in (run.models_dir, run.data_dir):
            (directory / REMOVED).unlink(missing_ok=True)
    elif (day := removed_at(run.checkpoints_dir)) and not read_manifest(run.best_model_dir):
        log.info("retention: the checkpoints of run '%s' were removed on %s; training starts at step 1", run.name, day)
