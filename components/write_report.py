"""Answer the demo questions and write the report."""

from kfp import dsl
from kfp.dsl import HTML, Output

from tailtune import images


@dsl.component(base_image=images.TRAINER, install_kfp_package=False)
def write_report(run: str, tuned_model_dir: str, report: Output[HTML]) -> str:
    """Return the path of the report, which is also an artifact."""
    import shutil
    from pathlib import Path

    from tailtune.log import step
    from tailtune.owner import own_run
    from tailtune.report.collect import write_report
    from tailtune.retention import refuse_removed

    with step("report"):
        this = own_run(run)
        refuse_removed(this.parquet_dir, Path(tuned_model_dir), this.base_model_path)
        path = write_report(this, this.base_model_path, Path(tuned_model_dir))
        shutil.copyfile(path, report.path)
        return str(path)
