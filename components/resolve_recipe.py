"""Fold the run parameters into the recipe, check all of it, and let the doctor check the cluster, before anything runs.

On a cluster it mounts nothing: a missing volume is one of the doctor's findings.
"""

from kfp import dsl

from tailtune import images


@dsl.component(base_image=images.PIPELINE, install_kfp_package=False)
def resolve_recipe(
    recipe: str,
    run_name: str,
    job_id: str,
    base_model: str,
    model_revision: str,
    data_source: str,
    epochs: float,
    batch_size: int,
    learning_rate: float,
    num_nodes: int,
    ranks_per_node: int,
    gpu: str,
    queue: str,
    pipeline_image: str,
    trainer_image: str,
    training_data_pvc: str,
    trained_models_pvc: str,
    workspace_pvc: str,
    hf_secret: str,
    s3_secret: str,
    ca_secret: str,
    seed: int,
    data_dir: str,
    models_dir: str,
    workspace_dir: str,
    local: bool,
) -> str:
    """Return the run (recipe and directories) as JSON. `{run}` in a directory becomes the run's name."""
    from tailtune.log import step
    from tailtune.resolve import resolve_run

    with step("resolve"):
        overrides = dict(
            base_model=base_model, model_revision=model_revision, data_source=data_source, epochs=epochs,
            batch_size=batch_size, learning_rate=learning_rate, num_nodes=num_nodes,
            ranks_per_node=ranks_per_node, gpu=gpu, queue=queue, pipeline_image=pipeline_image,
            trainer_image=trainer_image, training_data_pvc=training_data_pvc,
            trained_models_pvc=trained_models_pvc, workspace_pvc=workspace_pvc, hf_secret=hf_secret,
            s3_secret=s3_secret, ca_secret=ca_secret, seed=seed,
        )  # fmt: skip
        return resolve_run(recipe, overrides, run_name, job_id, data_dir, models_dir, workspace_dir, local).to_json()
