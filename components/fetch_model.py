"""Fetch the base model to the model volume, while the data is fetched and converted.

A model built from the data, or that of a run that may find no new data, is left to the train step.
"""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def fetch_model(run: str) -> str:
    """Return the directory of the base model."""
    from tailtune.fetch.certificates import trust_mounted_certificates
    from tailtune.fetch.model import check_base_model, provide_base_model
    from tailtune.log import step
    from tailtune.resolve import claim_directories
    from tailtune.retention import remove_old_runs
    from tailtune.run import Run

    with step("model"):
        trust_mounted_certificates()
        this = Run.from_json(run)
        claim_directories(this)
        remove_old_runs(this)  # as the step beside this one: whichever is first
        if this.recipe.model.base_model != "small" and not this.recipe.data.skip_unchanged:
            base = provide_base_model(this.recipe, this.parquet_dir, this.base_model_dir, store=this.base_models_dir)
            check_base_model(this.recipe, base)  # in seconds, and not by ranks that are restarted
        return str(this.base_model_path)
