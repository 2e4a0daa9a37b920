"""Let the doctor look at the cluster before anything runs on it."""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def check_cluster(run: str, trainer_image: str) -> None:
    """Fail with the first finding that would stop the run, and the command that mends it."""
    from tailtune.doctor import refuse_blocked
    from tailtune.log import step
    from tailtune.run import Run

    with step("doctor"):
        refuse_blocked(Run.from_json(run).recipe, images=(trainer_image,))
