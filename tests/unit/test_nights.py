"""A nightly schedule on the default volumes: they do not fill, whatever happens, and the best model is always there.

The steps are the pipeline's own, called as on a cluster, one run after the other. Only what needs a GPU is replaced:
training, evaluation and report leave files of the size that they have for the recipe survival, at a hundredth of the
scale and without content.
"""

import base64
import hashlib
import random
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import tiny_recipe
from killed import die, killed, killed_at
from kubernetes_server import DEPLOY, Server, cluster
from servers import Server as Hub
from servers import serve

import tailtune.run
from components.fetch_dataset import fetch_dataset
from components.fetch_model import fetch_model
from components.promotion_gate import promotion_gate
from components.train_stage import train_stage
from components.write_parquet import write_parquet
from tailtune.fetch import lease
from tailtune.files import num_bytes, read_json, sha256_file, write_json
from tailtune.jobs import train_step
from tailtune.jobs.job import Job
from tailtune.manifest import MANIFEST, publish, read_manifest
from tailtune.recipe.schema import UNITS
from tailtune.run import Run
from tailtune.shared_cache import use_entry
from tailtune.training_key import CHECKPOINT_KEY, refuse_other_checkpoints, training_key

GB = 10_000_000
"""A gigabyte at this scale."""
BASE, TUNED, CHECKPOINT, STATES, DATA = 62 * GB // 10, 67 * GB // 10, 5 * GB, 10 * GB, GB // 10
"""Bytes of one of each. The runbook derives the first three; states and data are those of a larger data set."""
CLAIMS = {"data_dir": "training-data-pvc", "models_dir": "trained-models-pvc", "workspace_dir": "workspace-pvc"}
LATER = "ab" * 20
PLACES = ("retention", "fetch", "parquet", "training", "publishing", "evaluation", "gate", "report")
"""Where a night may be killed; and while the base model is downloaded."""
PASSING = {
    "answer_loss_vs_base": 0.5,
    "answer_loss_vs_unigram": 0.5,
    "tuned_token_accuracy": 0.5,
    "answer_words_vs_base": 1.0,
}


class VolumeFull(Exception):
    """What a write to a full volume would raise."""


def claim_bytes() -> dict[str, float]:
    """The sizes of the volumes in deploy/, at this scale."""
    claims = yaml.safe_load_all((DEPLOY / "base" / "volumes.yaml").read_text())
    sizes = {claim["metadata"]["name"]: claim["spec"]["resources"]["requests"]["storage"] for claim in claims}
    return {field: int(sizes[name][:-2]) * int(UNITS[sizes[name][-2:]]) / 1e9 * GB for field, name in CLAIMS.items()}


