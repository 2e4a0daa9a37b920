"""Two gloo ranks train a tiny model: whole, killed, stopped, and again."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from conftest import made_once, tiny_recipe
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tailtune.errors import UserError
from tailtune.files import write_json
from tailtune.jobs.train_step import train_stage
from tailtune.run import Run
from tailtune.train.checkpoints import is_complete, step_of

LONG = {"stages.0.trainer.num_train_epochs": 10, "stages.0.trainer.logging_steps": 11}
"""110 steps, time to be interrupted. The losses of 11 steps are logged after each checkpoint, also when resumed."""
LAUNCH = (
    "import sys; from pathlib import Path; from tailtune.log import step; from tailtune.run import Run\n"
    "from tailtune.jobs.train_step import train_stage\n"
    "with step('train'): train_stage(Run.from_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))"
)

FAULT_AT_STEP_5 = """
import os
if "RANK" in os.environ:
    import torch
    step = torch.optim.AdamW.step
    def faulty(self, *arguments, **options):
        if any(state["step"] == 5 for state in self.state.values()):
            raise ZeroDivisionError("a fault of the code")
        return step(self, *arguments, **options)
    torch.optim.AdamW.step = faulty
"""

TAKEN_OVER_AT_THE_END = """
import os
from pathlib import Path
from tailtune.files import write_json
from tailtune.train import run
from tailtune.train.__main__ import main
refuse_no_best = run.refuse_no_best
def last_before_publishing(*arguments):
    refuse_no_best(*arguments)
    write_json(Path(os.environ["TAILTUNE_OWNER_FILE"]), {"pipeline_run": "second"})
