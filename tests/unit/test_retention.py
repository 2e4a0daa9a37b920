"""What old runs lose and what they keep, on volumes with small files. test_nights.py has a year of nights."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import tiny_recipe
from killed import killed_at
from kubernetes_server import Server, cluster

import tailtune.run
from tailtune import retention
from tailtune.cli import main
from tailtune.errors import UserError
from tailtune.files import read_json, write_json
from tailtune.jobs.job import Job
from tailtune.jobs.kubernetes import KubernetesClient
from tailtune.jobs.objects import JOB_KINDS, Jobs
from tailtune.jobs.train_step import make_job
from tailtune.manifest import partial_directory, publish, read_manifest
from tailtune.recipe.schema import Recipe
from tailtune.retention import remove_old_runs
from tailtune.run import Run, local_directories
from tailtune.shared_cache import use_entry
from tailtune.training_key import has_trained

OLD, NEW = ("owner--model@" + digit * 40 for digit in "ab")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with cluster(tmp_path / "server") as running:
        running.apply_cluster_admin()
        running.faults.pending.set()  # no pod of a job starts
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@cache
def recipe_with(**overrides: Any) -> Recipe:
    return tiny_recipe(**overrides)


class Volumes:
    """Three volumes with runs, each a minute younger than the one before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = time.time() - 2e5

    def run(self, name: str, *, local: bool = False, **overrides: Any) -> Run:
        recipe = recipe_with(**{"base_model": "owner/model", **overrides})
        directories: dict[str, Any] = {
            f"{kind}_dir": self.folder / kind / name for kind in ("data", "models", "workspace")
        }
        if local:
            directories = local_directories(self.folder / "runs" / name)
        return Run(name=name, recipe=recipe, local=local, pipeline_run="" if local else name, **directories)

    def add(self, name: str, *, passed: bool | None = True, trained: bool = True, base: str = NEW, owner: str = "",
            **overrides: Any) -> Run:  # fmt: skip
        """Leave what the steps of a run leave; `passed` None: it was killed while it trained."""
        run = self.run(name, **overrides)
        write_json(run.run_path, run.model_dump(mode="json"))
        write_json(run.owner_path, {"pipeline_run": owner or run.pipeline_run})
        for directory in (run.raw_dir, run.parquet_dir):
            self.publish(directory)
        if trained:
            entry = run.base_models_dir / base
            if not entry.exists():
                self.publish(entry)
            run.models_dir.mkdir(parents=True)
            run.base_model_dir.symlink_to(os.path.relpath(entry, run.models_dir))
            for step in (1, 2):
                checkpoint = run.checkpoints_dir / f"checkpoint-{step}"
                write_json(checkpoint / "complete.json", {"weights": 9})
                (checkpoint / "weights").write_text("9 9 9 9 9")
            (run.checkpoints_dir / "attempts.jsonl").write_text('{"from_step": 0}\n')
            write_json(run.models_dir / "training_summary.json", {"run": name})
            if passed is None:
                (partial_directory(run.best_model_dir)).mkdir()
            else:
                self.publish(run.best_model_dir)
                write_json(run.verdict_path, {"passed": passed, "rules": []})
                run.report_path.write_text(name)
        self.age(run)
        return run

    def publish(self, directory: Path) -> None:
        with publish(directory, {}, {}) as written:
            (written / "config.json").write_text(str(directory))

    def age(self, run: Run) -> None:
        self.clock += 60
        for directory in (run.data_dir, run.models_dir, run.workspace_dir):
            for path in directory.rglob("*"):
                os.utime(path, (self.clock, self.clock), follow_symlinks=False)

    def state(self) -> dict[str, str]:
        """Which of its parts each run still has."""
        runs = sorted(path.name for path in (self.folder / "workspace").iterdir() if (path / "run.json").is_file())
        return {name: parts(self.run(name)) for name in runs}


def parts(run: Run) -> str:
    """m: model, c: checkpoints, b: base model, d: data. Reports and summaries are always there."""
    assert run.run_path.is_file() and (run.report_path.is_file() or not run.verdict_path.is_file())
    has = {"m": read_manifest(run.best_model_dir), "c": any(run.checkpoints_dir.glob("checkpoint-*")),
           "b": read_manifest(run.base_model_dir), "d": read_manifest(run.parquet_dir)}  # fmt: skip
    return "".join(letter for letter, there in has.items() if there)


@pytest.fixture
def volumes(tmp_path: Path) -> Volumes:
    return Volumes(tmp_path / "volumes")


