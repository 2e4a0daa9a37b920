"""Fetch the base model to the model volume, while the data is fetched.

A model that is made from the data, or of a run that may find no new data, is left to the train step.
"""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def fetch_model(run: str) -> str:
    """Return the directory of the base model."""
    from tailtune.fetch.certificates import trust_mounted_certificates
    from tailtune.fetch.model import base_model_path, provide_base_model
    from tailtune.jobs.kubernetes import claim
    from tailtune.log import log, step
    from tailtune.run import Run

    with step("model"):
        trust_mounted_certificates()
        this = Run.from_json(run)
        if this.recipe.model.base_model == "small" or this.recipe.data.skip_unchanged:
            log.info("model: left to the train step")
        else:
            if not this.local:
                claim(this)
            provide_base_model(this.recipe, this.parquet_dir, this.base_model_dir)
        return str(base_model_path(this))