run.refuse_no_best = last_before_publishing
main()
"""


WITH_ALL_LAST_LINES = """
from tailtune import progress
from tailtune.train.__main__ import main
progress.FIRST_LINE_SECONDS = 0
main()
"""


def launch(run: Run, prepared: Path, log: Path) -> "subprocess.Popen[bytes]":
    arguments = [run.to_json(), str(prepared / "data"), str(prepared / "base")]
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-c", LAUNCH, *arguments], stdout=file, stderr=file)


def wait_for_checkpoints(run: Run, count: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if sum(is_complete(path) for path in (run.models_dir / "checkpoints").glob("checkpoint-*")) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {count} complete checkpoints, exit status {process.poll()}")


def find_rank(process: "subprocess.Popen[bytes]", rank: int) -> psutil.Process:
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"no process of rank {rank}")


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.best_model_dir / "model.safetensors")


def max_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def fingerprint(root: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """A completed run of 110 steps, and its log."""

    def make(root: Path) -> Run:
        return Run(name="undisturbed", recipe=tiny_recipe(**LONG), local=True, data_dir=root / "data",
                   models_dir=root / "models", workspace_dir=root / "workspace")  # fmt: skip

    def train(root: Path) -> None:
        process = launch(make(root), prepared, root / "log")
        assert process.wait(timeout=300) == 0, (root / "log").read_text()

    root = made_once(tmp_path_factory, "undisturbed", train)
    return make(root), (root / "log").read_text()


def test_all_artefacts_are_written(undisturbed: tuple[Run, str], prepared: Path) -> None:
    run, log = undisturbed
    assert "2 ranks" in log
    names = {p.name for p in run.models_dir.iterdir()}
    assert {"best_model", "checkpoints", "training_history.json", "training_summary.json", "tensorboard"} <= names
    history = json.loads((run.models_dir / "training_history.json").read_text())
    assert {"step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "peak_memory_bytes"} <= set(
        history["train"][0]
    )
    assert len(history["eval"]) >= 5
    summary = json.loads((run.models_dir / "training_summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["learning_rate"] == pytest.approx(0.002)  # scaled by two ranks
    assert summary["hardware"]["precision"] == "fp32"
    assert summary["provenance"]["data_sha256"]
    assert summary["num_train_rows"] + summary["num_validation_rows"] == 50
    assert list((run.models_dir / "tensorboard").glob("events*"))


def test_the_best_model_is_an_ordinary_one_with_an_untied_head(undisturbed: tuple[Run, str], prepared: Path) -> None:
    run, _ = undisturbed
    model = AutoModelForCausalLM.from_pretrained(run.best_model_dir)
    assert not model.config.tie_word_embeddings
    base = load_file(prepared / "base" / "model.safetensors")
    tuned = weights(run)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(tuned[embedding], base[embedding])
    assert not torch.equal(tuned["lm_head.weight"], tuned[embedding])
    frozen, trained = "model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"
    assert torch.equal(tuned[frozen], base[frozen])
    assert not torch.equal(tuned[trained], base[trained])
    tokenizer = AutoTokenizer.from_pretrained(run.best_model_dir)
    assert "<|im_start|>" in tokenizer.chat_template
    assert (run.best_model_dir / "system_prompt.txt").read_text() == run.recipe.prompt.system


def test_best_is_the_lowest_eval_loss(undisturbed: tuple[Run, str]) -> None:
    run, _ = undisturbed
    history = json.loads((run.models_dir / "training_history.json").read_text())
    summary = json.loads((run.models_dir / "training_summary.json").read_text())
    best = min(history["eval"], key=lambda entry: entry["eval_loss"])
    assert (summary["best_step"], summary["best_eval_loss"]) == (best["step"], best["eval_loss"])


def test_again_does_no_step_and_changes_no_file(undisturbed: tuple[Run, str], prepared: Path) -> None:
    run, _ = undisturbed
    before = fingerprint(run.models_dir)
    train_stage(run, prepared / "data", prepared / "base")
    assert fingerprint(run.models_dir) == before


def test_other_settings_do_not_resume_from_these_checkpoints(undisturbed: tuple[Run, str], prepared: Path) -> None:
    run, _ = undisturbed
    other = run.model_copy(update={"recipe": tiny_recipe(**LONG, seed=7)})
    with pytest.raises(UserError, match=r"made with other settings \(seed\); choose another --run-name"):
        train_stage(other, prepared / "data", prepared / "base")


def test_a_killed_rank_restarts_all_and_ends_with_the_same_weights(
    undisturbed: tuple[Run, str], prepared: Path, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run("killed", **LONG)
    process = launch(run, prepared, tmp_path / "log")
    wait_for_checkpoints(run, 2, process)
    find_rank(process, 1).kill()
    assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    resumed = next(line for line in log.splitlines() if "resuming from checkpoint-" in line)
    step = int(resumed.split("checkpoint-")[1].split(",")[0])
    assert resumed.endswith(f"next step is {step + 1}")
    summary = json.loads((run.models_dir / "training_summary.json").read_text())
    assert summary["resumed_from_steps"] == [step]
    reference, _ = undisturbed
    assert max_difference(weights(run), weights(reference)) <= 1e-4
    # the steps after the checkpoint are those of the undisturbed run
    losses = {e["step"]: e["loss"] for e in json.loads((run.models_dir / "training_history.json").read_text())["train"]}
    expected = json.loads((reference.models_dir / "training_history.json").read_text())["train"]
    assert losses == pytest.approx({e["step"]: e["loss"] for e in expected}, rel=1e-4)


@pytest.mark.slow
def test_the_same_exception_at_the_same_step_is_not_repeated_for_ever(
    prepared: Path, make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT_AT_STEP_5)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    log = tmp_path / "log"
    assert launch(make_run("faulty", **{"resources.max_restarts": 3}), prepared, log).wait(timeout=180) == 1
    text = log.read_text()
    assert "error: the same error at step 5 in two attempts: ZeroDivisionError: a fault of the code" in text
    assert 2 <= text.count("ZeroDivisionError: a fault of the code\n") <= 4, "two attempts, of one or both ranks"


def test_checkpoints_are_saved_by_time_too(prepared: Path, make_run: Callable[..., Run], tmp_path: Path) -> None:
    """A run that is killed before its first evaluation resumes nevertheless."""
    rare = {"stages.0.trainer.save_steps": 100, "stages.0.trainer.eval_steps": 100}
    run = make_run("timed", **LONG, **rare, **{"stages.0.resources.checkpoint_seconds": 1})
    process = launch(run, prepared, tmp_path / "log")
    wait_for_checkpoints(run, 1, process)
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        each.kill()
    process.wait()
    first = min(step_of(path.parent) for path in (run.models_dir / "checkpoints").glob("*/complete.json"))
    assert 0 < first < 100
    train_stage(run, prepared / "data", prepared / "base")
    resumed = json.loads((run.models_dir / "training_summary.json").read_text())["resumed_from_steps"]
    assert resumed and resumed[0] >= first


def test_a_run_that_was_taken_over_saves_nothing_more(
    prepared: Path, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """Two pipeline runs of one name: the second must not resume from what the first one's ranks still save."""
    run = make_run("mine", **LONG).model_copy(update={"pipeline_run": "first"})
    process = launch(run, prepared, tmp_path / "log")
    wait_for_checkpoints(run, 1, process)
    write_json(run.owner_path, {"pipeline_run": "second"})
    time.sleep(0.3)  # a save that has begun
    saved = {path.parent.name for path in (run.models_dir / "checkpoints").glob("*/complete.json")}
    assert process.wait(timeout=120) == 1
    assert "pipeline run second has taken over this run's directories" in (tmp_path / "log").read_text()
    assert {path.parent.name for path in (run.models_dir / "checkpoints").glob("*/complete.json")} == saved
    assert not run.best_model_dir.exists()
    other = make_run("mine", **LONG, learning_rate=0.5)
    with pytest.raises(
        UserError, match=r"were made with other settings \(.*learning_rate\); choose another --run-name"
    ):
        train_stage(other, prepared / "data", prepared / "base")


