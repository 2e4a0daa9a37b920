"""Fetch the data files to the data volume."""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def fetch_dataset(run: str) -> str:
    """Return the path of the fetched file, or the directory of several."""
    from tailtune.fetch.certificates import trust_mounted_certificates
    from tailtune.fetch.dataset import fetch_dataset
    from tailtune.log import step
    from tailtune.resolve import claim_directories
    from tailtune.retention import remove_old_runs
    from tailtune.run import Run
    from tailtune.training_key import has_trained

    with step("fetch"):
        trust_mounted_certificates()
        this = Run.from_json(run)
        claim_directories(this)
        remove_old_runs(this)  # before anything is written: the volumes may be full
        data = this.recipe.data
        keep = has_trained(this.models_dir)
        fetched = fetch_dataset(
            data.source, this.raw_dir, validation_source=data.validation_source, sha256=data.sha256, keep=keep
        )
        return str(fetched.path)