WHOLE = "mcbd"


def test_older_runs_lose_their_checkpoints_and_then_their_models(volumes: Volumes, server: Server) -> None:
    for name, passed in (("1", True), ("2", True), ("3", False), ("4", True), ("5", True), ("6", False), ("7", None)):
        volumes.add(name, passed=passed)
    remove_old_runs(volumes.add("now", trained=False))
    assert volumes.state() == {
        "1": "",  # three newer ones were promoted
        "2": "md", "3": "",  # rejected
        "4": "md", "5": "mbd",  # the newest promoted model keeps its base model, to compare with
        "6": WHOLE, "7": "cbd",  # the two newest are whole: 7 may be retried
        "now": "d",
    }  # fmt: skip
    assert read_json(volumes.run("1").models_dir / "training_summary.json") == {"run": "1"}


@pytest.mark.parametrize(("keep_runs", "keep_models", "kept"), [(1, 1, 1), (3, 1, 3), (1, 4, 4), (1, None, 6)])
def test_the_recipe_sets_how_many(
    volumes: Volumes, server: Server, keep_runs: int, keep_models: int | None, kept: int
) -> None:
    for name in "123456":
        volumes.add(name)
    remove_old_runs(volumes.add("now", trained=False, keep_runs=keep_runs, keep_models=keep_models))
    state = volumes.state()
    assert [name for name in "123456" if "c" in state[name]] == list("123456"[-keep_runs:])
    assert [name for name in "123456" if "m" in state[name]] == list("123456"[-kept:])


