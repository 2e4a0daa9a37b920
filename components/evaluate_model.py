"""Evaluate base and tuned model on the validation rows."""

from kfp import dsl
from kfp.dsl import Metrics, Output

from tailtune import images


@dsl.component(base_image=images.TRAINER, install_kfp_package=False)
def evaluate_model(run: str, data_dir: str, tuned_model_dir: str, metrics: Output[Metrics]) -> str:
    """Return the path of `evaluation.json`."""
    import math
    from pathlib import Path

    from tailtune.evaluate import evaluate_models
    from tailtune.log import step
    from tailtune.owner import own_run
    from tailtune.retention import refuse_removed
    from tailtune.run import DATA_FILE

    with step("evaluate"):
        this = own_run(run)
        data, tuned = Path(data_dir) / DATA_FILE, Path(tuned_model_dir)
        refuse_removed(data.parent, tuned, this.base_model_path)
        document = evaluate_models(this.recipe, data, this.base_model_path, tuned, this.evaluation_path)
        for name, value in document["metrics"].items():
            if math.isfinite(value):
                metrics.log_metric(name, value)
        return str(this.evaluation_path)
