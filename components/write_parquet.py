"""Convert the fetched file to Parquet, and check whether the data is new."""

from kfp import dsl
from kfp.dsl import Markdown, Metrics, Output

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def write_parquet(run: str, source: str, facts: Output[Metrics], note: Output[Markdown]) -> str:
    """Return the directory of `data.parquet`, or "" when a promoted run has trained on the same data and settings.

    There is only one output, because the local runner finds no other one for a condition.
    """
    from pathlib import Path

    from tailtune.log import log, step
    from tailtune.parquet.write import write_parquet
    from tailtune.run import Run
    from tailtune.skip_unchanged import unchanged_since

    with step("parquet"):
        this = Run.from_json(run)
        written = write_parquet(Path(source), this.parquet_dir, this.recipe.data)
        for name in ("num_rows", "num_rejected", "num_duplicates", "source_bytes", "parquet_bytes"):
            facts.log_metric(name, getattr(written, name))
        unchanged = unchanged_since(this)
        if unchanged:
            log.info("parquet: %s; the run ends here", unchanged)
        Path(note.path).write_text(f"{unchanged or 'There is something to train'}.\n", encoding="utf-8")
        return "" if unchanged else str(this.parquet_dir)
