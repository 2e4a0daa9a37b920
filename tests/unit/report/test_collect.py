"""The report step: what it reads, what it writes, and what it leaves untouched the second time."""

import html
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_rows

from tailtune.evaluate import evaluate_models
from tailtune.fetch.dataset import fetch_dataset
from tailtune.gate import check_data, judge_file
from tailtune.kinds import metric_table
from tailtune.parquet.write import write_parquet
from tailtune.recipe.load import with_overrides
from tailtune.report.collect import collect_data_facts, collect_report, write_report
from tailtune.report.page import render_report
from tailtune.run import DATA_FILE, Run

METRICS = metric_table("chat")


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
    assert f'<span class="before">{document["metrics"]["base_answer_loss"]:.2f}</span>' in page
    assert 'chat = pipeline("text-generation", "best_model", do_sample=False' in html.unescape(page)
    assert f"<code>{run.models_dir}</code>" in page
    assert run.recipe.demo.questions[0] in page
    answers = json.loads((run.demo_dir / "answers.json").read_text())["answers"]
    assert [row["question"] for row in answers] == list(run.recipe.demo.questions)
    assert all(row["base"] == row["tuned"] for row in answers)
    assert (run.demo_dir / "answers.md").read_text().startswith("# Demo answers\n")
    assert "report: answers are complete" not in caplog.messages
    write_report(run, base, base)
    assert "report: answers are complete" in caplog.messages
    assert run.report_path.read_text(encoding="utf-8") == page


def test_the_report_shows_the_settings_that_were_used(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """Not those of the recipe's overlay, where -p has changed them."""
    run = make_run("mine", epochs=1)
    recipe = run.recipe.model_copy(
        update={"local": {"epochs": 2, "stages.0.trainer.warmup_steps": 3, "model.small": {}}}
    )
    recipe = with_overrides(recipe, {"stages.0.trainer.warmup_steps": 5})
    summary = collect_report(run.model_copy(update={"recipe": recipe}), tmp_path, {}).summary
    assert summary["local_overlay"] == ["epochs = 1", "model.small", "stages.0.trainer.warmup_steps = 5"]


def test_the_facts_of_the_data(run: Run) -> None:
    check = check_data(run.recipe, run.parquet_dir / DATA_FILE, run.data_check_path)
    facts = collect_data_facts(run)
    assert facts["check"] == check and check["metrics"]["answer_words"] == 5
    assert facts["num_train_rows"] + facts["num_validation_rows"] == facts["num_rows"]
    assert facts["parquet_bytes"] == (run.parquet_dir / DATA_FILE).stat().st_size
    assert len(facts["content_sha256"]) == 64 and facts["split_by"] == run.recipe.data.split_by
    assert "source" not in facts, "the fetch step wrote no manifest"


def test_validation_rows_of_their_own(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """Where they come from, and how many have a question that is trained on."""
    run = make_run()
    sources = [str(write_rows(tmp_path / name, number)) for name, number in (("t.jsonl", 40), ("v.jsonl", 10))]
    own = {"data.source": sources[0], "data.validation_source": sources[1], "data.split_by": None}
    run = run.model_copy(update={"recipe": with_overrides(run.recipe, {**own, "data.validation_share": None})})
    data = run.recipe.data
    raw = fetch_dataset(data.source, run.raw_dir, validation_source=data.validation_source)
    written = write_parquet(raw.path, run.parquet_dir, data, run.recipe.prompt)
    facts = collect_data_facts(run)
    assert facts["validation_source"] == sources[1] and written.num_on_both_sides == facts["num_on_both_sides"] == 10
    report = collect_report(run, tmp_path, {})
    page = html.unescape(render_report(report, METRICS))
    assert f"<dt>Validation rows from</dt><dd>{sources[1]}</dd>" in page
    assert "<dt>Validation rows with a training question</dt><dd>10</dd>" in page
    report.data.pop("validation_source")
    assert "Validation rows from" not in render_report(report, METRICS)
