"""The report step: what it reads, what it writes, and what it leaves untouched the second time."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tailtune.evaluate import evaluate_models
from tailtune.gate import judge_file
from tailtune.report.collect import collect_data_facts, write_report
from tailtune.run import DATA_FILE, Run


@pytest.fixture
def run(make_run: Callable[..., Run], prepared: Path) -> Run:
    run = make_run()
    shutil.copytree(prepared / "data", run.parquet_dir)
    return run


def test_the_step_answers_the_questions_and_writes_the_report(
    run: Run, prepared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tailtune")
    base = prepared / "base"
    document = evaluate_models(run.recipe, run.parquet_dir / DATA_FILE, base, base, run.evaluation_path)
    judge_file(run.recipe, run.evaluation_path, run.verdict_path)
    assert write_report(run, base, base) == run.report_path
    page = run.report_path.read_text(encoding="utf-8")
    assert f"<dt>Perplexity</dt><dd>{document['metrics']['base_perplexity']:.0f}" in page.replace(",", "")
    assert run.recipe.demo.questions[0] in page
    answers = json.loads((run.demo_dir / "answers.json").read_text())["answers"]
    assert [row["question"] for row in answers] == list(run.recipe.demo.questions)
    assert all(row["base"] == row["tuned"] for row in answers)
    assert (run.demo_dir / "answers.md").read_text().startswith("# Demo answers\n")
    assert "report: answers are complete" not in caplog.messages
    write_report(run, base, base)
    assert "report: answers are complete" in caplog.messages
    assert run.report_path.read_text(encoding="utf-8") == page


def test_the_facts_of_the_data(run: Run) -> None:
    facts = collect_data_facts(run)
    assert facts["num_train_rows"] + facts["num_validation_rows"] == facts["num_rows"]
    assert facts["parquet_bytes"] == (run.parquet_dir / DATA_FILE).stat().st_size
    assert len(facts["content_sha256"]) == 64 and facts["split_by"] == run.recipe.data.split_by
    assert "source" not in facts, "the fetch step wrote no manifest"
