"""Convert the fetched file to Parquet."""

from kfp import dsl
from kfp.dsl import Metrics, Output

from components import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def write_parquet(run: str, source: str, facts: Output[Metrics]) -> str:
    """Return the directory of `data.parquet`."""
    from pathlib import Path

    from tailtune.log import step
    from tailtune.parquet import write_parquet
    from tailtune.run import Run

    with step("parquet"):
        this = Run.from_json(run)
        written = write_parquet(Path(source), this.parquet_dir, this.recipe.data)
        for name in ("num_rows", "num_rejected", "num_duplicates", "source_bytes", "parquet_bytes"):
            facts.log_metric(name, getattr(written, name))
        return str(this.parquet_dir)
