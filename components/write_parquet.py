"""Convert the fetched files to Parquet, and check whether the data is new."""

from kfp import dsl
from kfp.dsl import Markdown, Metrics, Output

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def write_parquet(run: str, source: str, may_end: bool, facts: Output[Metrics], note: Output[Markdown]) -> str:
    """Return the directory of `data.parquet`, or "" when a promoted run has trained on the same data and settings.

    `may_end` is whether the pipeline has a condition that then ends the run. There is only one output, because the
    local runner finds no other one for a condition.
    """
    from pathlib import Path

    from tailtune.gate import check_data
    from tailtune.log import log, step
    from tailtune.owner import own_run
    from tailtune.parquet.write import write_parquet
    from tailtune.skip_unchanged import unchanged_since

    with step("parquet"):
        this = own_run(run)
        written = write_parquet(Path(source), this.parquet_dir, this.recipe.data, this.recipe.prompt)
        for name in ("num_rows", "num_rejected", "num_duplicates", "source_bytes", "parquet_bytes"):
            facts.log_metric(name, getattr(written, name))
        for name, value in check_data(this.recipe, written.path, this.data_check_path)["metrics"].items():
            facts.log_metric(name, value)
        if this.recipe.data.skip_unchanged and not may_end:
            log.info("parquet: the pipeline was compiled without data.skip_unchanged, so the run goes on in any case")
        unchanged = unchanged_since(this) if may_end else None
        if unchanged:
            log.info("parquet: %s; the run ends here", unchanged)
        Path(note.path).write_text(f"{unchanged or 'There is something to train'}.\n", encoding="utf-8")
        return "" if unchanged else str(this.parquet_dir)
