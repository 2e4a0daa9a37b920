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
    from tailtune.report.collect import write_report
    from tailtune.run import Run

    with step("report"):
        this = Run.from_json(run)
        path = write_report(this, this.base_model_path, Path(tuned_model_dir))
        shutil.copyfile(path, report.path)
        return str(path)