@pytest.mark.slow
def test_only_rank_0_shows_progress_and_it_is_tailtunes(
    prepared: Path, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    settings = {"tail.cache": "disk", "trainer.max_steps": 2, "trainer.eval_steps": 1}
    run = make_run("mine", **{f"stages.0.{name}": value for name, value in settings.items()})
    recipe = tmp_path / "recipe.json"
    recipe.write_text(run.recipe.to_json())
    (tmp_path / "all_last_lines.py").write_text(WITH_ALL_LAST_LINES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               "-m", "all_last_lines", "--recipe", str(recipe),
               "--data-dir", str(prepared / "data"), "--model-dir", str(prepared / "base"),
               "--output-dir", str(run.models_dir)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    last = [match for line in done.stderr.splitlines() if (match := re.match(r"tailtune \| (.*) in \d+ s$", line))]
    works = [re.sub(r"[\d,./]+( loss .*)? [\d.,]+ \w+/s$", "…", match[1]) for match in last]
    assert works == [
        "train: tokenizing row …", "train: tokenizing row …", "model: loading base, tensor …",
        "tail: checking shard …", "tail: frozen layers, token …", "tail: opening shard …",
        "train: preparing model and rows", "train: evaluating row …", "train: evaluating row …",
        "train: step …", "train: saving the model",
    ], done.stderr  # fmt: skip
    assert "it/s" not in done.stderr and "\r" not in done.stderr


@pytest.mark.slow
def test_a_run_that_is_taken_over_after_its_last_save_publishes_nothing(
    prepared: Path, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run("mine", **{"resources.ranks_per_node": 1, "stages.0.trainer.num_train_epochs": 1})
    recipe = tmp_path / "recipe.json"
    recipe.write_text(run.recipe.to_json())
    write_json(run.owner_path, {"pipeline_run": "first"})
    command = [sys.executable, "-c", TAKEN_OVER_AT_THE_END, "--recipe", str(recipe),
               "--data-dir", str(prepared / "data"), "--model-dir", str(prepared / "base"),
               "--output-dir", str(run.models_dir)]  # fmt: skip
    environment = {**os.environ, "TAILTUNE_OWNER_FILE": str(run.owner_path), "TAILTUNE_PIPELINE_RUN": "first"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "pipeline run second has taken over this run's directories" in done.stderr
    assert list((run.models_dir / "checkpoints").glob("*/complete.json"))
    assert not run.best_model_dir.exists() and not (run.models_dir / "training_summary.json").exists()


@pytest.mark.slow
def test_sigterm_saves_and_the_next_call_goes_on(
    undisturbed: tuple[Run, str], prepared: Path, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run("stopped", **LONG)
    process = launch(run, prepared, tmp_path / "log")
    wait_for_checkpoints(run, 1, process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=120) == 1
    log = (tmp_path / "log").read_text()
    assert "stopped by a signal; run again to resume" in log and "Traceback" not in log, log
    stopped = next(line for line in log.splitlines() if "stopped at step" in line)
    step = int(stopped.split("stopped at step ")[1].split()[0])
    assert is_complete(run.models_dir / "checkpoints" / f"checkpoint-{step}")
    assert not run.best_model_dir.exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(run.models_dir) in " ".join(p.info["cmdline"] or [])]

    train_stage(run, prepared / "data", prepared / "base")
    assert json.loads((run.models_dir / "training_summary.json").read_text())["resumed_from_steps"] == [step]
    reference, _ = undisturbed
    assert max_difference(weights(run), weights(reference)) <= 1e-4


@pytest.mark.slow
def test_a_save_of_40_seconds_survives_sigterm(prepared: Path, make_run: Callable[..., Run], tmp_path: Path) -> None:
    """torchrun's own default would kill the ranks after 30 seconds, in the middle of the save."""
    (tmp_path / "slow_save.py").write_text(
        "import time\n"
        "from transformers import Trainer\n"
        "original = Trainer._save_optimizer_and_scheduler\n"
        "def slow(self, output_dir):\n"
        "    time.sleep(40)\n"
        "    original(self, output_dir)\n"
        "Trainer._save_optimizer_and_scheduler = slow\n"
        "from tailtune.train.__main__ import main\n"
        "main()\n"
    )
    run = make_run("slow", **LONG, **{"stages.0.trainer.save_steps": 1000, "stages.0.trainer.eval_steps": 1000})
    log = tmp_path / "log"
    launcher = LAUNCH.replace("with step", "import tailtune.jobs.local as t, dataclasses\n"
                              "original = t.run_job\n"
                              "t.run_job = lambda job: original(dataclasses.replace(job, module='slow_save'))\n"
                              "with step")  # fmt: skip
    arguments = [run.to_json(), str(prepared / "data"), str(prepared / "base")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", launcher, *arguments], stdout=file, stderr=file,
                                   env=environment)  # fmt: skip
    deadline = time.monotonic() + 120
    while "train: step" not in log.read_text():
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.1)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=200) == 1
    assert time.monotonic() - start >= 40
    step = int(log.read_text().split("stopped at step ")[1].split()[0])
    assert is_complete(run.models_dir / "checkpoints" / f"checkpoint-{step}")


@pytest.mark.slow
def test_bf16_trains_on_fp32_master_weights_and_saves_bf16(
    prepared: Path, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """The precision of the GPU profiles, on the CPU: frozen bf16 layers below an fp32 tail, under autocast."""
    run = make_run("bf16", **{"hardware.precision": "bf16", "resources.ranks_per_node": 1, "stages.0.loss": "all"})
    process = launch(run, prepared, tmp_path / "log")
    assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    summary = json.loads((run.models_dir / "training_summary.json").read_text())
    assert summary["hardware"]["precision"] == "bf16"
    assert {tensor.dtype for tensor in weights(run).values()} == {torch.bfloat16}
    history = json.loads((run.models_dir / "training_history.json").read_text())
    assert history["eval"][-1]["eval_loss"] < history["eval"][0]["eval_loss"]
    newest = max((run.models_dir / "checkpoints").glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    held = load_file(newest / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.float32}
    assert {name.split(".")[2] for name in held if ".layers." in name} == {"1", "2"}  # the last layers alone


@pytest.mark.slow
def test_ranks_alone_refuse_another_training_and_count_all_attempts(
    prepared: Path, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """torchrun without the launcher, as on bare machines: the key is checked by the ranks themselves."""
    run = make_run("bare", **{"resources.ranks_per_node": 1})
    recipe = tmp_path / "recipe.json"
    recipe.write_text(run.recipe.to_json())
    command = [sys.executable, "-m", "tailtune.train", "--recipe", str(recipe), "--data-dir", str(prepared / "data"),
               "--model-dir", str(prepared / "base"), "--output-dir", str(run.models_dir)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    first = json.loads((run.models_dir / "training_summary.json").read_text())
    refused = subprocess.run([*command, "-p", "learning_rate=0.5"], capture_output=True, text=True,
                             env={**os.environ, "EPOCHS": "9"})  # fmt: skip
    assert refused.returncode == 1 and "train: error: the checkpoints in" in refused.stderr
    assert "trainer.learning_rate" in refused.stderr and "trainer.num_train_epochs" in refused.stderr
    subprocess.run(command, check=True, capture_output=True)
    again = json.loads((run.models_dir / "training_summary.json").read_text())
    assert again["num_steps"] == first["num_steps"]
    assert again["train_seconds"] >= 0.8 * first["train_seconds"]
    assert again["rows_per_second"] > 0
