#!/usr/bin/env python3
"""The pipeline: fetch → parquet → train → evaluate → gate → report.

Run as a program, it compiles, runs, submits or schedules the pipeline (`pipeline_cli.py`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tailtune.recipe.schema import Recipe, Resources
from tailtune.run import MOUNTS

DIRECTORIES = {name: f"{path}/{{run}}" for name, path in MOUNTS.items()}
RETRY_WINDOW = "604800s"
"""Counted from the start of a step's first attempt: after it, Argo ends a running attempt and starts no other."""
SECRETS_DIR = "/etc/tailtune"
"""Where the steps that fetch see the keys of the secrets as files."""
SECRET_FILES = {"HF_TOKEN_PATH": f"{SECRETS_DIR}/hf/token", "TAILTUNE_S3_SECRET_DIR": f"{SECRETS_DIR}/s3",
                "TAILTUNE_CA_FILE": f"{SECRETS_DIR}/ca/ca-bundle.crt"}  # fmt: skip


def make_pipeline(recipe: Recipe, *, cluster: bool = True) -> Callable[..., Any]:
    """Return the KFP pipeline of a recipe; its parameters default to the recipe's values.

    Only on a cluster does the doctor run first, are failed steps retried, and does a last step delete what is left of
    the run's training job.

    KFP's cache is off: results are paths, and each step knows from its manifest what is complete.
    """
    from kfp import dsl

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

    default, resources = parameter_values(recipe), recipe.resources

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
        job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        claims = dict(
            training_data_pvc=training_data_pvc, trained_models_pvc=trained_models_pvc, workspace_pvc=workspace_pvc
        )
        secrets = dict(hf_secret=hf_secret, s3_secret=s3_secret, ca_secret=ca_secret)
        placement = dict(num_nodes=num_nodes, ranks_per_node=ranks_per_node, queue=queue)

        # However the run ends, leave no training job of it behind.
        end = stop_jobs(job_id=job_id) if cluster else None
        with dsl.ExitHandler(end, name="run") if end else nullcontext():
            # Look for what would stop the run on this cluster. Mounts nothing: a volume may be missing.
            doctor = check_cluster(
                recipe=recipe, data_source=data_source, trainer_image=trainer_image, **placement, **claims, **secrets
            ) if cluster else None  # fmt: skip

            # Fold the parameters into the recipe and check all of it.
            resolved = resolve_recipe(
                recipe=recipe, run_name=run_name, job_id=job_id, local=local, seed=seed,
                base_model=base_model, model_revision=model_revision, data_source=data_source,
                epochs=epochs, batch_size=batch_size, learning_rate=learning_rate,
                data_dir=data_dir, models_dir=models_dir, workspace_dir=workspace_dir, **placement, **claims, **secrets,
            )  # fmt: skip
            if doctor:
                resolved.after(doctor)
            run = resolved.output

            # Fetch the data set to the data volume.
            raw = fetch_dataset(run=run)

            # Convert it to one Parquet file. No directory means that a promoted run has trained on the same data.
            data = write_parquet(run=run, source=raw.output)
            data_directory = data.outputs["Output"]
            with dsl.If(data_directory != "", name="new-data"):
                # Fetch the base model to the model volume, or build the small one.
                base = fetch_model(run=run, data_dir=data_directory)

                # Train: launch the distributed job and follow it to its end.
                tuned = train_stage(
                    run=run, data_dir=data_directory, base_model_dir=base.output, trainer_image=trainer_image
                )
                models = {"base_model_dir": base.output, "tuned_model_dir": tuned.outputs["Output"]}

                # Evaluate the base and the tuned model on the validation rows.
                evaluation = evaluate_model(run=run, data_dir=data_directory, **models)

                # Judge the evaluation by the recipe's rules.
                gate = promotion_gate(run=run, evaluation=evaluation.outputs["Output"])

                # Write the report. The run of a rejected model then fails, with its verdict and report kept.
                with dsl.If(gate.outputs["Output"] == "pass", name="passed"):
                    promoted_report = write_report(run=run, **models)
                with dsl.Else(name="failed"):
                    rejected_report = write_report(run=run, **models)
                    rejection = fail_if_rejected(run=run, report=rejected_report.outputs["Output"])
        steps = (resolved, raw, data, base, tuned, evaluation, gate, promoted_report, rejected_report, rejection)
        for task in (*filter(None, (end, doctor)), *steps):
            task.set_caching_options(False)
        for task in steps:
            _mount_volumes(task, **claims)
        for task in (evaluation, promoted_report, rejected_report):
            _use_gpu(task, resources)
        if cluster:
            for task in (raw, base, tuned):  # another attempt at training follows the job that exists
                _retry(task)
            for task in (raw, base):
                _mount_secrets(task, **secrets)

    return pipeline


def _mount_volumes(task: Any, training_data_pvc: Any, trained_models_pvc: Any, workspace_pvc: Any) -> None:
    from kfp import kubernetes

    claims = {"data_dir": training_data_pvc, "models_dir": trained_models_pvc, "workspace_dir": workspace_pvc}
    for directory, claim in claims.items():
        kubernetes.mount_pvc(task, pvc_name=claim, mount_path=MOUNTS[directory])


def _use_gpu(task: Any, resources: Resources) -> None:
    """Give a step one GPU and a node that has it, unless the recipe trains without."""
    from kfp import kubernetes

    if not resources.gpu:
        return
    task.set_accelerator_type(resources.gpu).set_accelerator_limit(1)
    for toleration in resources.tolerations:
        kubernetes.add_toleration(task, **toleration)
    for label, value in resources.node_selector.items():
        kubernetes.add_node_selector(task, label_key=label, label_value=value)


def _retry(task: Any) -> None:
    task.set_retry(num_retries=2, backoff_duration="60s", backoff_factor=2.0, backoff_max_duration=RETRY_WINDOW)


def _mount_secrets(task: Any, hf_secret: Any, s3_secret: Any, ca_secret: Any) -> None:
    """Mount the secrets that exist as files, and name the files in the step's environment."""
    from kfp import kubernetes

    for secret, directory in ((hf_secret, "hf"), (s3_secret, "s3"), (ca_secret, "ca")):
        kubernetes.use_secret_as_volume(
            task, secret_name=secret, mount_path=f"{SECRETS_DIR}/{directory}", optional=True
        )
    for variable, path in SECRET_FILES.items():
        task.set_env_variable(variable, path)


def parameter_values(recipe: Recipe) -> dict[str, Any]:
    """Return the run parameters with the values of the recipe."""
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
