"""The demo: the recipe's questions to base and tuned, side by side, and the report of the whole run."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tailtune.fetch.model import describe_base_model
from tailtune.files import read_json, write_text
from tailtune.kinds.chat.sections import answer_questions
from tailtune.log import log
from tailtune.manifest import read_manifest
from tailtune.parquet.split import split_rows
from tailtune.report.data import ReportData
from tailtune.report.page import render_report
from tailtune.run import Run


def write_report(run: Run, base: Path, tuned: Path) -> Path:
    """Answer the demo questions, write `demo_outputs/` and the report; return the report's path."""
    answers = answer_questions(run.recipe, base, tuned, run.demo_dir)
    write_text(run.report_path, render_report(collect_report(run, base, answers)))
    log.info("report: %s", run.report_path)
    return run.report_path


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