def allocate(path: Path, size: int) -> None:
    """Make a file of zeros that takes no space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


ZEROS = hashlib.sha256(bytes(TUNED)).hexdigest()


class Schedule:
    """Runs of one pipeline, one each night."""

    def __init__(self, folder: Path, server: Server, model: Path, **overrides: Any) -> None:
        self.server, self.model = server, model
        self.volumes = {field: folder / field.removesuffix("_dir") for field in CLAIMS}
        self.source = folder / "rows.jsonl"
        self.recipe = tiny_recipe(base_model="owner/model", data_source=str(self.source), **overrides)
        self.limits, self.fullest = claim_bytes(), dict.fromkeys(CLAIMS, 0)
        self.promoted: list[Run] = []
        self._dies_in = ""

    def check(self) -> None:
        """Raise VolumeFull when more is on a volume than fits."""
        for field, volume in self.volumes.items():
            used = num_bytes(volume)
            self.fullest[field] = max(used, self.fullest[field])
            if used > self.limits[field]:
                raise VolumeFull(f"{field}: {used / GB:.1f} GB of {self.limits[field] / GB:.1f} GB")

    def night(self, *, passes: bool = True, dies_in: str = "") -> Run:
        """Run the pipeline on new data."""
        identity = str(uuid.uuid4())
        directories: dict[str, Any] = {field: volume / identity for field, volume in self.volumes.items()}
        run = Run(name=identity, pipeline_run=identity, recipe=self.recipe, local=False, **directories)
        self.write_rows()
        self.server.workflows[identity] = "Running"
        self._dies_in = dies_in
        if dies_in == "retention":
            assert killed_at(lambda: fetch_dataset.python_func(run.to_json()), random.randint(8, 20))
        elif dies_in == "download":
            received = "owner--model@*.partial/.cache/huggingface/download/*.incomplete"
            assert killed(
                lambda: self.steps(run, passes),
                when=lambda: any(path.stat().st_size > BASE / 4 for path in run.base_models_dir.glob(received)),
            )
        elif dies_in:
            assert killed(lambda: self.steps(run, passes))
        else:
            self.steps(run, passes)
        self.server.workflows[identity] = "Succeeded" if passes and not dies_in else "Failed"
        self.check()
        judged = read_json(run.verdict_path)
        if judged and judged["passed"]:
            self.promoted.append(run)
        for newest in self.promoted[-1:]:
            assert read_manifest(newest.best_model_dir), "the newest promoted model is whole"
            assert read_manifest(newest.base_model_dir) and read_manifest(newest.parquet_dir)
        return run

    def write_rows(self) -> None:
        """New data: 30 rows that do not compress."""
        with self.source.open("w") as file:
            for number in range(30):
                text = base64.b64encode(random.randbytes(DATA // 40)).decode()
                file.write(f'{{"topic": "t", "question": "{number} {uuid.uuid4()}?", "answer": "{text}"}}\n')

    def reach(self, place: str) -> None:
        if place == self._dies_in:
            die()

    def steps(self, run: Run, passes: bool) -> None:
        this, metrics = run.to_json(), SimpleNamespace(log_metric=lambda name, value: None)
        note = SimpleNamespace(path=str(self.source) + ".note")  # not os.devnull: a step replaces the file
        source = fetch_dataset.python_func(this)
        self.reach("fetch")
        fetch_model.python_func(this)
        self.check()
        data = write_parquet.python_func(this, source, False, metrics, note)
        self.reach("parquet")
        train_stage.python_func(this, data, metrics)
        self.reach("evaluation")
        write_json(run.evaluation_path, {"metrics": PASSING | ({} if passes else {"answer_loss_vs_base": 1.1})})
        self.reach("gate")
        verdict = promotion_gate.python_func(this, str(run.evaluation_path), note, note)
        assert verdict == ("pass" if passes else "fail")
        self.reach("report")
        run.report_path.write_text("a report")

    def train(self, run: Run, job: Job) -> None:
        """What the ranks of the job leave."""
        output, model_dir = Path(job.environment["OUTPUT_DIR"]), Path(job.args[job.args.index("--model-dir") + 1])
        key = training_key(run.recipe, run.recipe.stages[0], Path(job.environment["DATA_DIR"]), model_dir)
        assert (model_dir / "model.safetensors").stat().st_size == BASE
        refuse_other_checkpoints(output / "checkpoints", key)
        states = use_entry(Path(job.environment["HIDDEN_STATE_CACHE_DIR"]), key)
        allocate(states / "000000.states", STATES)
        for step in (1, 2, 3):
            checkpoint = output / "checkpoints" / f"checkpoint-{step}"
            allocate(checkpoint / "weights", CHECKPOINT)
            if step == 3:
                self.check()
                self.reach("training")
                shutil.rmtree(output / "checkpoints" / "checkpoint-1")  # two are kept
            write_json(checkpoint / CHECKPOINT_KEY, key)
            write_json(checkpoint / "complete.json", {"weights": CHECKPOINT})
        write_json(output / "training_summary.json", {"num_steps": 3})
        with publish(output / "best_model", key, {}, known_sha256={"ballast": ZEROS}) as written:
            shutil.copytree(self.model, written, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
            allocate(written / "ballast", TUNED)
            self.check()
            self.reach("publishing")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def release(hub: Hub, content: bytes, **commit: str) -> None:
    """Make a new version of the base model the hub's main one."""
    hub.add_repo("models", "owner/model", {"config.json": b"{}", "model.safetensors": content}, **commit)


