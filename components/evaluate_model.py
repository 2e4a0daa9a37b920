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
    from tailtune.run import DATA_FILE, Run

    with step("evaluate"):
        this = Run.from_json(run)
        data, tuned = Path(data_dir) / DATA_FILE, Path(tuned_model_dir)
        document = evaluate_models(this.recipe, data, this.base_model_path, tuned, this.evaluation_path)
        for name, value in document["metrics"].items():
            if math.isfinite(value):
                metrics.log_metric(name, value)
        return str(this.evaluation_path)