def test_nothing_is_removed_where_the_recipe_says_so_or_on_one_machine(
    volumes: Volumes, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "12345":
        volumes.add(name, passed=False)
        volumes.add(f"local-{name}", local=True, passed=False)
    before = volumes.state()
    remove_old_runs(volumes.add("off", trained=False, keep_runs=None))
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")  # nor is any cluster asked
    remove_old_runs(volumes.add("local", trained=False, local=True))
    assert {**before, "off": "d"} == volumes.state()
    assert parts(volumes.run("local-1", local=True)) == WHOLE


def test_runs_that_somebody_named_and_those_of_other_recipes_stay(volumes: Volumes, server: Server) -> None:
    volumes.add("experiment", passed=False, owner="0f3c")
    other = volumes.add("other", passed=False)
    document = read_json(other.run_path)
    document["recipe"]["name"] = "another-recipe"
    write_json(other.run_path, document)
    for name in "1234":
        volumes.add(name, passed=False)
    remove_old_runs(volumes.add("now", trained=False))
    state = volumes.state()
    assert state["experiment"] == state["other"] == WHOLE
    assert [state[name] for name in "1234"] == ["", "", WHOLE, WHOLE], "they do not count either"


def test_the_newest_promoted_run_of_each_schedule_stays(volumes: Volumes, server: Server) -> None:
    volumes.add("yesterdays", data_source="s3://bucket/yesterdays.jsonl")
    for name in "1234567":
        volumes.add(name, passed=True)
    for name in "89":
        volumes.add(name, passed=False)
    remove_old_runs(volumes.add("now", trained=False, keep_runs=1, keep_models=1))
    state = volumes.state()
    assert state["yesterdays"] == state["7"] == "mbd", "no later model takes their place"
    assert [state[name] for name in "12345689"] == ["", "", "", "", "", "", "", WHOLE]


def test_runs_without_new_data_do_not_displace_those_that_trained(volumes: Volumes, server: Server) -> None:
    for name in "12":
        volumes.add(name, passed=None)
    for name in "3456":
        volumes.add(name, trained=False)
    remove_old_runs(volumes.add("now", trained=False))
    assert volumes.state() == {"1": "cbd", "2": "cbd", "3": "", "4": "", "5": "d", "6": "d", "now": "d"}


# --- runs in progress -------------------------------------------------------------------------------


def job_of(run: Run) -> Job:
    return make_job(run, run.parquet_dir, run.base_model_dir, run.models_dir / "recipe.json")


def test_a_run_whose_workflow_or_job_has_not_ended_stays(volumes: Volumes, server: Server) -> None:
    """The job of a run that failed by itself goes on training."""
    for name in "123456":
        volumes.add(name, passed=None)
    server.workflows = {"1": "Running", "2": "Failed", "3": "Failed"}
    Jobs(KubernetesClient(), JOB_KINDS["pytorchjob"]).create(job_of(volumes.run("2")))
    remove_old_runs(volumes.add("now", trained=False))
    state = volumes.state()
    assert [state[name] for name in "123456"] == ["cbd", "cbd", "", "", "cbd", "cbd"]


def test_where_the_cluster_does_not_answer_the_files_tell_what_is_in_progress(volumes: Volumes, server: Server) -> None:
    server.allowed = [rule for rule in server.allowed if "workflows" not in rule[2]]
    for name, passed in (
        ("reported", False),
        ("long-ago", None),
        ("two-days-ago", None),
        ("5", False),
        ("6", False),
    ):
        volumes.add(name, passed=passed)
    for directory in (volumes.folder / kind / "long-ago" for kind in ("data", "models", "workspace")):
        for path in directory.rglob("*"):
            os.utime(path, (0, 0), follow_symlinks=False)
    remove_old_runs(volumes.add("now", trained=False))
    state = volumes.state()
    assert [state[name] for name in ("reported", "long-ago", "two-days-ago")] == ["", "", "cbd"]


# --- what is not tailtune's -------------------------------------------------------------------------


def test_files_of_others_stay(volumes: Volumes, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    old = volumes.add("1", passed=False)
    (old.best_model_dir / "onnx").mkdir()
    (old.best_model_dir / "onnx" / "model.onnx").write_text("converted by hand")
    (old.checkpoints_dir / "checkpoint-2-good").mkdir()
    (old.models_dir / "notes.txt").write_text("mine")
    volumes.age(old)
    (volumes.folder / "models" / "hub").mkdir()
    (volumes.folder / "models" / "base_models" / "my-own-model").mkdir()
    for name in "23":
        volumes.add(name)
    remove_old_runs(volumes.add("now", trained=False))
    assert (old.best_model_dir / "onnx" / "model.onnx").is_file() and read_manifest(old.best_model_dir)
    assert len(list(old.checkpoints_dir.iterdir())) == 4 and not old.parquet_dir.exists()
    assert (old.models_dir / "notes.txt").is_file() and (volumes.folder / "models" / "hub").is_dir()
    assert (volumes.folder / "models" / "base_models" / "my-own-model").is_dir()
    for others in ("onnx/model.onnx", "checkpoint-2-good"):
        assert f"is left alone: tailtune has not written {others} in it" in caplog.text


def test_nothing_behind_a_link_is_removed(volumes: Volumes, server: Server, tmp_path: Path) -> None:
    """Somebody has moved directories elsewhere, and left links; or placed them with bad intent."""
    outside = tmp_path / "outside"
    for name in ("best_model", "checkpoints", "base_model", "run", "data", "base_models", "hidden_states"):
        volumes.publish(outside / name)
    (outside / "checkpoints" / "checkpoint-1").mkdir()
    old = volumes.add("1", passed=False)
    for directory in (old.best_model_dir, old.checkpoints_dir, old.base_model_dir):
        directory.rename(tmp_path / f"was-{directory.name}")
        directory.symlink_to(outside / directory.name)
    moved = volumes.add("2", passed=False)
    moved.models_dir.rename(outside / "run" / "models")
    moved.models_dir.symlink_to(outside / "run" / "models")
    liar = volumes.add("3", passed=False)
    document = read_json(liar.run_path)
    write_json(liar.run_path, {**document, "name": "..", "models_dir": str(outside), "data_dir": str(outside)})
    for name in "45":
        volumes.add(name, base=OLD)
    store = old.base_models_dir
    volumes.publish(store / OLD.replace("a", "c"))  # no run links to it
    store.rename(outside / "base_models" / "store")
    store.symlink_to(outside / "base_models" / "store")
    for path in outside.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    before = sorted(outside.rglob("*"))
    remove_old_runs(volumes.add("now", trained=False))
    assert sorted(outside.rglob("*")) == before
    assert all(directory.is_symlink() for directory in (old.best_model_dir, old.checkpoints_dir, old.base_model_dir))
    assert not old.parquet_dir.exists(), "the rest of it went"
    assert read_manifest(liar.best_model_dir)


# --- what runs share --------------------------------------------------------------------------------


def test_a_base_model_goes_with_the_last_run_that_keeps_it(volumes: Volumes, server: Server) -> None:
    store = volumes.run("1").base_models_dir
    volumes.add("1", base=OLD)
    volumes.add("2")
    (store / f"{OLD}.lease").write_text("killed 7")
    (store / f"{OLD.replace('a', 'c')}.partial").mkdir()
    (store / f"{NEW}.lease").write_text("somebody 1")
    remove_old_runs(volumes.add("3"))
    assert {path.name for path in store.iterdir()} == {OLD, f"{OLD}.lease", NEW, f"{NEW}.lease"}
    remove_old_runs(volumes.add("4"))
    assert {path.name for path in store.iterdir()} == {NEW, f"{NEW}.lease"}
    assert volumes.state()["1"] == "md"


def test_what_the_recipes_of_other_runs_name_stays(volumes: Volumes, server: Server) -> None:
    """A tuned model that somebody tunes further, and a model in the store that a recipe names by its path."""
    first = volumes.add("1", passed=False, base=OLD)
    volumes.add("tuned-further", trained=True, owner="0f3c", base_model=str(first.best_model_dir))
    volumes.add("in-place", trained=True, owner="1a2b", base_model=str(first.base_models_dir / OLD))
    for name in "234":
        volumes.add(name, passed=False)
    remove_old_runs(volumes.add("now", trained=False))
    assert volumes.state()["1"] == "m" and volumes.state()["2"] == ""
    assert read_manifest(first.base_models_dir / OLD)


def test_a_run_that_trained_for_days_is_as_old_as_its_last_checkpoint(volumes: Volumes, server: Server) -> None:
    long = volumes.add("long", passed=None)
    for name in "123":
        volumes.add(name)
    volumes.clock += 60
    os.utime(long.checkpoints_dir, (volumes.clock,) * 2)
    remove_old_runs(volumes.add("now", trained=False))
    assert volumes.state()["long"] == "cbd"


def test_a_base_model_that_a_run_is_fetching_stays(volumes: Volumes, server: Server) -> None:
    run = volumes.add("1", trained=False)
    unfinished = partial_directory(run.base_models_dir / OLD)
    unfinished.mkdir(parents=True)
    run.models_dir.mkdir(parents=True)
    run.base_model_dir.symlink_to(f"../base_models/{OLD}")
    server.workflows = {"1": "Running"}
    for name in "234":
        volumes.add(name)
    remove_old_runs(volumes.add("now", trained=False))
    assert unfinished.is_dir()


def test_hidden_states_go_with_the_runs_that_used_them(volumes: Volumes, server: Server) -> None:
    entries: list[Path] = []
    for name in "1234":
        run = volumes.add(name)
        entries.append(use_entry(run.hidden_state_cache_dir, {"data of": name}))
        os.utime(entries[-1], (volumes.clock + 1,) * 2)
    assert all(entry.is_dir() for entry in entries), "the cache's own limit is a week"
    (of_somebody := run.hidden_state_cache_dir / "of-somebody").mkdir()
    os.utime(of_somebody, (0, 0))
    remove_old_runs(volumes.add("now", trained=False))
    assert [entry.is_dir() for entry in entries] == [False, False, True, True] and of_somebody.is_dir()


def test_hidden_states_of_a_long_run_in_progress_stay(volumes: Volumes, server: Server) -> None:
    long = volumes.add("long", passed=None, owner="0f3c")
    server.workflows = {"0f3c": "Running"}
    entry = use_entry(long.hidden_state_cache_dir, {})
    os.utime(entry, (volumes.clock + 1,) * 2)
    for name in "123":
        volumes.add(name)
    remove_old_runs(volumes.add("now", trained=False))
    assert entry.is_dir()


def test_the_cluster_is_not_asked_about_runs_that_failed_long_ago(
    volumes: Volumes, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(retention, "_ask_cluster", lambda own: lambda run: bool(asked.append(run.place.name)))
    volumes.clock -= 30 * 24 * 3600
    for number in range(9):
        volumes.add(f"failed-{number}", passed=None)
    volumes.clock += 30 * 24 * 3600
    for name in "12":
        run = volumes.add(name)
    os.utime(use_entry(run.hidden_state_cache_dir, {}), (0, 0))
    remove_old_runs(volumes.add("now", trained=False))
    asked.clear()
    os.utime(use_entry(run.hidden_state_cache_dir, {}), (0, 0))
    remove_old_runs(volumes.run("now"))
    assert set(asked) == {"1", "2", "now"}, "what runs have lost, they need not be asked about again"


def test_a_copy_of_an_earlier_version_goes_with_the_checkpoints(volumes: Volumes, server: Server) -> None:
    for name in "1234":
        run = volumes.add(name)
        run.base_model_dir.unlink()
        with publish(run.base_model_dir, {"model": "owner/model", "revision": "main"}, {}) as written:
            (written / "config.json").write_text("{}")
        volumes.age(run)
    small = volumes.add("5")
    small.base_model_dir.unlink()
    with publish(small.base_model_dir, {"small": {}}, {}) as written:
        (written / "config.json").write_text("{}")
    volumes.age(small)
    remove_old_runs(volumes.add("now", trained=False, keep_runs=1, keep_models=3))
    assert volumes.state() == {"1": "", "2": "", "3": "md", "4": "md", "5": WHOLE, "now": "d"}
    volumes.add("6")
    remove_old_runs(volumes.run("now", keep_runs=1, keep_models=3))
    assert volumes.state()["5"] == "mbd", "a small model is as old as its run, and cannot be fetched again"


# --- killed at any moment ---------------------------------------------------------------------------


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def fill(volumes: Volumes) -> Run:
    for name, passed in (("1", True), ("2", False), ("3", None), ("4", True)):
        volumes.add(name, passed=passed, base=OLD)
    volumes.add("5")
    volumes.add("6")
    os.utime(use_entry(volumes.run("1").hidden_state_cache_dir, {}), (volumes.clock - 3000,) * 2)
    return volumes.add("now", trained=False)


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_retention_that_was_killed_at_any_moment_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(retention, "_ask_cluster", lambda own: lambda run: run.place.name == own)
    undisturbed = Volumes(tmp_path / "undisturbed")
    remove_old_runs(fill(undisturbed))
    expected = tree(undisturbed.folder)
    assert undisturbed.state() == {"1": "", "2": "", "3": "", "4": "md", "5": WHOLE, "6": WHOLE, "now": "d"}
    was_killed, number = True, 0
    while was_killed:
        number += step
        volumes = Volumes(tmp_path / str(number))
        now = fill(volumes)
        was_killed = killed_at(partial(remove_old_runs, now), number)
        for name in "456":
            run = volumes.run(name)
            assert read_manifest(run.best_model_dir), f"killed at change {number}"
            assert not run.base_model_dir.is_symlink() or read_manifest(run.base_model_dir)
        for run in map(volumes.run, "123"):
            model = read_manifest(run.best_model_dir)
            assert model or not run.best_model_dir.exists(), "complete or absent"
        remove_old_runs(now)
        assert tree(volumes.folder) == expected, f"killed at change {number}"
    assert number > 60


# --- commands and later steps -----------------------------------------------------------------------


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


@pytest.fixture
def mounted(volumes: Volumes, monkeypatch: pytest.MonkeyPatch) -> Volumes:
    """As in a pod that mounts the volumes, which has no access to the cluster's API."""
    (volumes.folder / "workspace").mkdir(parents=True)
    for kind in ("data", "models", "workspace"):
        monkeypatch.setitem(tailtune.run.MOUNTS, f"{kind}_dir", str(volumes.folder / kind))
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    return volumes


def test_gc_shows_what_it_would_remove_and_then_removes_it(mounted: Volumes) -> None:
    for name in "12345":
        mounted.add(name, passed=name != "1")
    mounted.add("experiment", passed=False, owner="0f3c")
    before = tree(mounted.folder)
    status, shown = invoke("gc", "--runs", "--dry-run")
    assert (status, tree(mounted.folder)) == (0, before)
    lines = shown.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["run 3", "run 2", "run 1"]
    assert lines[0] == ("run 3: 0.0 MB (checkpoints 0.0 MB, base_model): the model stays")
    assert lines[2].endswith("parquet 0.0 MB): older than the 2 newest")
    assert lines[-1] == "0.0 MB would be removed; 1 runs have names and stay, unless you add --named"
    assert invoke("gc", "--runs") == (0, shown.replace("would be ", ""))
    assert mounted.state() == {"1": "", "2": "", "3": "md", "4": WHOLE, "5": WHOLE, "experiment": WHOLE}
    assert invoke("gc", "--runs")[1].startswith("0.0 MB removed")
    invoke("gc", "--runs", "--keep", "1", "--keep-models", "1")
    assert [mounted.state()[name] for name in "12345"] == ["", "", "", "", WHOLE]
    invoke("gc", "--runs", "--keep", "1", "--named")
    assert mounted.state()["experiment"] == WHOLE and mounted.state()["5"] == "mbd"


def test_gc_removes_no_local_run_that_is_in_progress(
    volumes: Volumes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [volumes.add(f"run-{number}", passed=False, local=True) for number in range(4)]
    monkeypatch.chdir(volumes.folder)
    assert "4 runs have names and stay, unless you add --named" in invoke("gc", "--runs")[1]
    with (runs[0].local_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "run run-0" not in invoke("gc", "--runs", "--named")[1]
        assert [parts(run) for run in runs] == [WHOLE, "", WHOLE, WHOLE]
    invoke("gc", "--runs", "--named")
    assert [parts(run) for run in runs] == ["", "", WHOLE, WHOLE]
    assert runs[1].report_path.is_file()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--keep", "2"), 2, "--keep, --keep-models and --named need --runs"),
        (("--runs", "--keep", "0"), 2, "0 is not in the range x>=1"),
        (("--runs", "--namespace", "x"), 2, "--namespace is for jobs"),
        (("--runs",), 1, "error: there is no run in runs/; start it where runs/ or the volumes are"),
    ],
)
def test_gc_refuses(
    arguments: tuple[str, ...], status: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, shown = invoke("gc", *arguments)
    assert code == status and words in shown


def test_what_is_gone_is_said_in_one_line(mounted: Volumes) -> None:
    for name in "1234":
        mounted.add(name, passed=name == "2")
    invoke("gc", "--runs")
    day = time.strftime("%Y-%m-%d", time.gmtime())
    gone, kept = mounted.run("1"), mounted.run("2")
    remedy = "; train it again with --run-name 1; the recipe's keep_runs and keep_models set how many stay"
    ask = ("ask", "hi", "--run", str(gone.workspace_dir))
    assert invoke(*ask) == (1, f"error: retention removed best_model of run '1' on {day}{remedy}\n")
    evaluate = ("evaluate", str(kept.best_model_dir), "--recipe", "survival", "--data-dir")
    assert invoke(*evaluate, str(gone.parquet_dir)) == (
        1, f"error: retention removed parquet of run '1' on {day}{remedy}\n")  # fmt: skip
    with pytest.raises(UserError, match="retention removed parquet of run '1' on"):
        retention.refuse_removed(gone.parquet_dir, gone.best_model_dir)
    retention.refuse_removed(kept.parquet_dir, kept.best_model_dir, kept.base_model_dir, Path("."), Path("/"))
    write_json(mounted.folder / "removed.json", ["of another program"])
    retention.refuse_removed(mounted.folder / "model")


def test_a_run_that_lost_only_its_checkpoints_keeps_its_settings(mounted: Volumes) -> None:
    for name in "1234":
        mounted.add(name)
    invoke("gc", "--runs", "--keep", "1", "--keep-models", "3")
    assert [has_trained(mounted.run(name).models_dir) for name in "1234"] == [False, True, True, True]


def test_a_run_of_the_same_name_starts_anew(mounted: Volumes, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    from tailtune.resolve import claim_directories

    caplog.set_level("INFO", "tailtune")
    for name in "1234":
        mounted.add(name, passed=name != "1")
    invoke("gc", "--runs")
    again = mounted.run("1", learning_rate=0.5)
    claim_directories(again)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    line = f"retention: model and data of an earlier run '1' were removed on {day}; it starts anew"
    assert caplog.messages.count(line) == 1
    assert not again.verdict_path.exists() and not again.report_path.exists(), "they were those of the removed model"
    claim_directories(again)
    assert caplog.messages.count(line) == 1
    retention.refuse_removed(again.best_model_dir, again.parquet_dir)


def test_a_failed_run_that_lost_its_checkpoints_is_told(
    mounted: Volumes, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tailtune")
    run = mounted.add("1", passed=None)
    write_json(run.models_dir / "removed.json", {"run": "1", "removed": {"checkpoints": {"at": "2026-11-23T02:00:00"}}})
    retention.start_anew(run)
    assert caplog.messages == []
    (run.checkpoints_dir).rename(run.models_dir / "elsewhere")
    retention.start_anew(run)
    assert caplog.messages == [
        "retention: the checkpoints of run '1' were removed on 2026-11-23; training starts at step 1"
    ]


def test_a_run_of_an_earlier_version_is_understood(volumes: Volumes, server: Server) -> None:
    old = volumes.add("1", passed=False)
    document = read_json(old.run_path)
    for key in ("keep_runs", "keep_models"):
        del document["recipe"][key]
    document["recipe"]["stages"] = "in another form"
    old.run_path.write_text(json.dumps(document))
    volumes.age(old)
    os.utime(old.run_path, (0, 0))
    for name in "23":
        volumes.add(name)
    remove_old_runs(volumes.add("now", trained=False))
    assert volumes.state()["1"] == ""
