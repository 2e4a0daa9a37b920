#!/usr/bin/env python3
"""The pipeline: fetch → parquet → train → evaluate → gate → report.

Called as a program, compiles, runs, submits or schedules it (`pipeline_cli.py`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tailtune.recipe.schema import Recipe
from tailtune.run import MOUNTS

DIRECTORIES = {name: f"{path}/{{run}}" for name, path in MOUNTS.items()}
RETRY_FOR = "604800s"
"""From the start of a step's first attempt: Argo does not try it again later, and ends an attempt that runs then."""
SECRETS = "/etc/tailtune"
"""Where the secrets' keys lie as files, in the steps that fetch."""
SECRET_FILES = {"HF_TOKEN_PATH": f"{SECRETS}/hf/token", "TAILTUNE_S3_SECRET_DIR": f"{SECRETS}/s3",
                "TAILTUNE_CA_FILE": f"{SECRETS}/ca/ca-bundle.crt"}  # fmt: skip


def make_pipeline(recipe: Recipe, *, cluster: bool = True) -> Callable[..., Any]:
    """The KFP pipeline of a recipe; its parameters default to the recipe's values.

    On a cluster the doctor looks first, steps that may fail by chance are tried again, and a last step deletes
    what is left of the run's training job. A machine has no other node and no jobs.

    KFP's cache is off: results are paths, and each step knows from its manifest what is done already.
    """
    from kfp import dsl, kubernetes

    from components.check_cluster import check_cluster
    from components.evaluate_model import evaluate_model
    from components.fail_if_rejected import fail_if_rejected
    from components.fetch_dataset import fetch_dataset
    from components.fetch_model import fetch_model
    from components.promotion_gate import promotion_gate
    from components.resolve_recipe import resolve_recipe
    from components.stop_jobs import stop_jobs
    from components.train_stage import train_stage
    from components.write_parquet import write_parquet
    from components.write_report import write_report
    from tailtune import images

    default, recipe_resources = parameter_values(recipe), recipe.resources
    gpu = recipe_resources.gpu

    @dsl.pipeline(name=recipe.name, description=recipe.description)
    def pipeline(
        base_model: str = default["base_model"],
        model_revision: str = default["model_revision"],
        data_source: str = default["data_source"],
        epochs: float = default["epochs"],
        batch_size: int = default["batch_size"],
        learning_rate: float = default["learning_rate"],
        num_nodes: int = default["num_nodes"],
        ranks_per_node: int = default["ranks_per_node"],
        queue: str = default["queue"],
        training_data_pvc: str = default["training_data_pvc"],
        trained_models_pvc: str = default["trained_models_pvc"],
        workspace_pvc: str = default["workspace_pvc"],
        hf_secret: str = default["hf_secret"],
        s3_secret: str = default["s3_secret"],
        ca_secret: str = default["ca_secret"],
        trainer_image: str = images.TRAINER,
        seed: int = default["seed"],
        data_dir: str = DIRECTORIES["data_dir"],
        models_dir: str = DIRECTORIES["models_dir"],
        workspace_dir: str = DIRECTORIES["workspace_dir"],
        run_name: str = "",
        local: bool = False,
        recipe: str = recipe.to_json(),
    ) -> None:
        def add(task: Any) -> Any:
            task.set_caching_options(False)
            claims = {"data_dir": training_data_pvc, "models_dir": trained_models_pvc, "workspace_dir": workspace_pvc}
            for directory, claim in claims.items():
                kubernetes.mount_pvc(task, pvc_name=claim, mount_path=MOUNTS[directory])
            return task

        job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        end = stop_jobs(job_id=job_id).set_caching_options(False) if cluster else None
        with dsl.ExitHandler(end, name="run") if end else nullcontext():
            resolved = add(resolve_recipe(
                recipe=recipe, run_name=run_name, job_id=job_id,
                base_model=base_model, model_revision=model_revision, data_source=data_source,
                epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, num_nodes=num_nodes,
                ranks_per_node=ranks_per_node, queue=queue, training_data_pvc=training_data_pvc,
                trained_models_pvc=trained_models_pvc, workspace_pvc=workspace_pvc, hf_secret=hf_secret,
                s3_secret=s3_secret, ca_secret=ca_secret, seed=seed,
                data_dir=data_dir, models_dir=models_dir, workspace_dir=workspace_dir, local=local,
            ))  # fmt: skip
            run = resolved.output
            raw = add(fetch_dataset(run=run))
            if cluster:
                resolved.after(check_cluster(
                    recipe=recipe, data_source=data_source, num_nodes=num_nodes, ranks_per_node=ranks_per_node,
                    queue=queue, training_data_pvc=training_data_pvc, trained_models_pvc=trained_models_pvc,
                    workspace_pvc=workspace_pvc, hf_secret=hf_secret, s3_secret=s3_secret, ca_secret=ca_secret,
                    trainer_image=trainer_image,
                ).set_caching_options(False))  # fmt: skip
            data = add(write_parquet(run=run, source=raw.output))
            data_directory = data.outputs["Output"]
            with dsl.If(data_directory != "", name="new-data"):
                base = add(fetch_model(run=run, data_dir=data_directory))
                tuned = add(train_stage(
                    run=run, data_dir=data_directory, base_model_dir=base.output, trainer_image=trainer_image
                ))  # fmt: skip
                models = {"base_model_dir": base.output, "tuned_model_dir": tuned.outputs["Output"]}
                evaluation = add(evaluate_model(run=run, data_dir=data_directory, **models))
                gate = add(promotion_gate(run=run, evaluation=evaluation.outputs["Output"]))
                with dsl.If(gate.outputs["Output"] == "pass", name="passed"):
                    promoted_report = add(write_report(run=run, **models))
                with dsl.Else(name="failed"):
                    rejected_report = add(write_report(run=run, **models))
                    add(fail_if_rejected(run=run, report=rejected_report.outputs["Output"]))
        if gpu:
            for task in (evaluation, promoted_report, rejected_report):
                task.set_accelerator_type(gpu).set_accelerator_limit(1)
                for toleration in recipe_resources.tolerations:
                    kubernetes.add_toleration(task, **toleration)
                for label, value in recipe_resources.node_selector.items():
                    kubernetes.add_node_selector(task, label_key=label, label_value=value)
        if cluster:
            for task in (raw, base, tuned):  # a train step that is tried again follows its job
                task.set_retry(
                    num_retries=2, backoff_duration="60s", backoff_factor=2.0, backoff_max_duration=RETRY_FOR
                )
            for task in (raw, base):
                for secret, directory in ((hf_secret, "hf"), (s3_secret, "s3"), (ca_secret, "ca")):
                    kubernetes.use_secret_as_volume(
                        task, secret_name=secret, mount_path=f"{SECRETS}/{directory}", optional=True
                    )
                for variable, path in SECRET_FILES.items():
                    task.set_env_variable(variable, path)

    return pipeline


def parameter_values(recipe: Recipe) -> dict[str, Any]:
    """The run parameters at the recipe's values."""
    trainer = recipe.stages[0].trainer
    return {
        "base_model": recipe.model.base_model,
        "model_revision": recipe.model.revision,
        "data_source": recipe.data.source,
        "epochs": float(trainer["num_train_epochs"]),
        "batch_size": int(trainer["per_device_train_batch_size"]),
        "learning_rate": float(trainer["learning_rate"]),
        "num_nodes": recipe.resources.num_nodes,
        "ranks_per_node": recipe.resources.ranks_per_node,
        "queue": recipe.resources.queue,
        "training_data_pvc": recipe.cluster.data_claim,
        "trained_models_pvc": recipe.cluster.models_claim,
        "workspace_pvc": recipe.cluster.workspace_claim,
        "hf_secret": recipe.cluster.hf_secret,
        "s3_secret": recipe.cluster.s3_secret,
        "ca_secret": recipe.cluster.ca_secret,
        "seed": recipe.seed,
    }


if __name__ == "__main__":
    from pipeline_cli import main

    main()