@pytest.fixture
def schedule(
    tmp_path: Path, hub: Hub, prepared: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Schedule]:
    with cluster(tmp_path / "server") as server:
        server.apply_cluster_admin()
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        for constant, seconds in (("BEAT_SECONDS", 0.05), ("SILENT_SECONDS", 1.0), ("POLL_SECONDS", 0.02)):
            monkeypatch.setattr(lease, constant, seconds)
        made = Schedule(tmp_path, server, prepared / "base", **getattr(request, "param", {}))
        for field, volume in made.volumes.items():
            volume.mkdir()
            monkeypatch.setitem(tailtune.run.MOUNTS, field, str(volume))
        monkeypatch.setattr(train_step, "_run_on_cluster", made.train)
        monkeypatch.setattr("tailtune.fetch.model.check_base_model", lambda *names: None)  # its model has no weights
        release(hub, bytes(BASE))
        random.seed(7)
        yield made


@pytest.mark.parametrize("num_nights", [41, pytest.param(365, marks=pytest.mark.slow)])
def test_a_schedule_fills_no_volume(schedule: Schedule, hub: Hub, num_nights: int) -> None:
    runs: list[Run] = []
    places = iter(PLACES * num_nights)
    for night in range(num_nights):
        dies_in = next(places) if night % 4 == 3 else ""
        if night in (0, num_nights // 2):  # the base model is new, and its first download is interrupted
            if night:
                release(hub, bytes(BASE - 1) + b"\1", commit=LATER)
            for path, reply in hub.replies.items():
                if path.endswith("/model.safetensors"):
                    reply.pause_after = BASE // 2
            dies_in = "download"
        runs.append(schedule.night(passes=night % 5 != 2, dies_in=dies_in))
        for reply in hub.replies.values():
            reply.pause_after = None
    for _ in range(2):
        runs.append(schedule.night())

    newest = schedule.promoted[-1]
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(newest.best_model_dir).num_parameters() > 0
    for name, entry in read_json(newest.best_model_dir / MANIFEST)["files"].items():
        assert sha256_file(newest.best_model_dir / name) == entry["sha256"]
    assert [path.name for path in newest.base_models_dir.iterdir()] == [f"owner--model@{LATER}"]
    downloads = [at for method, at, _ in hub.requests if method == "GET" and at.endswith("/model.safetensors")]
    assert len(downloads) == 4, "each of the two base models: once interrupted, and once resumed"

    last = runs.pop()
    assert [run for run in runs if read_manifest(run.best_model_dir)] == schedule.promoted[-4:-1]
    for run in runs[:-2]:
        assert not run.checkpoints_dir.exists() and not run.base_model_dir.is_symlink()
        assert run.run_path.is_file(), "the record of every night stays"
    assert sum(run.report_path.is_file() for run in runs) > num_nights / 2
    endings = (".garbage", ".partial", ".old", ".lease")
    for path in (path for volume in schedule.volumes.values() for path in volume.rglob("*")):
        assert path.suffix not in endings and ".removed.json." not in path.name, path
    assert len(list(last.hidden_state_cache_dir.iterdir())) <= 4
    assert schedule.fullest["models_dir"] > 0.5 * schedule.limits["models_dir"], "the volume is not too large to matter"


@pytest.mark.parametrize("schedule", [{"keep_runs": None}, {"keep_models": None}], indirect=True, ids=str)
def test_without_retention_the_volume_is_full_within_weeks(schedule: Schedule) -> None:
    """Also with all models kept: the default has to remove models."""
    with pytest.raises(SystemExit) as stop:
        for _ in range(20):
            schedule.night()
    assert isinstance(full := stop.value.__context__, VolumeFull) and "models_dir" in str(full)
    assert len(schedule.promoted) == (6 if schedule.recipe.keep_runs is None else 10)
