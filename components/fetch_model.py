"""Provide the base model: fetched to the model volume, used in place, or built small."""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def fetch_model(run: str, data_dir: str) -> str:
    """Return the directory of the base model."""
    from pathlib import Path

    from tailtune.fetch.certificates import trust_mounted_certificates
    from tailtune.fetch.model import provide_base_model
    from tailtune.log import step
    from tailtune.run import Run

    with step("model"):
        trust_mounted_certificates()
        this = Run.from_json(run)
        return str(provide_base_model(this.recipe, Path(data_dir), this.base_model_dir, this.small_model_cache_dir))
