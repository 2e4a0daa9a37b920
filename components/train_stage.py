"""Launch the distributed training of a stage and wait for it."""

from kfp import dsl
from kfp.dsl import Metrics, Output

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def train_stage(run: str, data_dir: str, summary: Output[Metrics]) -> str:
    """Return the directory of the best model."""
    import math
    from pathlib import Path

    from tailtune.fetch.certificates import trust_mounted_certificates
    from tailtune.fetch.model import provide_base_model
    from tailtune.files import read_json
    from tailtune.jobs.train_step import train_stage
    from tailtune.log import step
    from tailtune.owner import own_run
    from tailtune.retention import refuse_removed

    with step("train"):
        this = own_run(run)
        trust_mounted_certificates()
        refuse_removed(Path(data_dir))
        base = provide_base_model(
            this.recipe, Path(data_dir), this.base_model_dir, this.small_model_cache_dir, this.base_models_dir
        )
        best_model_dir = train_stage(this, Path(data_dir), base)
        for name, value in read_json(this.models_dir / "training_summary.json").items():
            if isinstance(value, int | float) and math.isfinite(value):
                summary.log_metric(name, value)
        return str(best_model_dir)
