"""Fetch the data file to the data volume."""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def fetch_dataset(run: str) -> str:
    """Return the path of the fetched file."""
    from tailtune.fetch.certificates import trust_mounted_certificates
    from tailtune.fetch.dataset import fetch_dataset
    from tailtune.log import step
    from tailtune.resolve import claim_directories
    from tailtune.run import Run
    from tailtune.training_key import has_trained

    with step("fetch"):
        trust_mounted_certificates()
        this = Run.from_json(run)
        claim_directories(this)
        data = this.recipe.data
        keep = has_trained(this.models_dir / "checkpoints")
        return str(fetch_dataset(data.source, this.raw_dir, sha256=data.sha256, keep=keep).path)
