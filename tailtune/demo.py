"""The demo: the recipe's questions to base and tuned, side by side, and the report of the whole run."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tailtune.base_model import describe_base_model
from tailtune.chat import answer, load_chat_model
from tailtune.log import log
from tailtune.manifest import (
    RESULTS_VERSION,
    directory_identity,
    publish,
    read_json,
    read_manifest,
    write_json,
    write_text,
)
from tailtune.recipe import Recipe
from tailtune.report import ReportData, render_report
from tailtune.run import Run
from tailtune.split import split_rows


def make_demo(run: Run, base: Path, tuned: Path) -> Path:
    """Answer the demo questions, write `demo_outputs/` and the report; return the report's path."""
    answers = answer_questions(run.recipe, base, tuned, run.demo_dir)
    write_text(run.report_path, render_report(collect_report(run, base, answers)))
    log.info("demo: report %s", run.report_path)
    return run.report_path


def answer_questions(recipe: Recipe, base: Path, tuned: Path, directory: Path) -> dict[str, Any]:
    """`demo_outputs/`: `answers.json` and `answers.md`. A complete directory is left untouched."""
    key = {
        "version": RESULTS_VERSION,
        "models": [directory_identity(base), directory_identity(tuned)],
        "recipe": recipe.model_dump(mode="json", include={"demo", "generation", "prompt"}),
    }
    if read_manifest(directory, key):
        log.info("demo: answers are complete")
    else:
        questions = recipe.demo.questions
        texts = {
            name: answer(load_chat_model(path), recipe.prompt, questions, recipe.generation, len(questions)).texts
            for name, path in (("base", base), ("tuned", tuned))
        }
        rows = [
            {"question": q, "base": b, "tuned": t}
            for q, b, t in zip(questions, texts["base"], texts["tuned"], strict=True)
        ]
        with publish(directory, key, {"num_questions": len(questions)}) as partial:
            write_json(partial / "answers.json", {"answers": rows, "generation": recipe.generation.model_dump()})
            write_text(partial / "answers.md", answers_markdown(rows))
        log.info("demo: %d questions answered by base and tuned", len(questions))
    return dict(read_json(directory / "answers.json"))


def answers_markdown(rows: list[dict[str, str]]) -> str:
    """The answers as indented blocks, so that no model text is taken for Markdown."""

    def block(text: str) -> str:
        return "\n".join(f"    {line}" for line in text.splitlines()) or "    (empty)"

    parts = [f"## {r['question']}\n\nBase:\n\n{block(r['base'])}\n\nTuned:\n\n{block(r['tuned'])}\n" for r in rows]
    return "# Demo answers\n\n" + "\n".join(parts)


def collect_report(run: Run, base: Path, demo: dict[str, Any]) -> ReportData:
    """Everything that the steps wrote, as the report wants it. What a step did not write stays empty."""
    summary = read_json(run.models_dir / "training_summary.json") or {}
    summary["base_model"] = describe_base_model(run.recipe, base)
    summary["local_overlay"] = [
        f"{key} = {value}" if isinstance(value, int | float) else key  # texts and lists stand in the recipe below
        for key, value in sorted(run.recipe.local.items())
        if run.local
    ]
    data = collect_data_facts(run)
    summary.setdefault("provenance", {}).update(
        base_model_revision=summary["base_model"].get("revision"), data_revision=data.get("revision")
    )
    return ReportData(
        run_name=run.name,
        recipe=run.recipe.public_dump(),
        data=data,
        summary=summary,
        history=read_json(run.models_dir / "training_history.json") or {},
        evaluation=read_json(run.evaluation_path) or {},
        verdict=read_json(run.verdict_path) or {},
        demo=demo,
    )


def collect_data_facts(run: Run) -> dict[str, Any]:
    """Facts of the fetch and parquet steps, and of the split."""
    raw, parquet = read_manifest(run.raw_dir), read_manifest(run.parquet_dir)
    facts: dict[str, Any] = {"split_by": run.recipe.data.split_by}
    if raw:
        facts |= {"source": raw["facts"]["source"], "revision": raw["facts"]["revision"],
                  "source_sha256": raw["facts"]["sha256"]}  # fmt: skip
    if parquet:
        facts |= parquet["facts"]
        file = parquet["files"]["data.parquet"]
        facts |= {"parquet_bytes": file["bytes"], "content_sha256": file["sha256"]}
        by = run.recipe.data.split_by
        table = pq.read_table(run.parquet_dir / "data.parquet")
        for side, rows in zip(("train", "validation"), split_rows(
            table, by, run.recipe.data.validation_share, run.recipe.seed), strict=True):  # fmt: skip
            facts[f"num_{side}_rows"] = rows.num_rows
            facts[f"num_{side}_groups"] = len(rows[by].unique())
    return facts
