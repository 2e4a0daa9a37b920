"""Let the doctor check the cluster first. Mounts nothing: a missing volume is one of its findings."""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def check_cluster(
    recipe: str,
    data_source: str,
    num_nodes: int,
    ranks_per_node: int,
    queue: str,
    training_data_pvc: str,
    trained_models_pvc: str,
    workspace_pvc: str,
    hf_secret: str,
    s3_secret: str,
    ca_secret: str,
    trainer_image: str,
) -> None:
    """Fail with the first finding that would stop the run, and the command that fixes it."""
    from tailtune.doctor.examine import refuse_blocked
    from tailtune.log import step
    from tailtune.recipe.load import parse_recipe, with_overrides

    with step("doctor"):
        overrides = dict(
            data_source=data_source, num_nodes=num_nodes, ranks_per_node=ranks_per_node, queue=queue,
            training_data_pvc=training_data_pvc, trained_models_pvc=trained_models_pvc, workspace_pvc=workspace_pvc,
            hf_secret=hf_secret, s3_secret=s3_secret, ca_secret=ca_secret,
        )  # fmt: skip
        refuse_blocked(with_overrides(parse_recipe(recipe), overrides), images=(trainer_image,))
