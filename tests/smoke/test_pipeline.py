"""The pipeline as a user starts it: whole, again, failing the gate, stopped."""

import hashlib
import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import write_rows
from kubernetes_server import cluster
from pipelines import run, start, write_recipe

from tailtune.parquet.split import split_rows

ROOT = Path(__file__).resolve().parents[2]


def fingerprint(root: Path) -> dict[str, tuple[int, str]]:
    """Times and hashes of a run's files, logs and locks apart."""
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in ("pipeline.log", ".lock")
    }


def test_the_whole_pipeline_and_again(tmp_path: Path) -> None:
    tmp_path = tmp_path / "my python3.11 things"  # KFP looks for `python3` in a step's arguments
    tmp_path.mkdir()
    recipe = write_recipe(tmp_path)
    for name in ("random", "queue", "torch", "tailtune"):  # beside the data; no step and no rank imports them
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/imported', 'a').write('{name} ')\n")
    code, out, err = run(tmp_path, "--recipe", str(recipe), "--run-name", "first")
    assert code == 0 and not (tmp_path / "imported").exists(), err
    assert out.splitlines()[-1] == "runs/first"
    directory = tmp_path / "runs" / "first"
    lines = err.splitlines()
    for step in ("resolve", "fetch", "parquet", "model", "train", "evaluate", "gate", "report"):
        assert any(line.startswith(f"{step}: ") for line in lines), err
    assert len(lines) < 70 and not any("{" in line for line in lines), err  # no pages of JSON
    assert any(line.startswith("evaluate: answer loss") and "unigram floor" in line for line in lines)
    assert (
        "parquet: the rows teach words per answer 5, answers with numbered steps 0 %, answers with a warning 0 %"
        in lines
    )
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert "What is" in page
    table = pq.read_table(directory / "data" / "parquet" / "data.parquet")
    assert table.column_names == ["full-question", "answer"]
    train, validation = split_rows(table, "full-question", 0.2, 42)
    assert not set(train["full-question"].to_pylist()) & set(validation["full-question"].to_pylist())
    answers = json.loads((directory / "models" / "demo_outputs" / "answers.json").read_text())["answers"]
    assert len(answers) == 5 and set(answers[0]) == {"question", "base", "tuned"}

    program = "from tailtune.cli import main; main()"
    command = [sys.executable, "-P", "-c", program, "ask", "What is it?", "--model", "both"]
    asked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert asked.returncode == 0 and asked.stderr.splitlines()[0] == "run first", asked.stderr
    assert asked.stdout.startswith("base:\n") and "\ntuned:\n" in asked.stdout

    # the report's three lines, as they stand there, load the model without tailtune and answer as the report does
    (block,) = re.findall(r'<pre [^>]*id="load"[^>]*>(.*?)</pre>', page, re.DOTALL)
    program = html.unescape(re.sub(r"<[^>]+>", "", block))
    assert len(program.strip().splitlines()) == 3
    said = subprocess.run(
        [sys.executable, "-I", "-c", program.replace("YOUR QUESTION", answers[0]["question"])],
        cwd=directory / "models", capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert said.stdout.strip() == answers[0]["tuned"] != "", said.stderr

    # the same data in another run: nothing to train, when the recipe says so
    code, out, err = run(tmp_path, "--recipe", str(recipe), "--run-name", "again", "-p", "data.skip_unchanged=true")
    assert code == 0, err
    assert "parquet: data and settings are those of run first, promoted " in err and "nothing to train" in err
    assert not any(line.startswith(("model: ", "train: ", "report: ")) for line in err.splitlines()), err
    assert not (tmp_path / "runs" / "again" / "models" / "best_model").exists()

    # another threshold judges the same model anew, without a training step, and the run ends as failed
    rule = '[{metric: tuned_answer_loss, comparison: "<", threshold: 0.001}]'
    code, out, err = run(tmp_path, "--recipe", str(recipe), "--run-name", "first", "-p", f"gate={rule}")
    assert code == 1
    assert "train: step" not in err
    assert "did not pass the gate (tuned_answer_loss:" in err.splitlines()[-2], err
    assert json.loads((directory / "models" / "recipe.json").read_text())["gate"][0]["threshold"] == 0.001
    assert json.loads((directory / "workspace" / "verdict.json").read_text())["passed"] is False
    assert "✕ Rejected" in (directory / "report.html").read_text(encoding="utf-8")

    # again, without a recipe: the run's own, the gate of the last call included, and nothing is done twice
    before = fingerprint(directory)
    code, out, err = run(tmp_path, "--run-name", "first")
    assert code == 1
    assert "continuing runs/first with its own recipe" in err and "train: step" not in err
    assert fingerprint(directory) == before

    # other training settings and data are refused before anything is overwritten
    other = write_rows(tmp_path / "other.jsonl", 40)
    parameters = ("-p", "learning_rate=0.5", "-p", f"data_source={other}")
    code, out, err = run(tmp_path, "--run-name", "first", *parameters)
    assert code == 1
    assert err.splitlines()[-1].startswith("failed: resolve: this run was trained with other settings: "), err
    assert "learning_rate" in err and "data.source" in err and "choose another --run-name" in err
    assert "report:" not in err and fingerprint(directory) == before


def test_a_failing_step_ends_the_run_with_its_line(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"topic": "a", "questoin": "b", "answer": "c"}\n')
    code, out, err = run(tmp_path, "--recipe", str(recipe), "--run-name", "bad")
    assert code == 1
    assert out.splitlines()[-1] == "runs/bad"
    assert err.splitlines()[-1].startswith("failed: parquet: column 'question' is not in the data, did you mean "), err
    assert "Traceback" not in err
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.slow
def test_a_stopped_run_leaves_no_process_and_goes_on(prepared: Path, tmp_path: Path) -> None:
    settings = {"stages.0.trainer.num_train_epochs": 80, "model.base_model": str(prepared / "base")}
    recipe = write_recipe(tmp_path, **settings)
    run_dir = tmp_path / "runs" / "stopped"
    last = 0
    for number, arguments in ((signal.SIGTERM, ("--recipe", str(recipe))), (signal.SIGINT, ())):
        process = start(tmp_path, *arguments, "--run-name", "stopped")
        deadline = time.monotonic() + 180
        while last_step(run_dir) <= last:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1
        assert err.splitlines()[-1] == "stopped by a signal; run again with --run-name stopped to continue", err
        saved = max((run_dir / "models" / "checkpoints").glob("checkpoint-*/complete.json"), key=step_of)
        assert step_of(saved) > last
        resumed = f"train: resuming from checkpoint-{last}, next step is {last + 1}"
        assert not last or resumed in (run_dir / "workspace" / "pipeline.log").read_text()
        last = step_of(saved)
        leftover = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
        assert not leftover, leftover
        assert not list((tmp_path / "tmp").iterdir())


def last_step(run_dir: Path) -> int:
    """The last step that the run's log tells of; 0 before the first one."""
    log = run_dir / "workspace" / "pipeline.log"
    steps = re.findall(r"train: step (\d+)/", log.read_text()) if log.is_file() else []
    return int(steps[-1]) if steps else 0


def step_of(complete: Path) -> int:
    return int(complete.parent.name.removeprefix("checkpoint-"))


def test_the_clusters_graph_runs_doctor_first_and_cleans_up_last(tmp_path: Path) -> None:
    """As a cluster would run it, with its doctor, a step that fails, and the task behind the exit handler."""
    recipe = write_recipe(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"topic": "a", "questoin": "b", "answer": "c"}\n')
    program = (
        "import sys, pipeline; from pathlib import Path\n"
        "from kfp import local; from tailtune.recipe.load import load_recipe\n"
        "recipe, folder = load_recipe(sys.argv[1]), Path(sys.argv[2])\n"
        "local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(folder / 'artifacts'))\n"
        "pipeline.make_pipeline(recipe)(**pipeline.parameter_values(recipe), run_name='mine', local=True,\n"
        "    **{name: str(folder / name) for name in pipeline.DIRECTORIES})\n"
    )
    with cluster(tmp_path / "server") as server:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "KUBECONFIG": str(server.kubeconfig)}
        done = subprocess.run([sys.executable, "-c", program, str(recipe), str(tmp_path)], cwd=tmp_path,
                              env=environment, capture_output=True, text=True, timeout=400)  # fmt: skip
        asked = list(server.requests)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "parquet: error: column 'question' is not in the data" in output
    assert output.index("'resolve-recipe'") < output.index("'write-parquet'")
    assert "'stop-jobs'" in output[output.index("parquet: error:") :] and "train-stage" not in output
    assert asked.count("GET /apis/kubeflow.org/v1/namespaces/lyric-professor/pytorchjobs") == 1, "the last step looked"
