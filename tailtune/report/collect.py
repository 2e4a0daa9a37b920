"""The report step: asks both models the demo questions, reads what the other steps wrote, writes the report."""

from pathlib import Path
from typing import Any

from tailtune.fetch.model import describe_base_model
from tailtune.files import read_json, write_text
from tailtune.kinds import kind_module, metric_table
from tailtune.log import log
from tailtune.manifest import content_sha256, read_manifest
from tailtune.parquet.split import read_split, split_values
from tailtune.recipe.load import value_at
from tailtune.report.page import ReportData, render_report
from tailtune.run import DATA_FILE, Run


def write_report(run: Run, base: Path, tuned: Path) -> Path:
    """Write `demo_outputs/` and the report; return the report's path. Raises UserError."""
    recipe, kind = run.recipe, run.recipe.stages[0].kind
    demo = kind_module(kind, "sections").write_demo(
        base, tuned, run.demo_dir, recipe.prompt, recipe.generation, recipe.demo
    )
    write_text(run.report_path, render_report(collect_report(run, base, demo), metric_table(kind)))
    if not run.local:  # pipeline.py names it in the end
        log.info("report: %s", run.report_path)
    return run.report_path


def collect_report(run: Run, base: Path, demo: dict[str, Any]) -> ReportData:
    """Everything that the steps wrote, in the form that the page needs. What a step did not write stays empty."""
    summary = read_json(run.models_dir / "training_summary.json") or {}
    summary["base_model"] = describe_base_model(run.recipe, base)
    summary["num_nodes"] = run.recipe.resources_of(run.recipe.stages[0]).num_nodes
    summary["local_overlay"] = [
        f"{key} = {value}" if isinstance(value, int | float) else key  # texts and lists are in the recipe on the page
        for key, value in ((key, value_at(run.recipe, key)) for key in sorted(run.recipe.local))
        if run.local
    ]
    data = collect_data_facts(run)
    summary.setdefault("provenance", {}).update(
        base_model_revision=summary["base_model"].get("revision"), data_revision=data.get("revision")
    )
    loading_lines = kind_module(run.recipe.stages[0].kind, "sections").loading_lines
    return ReportData(
        run_name=run.name,
        recipe=run.recipe.model_dump(mode="json"),
        data=data,
        summary=summary,
        history=read_json(run.models_dir / "training_history.json") or {},
        evaluation=read_json(run.evaluation_path) or {},
        verdict=read_json(run.verdict_path) or {},
        demo=demo,
        usage={"folder": str(run.models_dir), "lines": loading_lines(run.recipe.prompt, run.recipe.generation)},
    )


def collect_data_facts(run: Run) -> dict[str, Any]:
    """Facts of the fetch and parquet steps, what the rows teach, and the split."""
    raw, parquet = read_manifest(run.raw_dir), read_manifest(run.parquet_dir)
    by = run.recipe.data.split_by
    facts: dict[str, Any] = {
        "split_by": by or "nothing: the data set has validation rows of its own",
        "check": read_json(run.data_check_path) or {},
    }
    if raw:
        facts |= {
            "source": raw["facts"]["source"],
            "validation_source": raw["facts"].get("validation_source"),
            "revision": raw["facts"]["revision"],
            "source_sha256": raw["facts"]["sha256"],
        }
    if parquet:
        facts |= parquet["facts"]
        facts["parquet_bytes"] = parquet["files"][DATA_FILE]["bytes"]
        facts["content_sha256"] = content_sha256(run.parquet_dir, DATA_FILE)
        parts = read_split(run.recipe, run.parquet_dir / DATA_FILE)
        for side, rows in zip(("train", "validation"), parts, strict=True):
            facts[f"num_{side}_rows"] = rows.num_rows
            facts[f"num_{side}_groups"] = len(split_values(rows[by]).unique()) if by else rows.num_rows
    return facts
