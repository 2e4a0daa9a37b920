#!/usr/bin/env python3
"""The pipeline: fetch → parquet → train → evaluate → gate → report.

Run as a program, it compiles, runs, submits or schedules the pipeline (`pipeline_cli.py`).
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tailtune.jobs.pods import QUEUE_LABEL
from tailtune.recipe.schema import Recipe, Resources
from tailtune.run import MOUNTS

DIRECTORIES = {name: f"{path}/{{run}}" for name, path in MOUNTS.items()}
RETRY_WINDOW = "604800s"
"""Counted from the start of a step's first attempt: after it, Argo ends a running attempt and starts no other."""
SECRETS_DIR = "/etc/tailtune"
"""Where the steps that may fetch see the keys of the secrets as files."""
SECRET_FILES = {"HF_TOKEN_PATH": f"{SECRETS_DIR}/hf/token", "TAILTUNE_S3_SECRET_DIR": f"{SECRETS_DIR}/s3",
                "TAILTUNE_CA_FILE": f"{SECRETS_DIR}/ca/ca-bundle.crt"}  # fmt: skip


def make_pipeline(recipe: Recipe, *, cluster: bool = True) -> Callable[..., Any]:
    """Return the KFP pipeline of a recipe; its parameters default to the recipe's values.

    Only on a cluster does the first step ask the doctor, are failed steps retried, and does a last step delete what a
    run that was ended has left of its training job.

    KFP's cache is off: results are paths, and each step knows from its manifest what is complete.
    """
    from kfp import dsl

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

    default, resources, may_end = parameter_values(recipe), recipe.resources, recipe.data.skip_unchanged

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
        gpu: str = default["gpu"],
        queue: str = default["queue"],
        training_data_pvc: str = default["training_data_pvc"],
        trained_models_pvc: str = default["trained_models_pvc"],
        workspace_pvc: str = default["workspace_pvc"],
        hf_secret: str = default["hf_secret"],
        s3_secret: str = default["s3_secret"],
        ca_secret: str = default["ca_secret"],
        pipeline_image: str = default["pipeline_image"],
        trainer_image: str = default["trainer_image"],
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
        placement = dict(num_nodes=num_nodes, ranks_per_node=ranks_per_node, gpu=gpu, queue=queue)

        # However the run ends: delete its training job if somebody ended it.
        end = stop_jobs(job_id=job_id) if cluster else None
        with dsl.ExitHandler(end, name="run") if end else nullcontext():
            # Fold the parameters into the recipe and check all of it. On a cluster, look for what would stop the run.
            resolved = resolve_recipe(
                recipe=recipe, run_name=run_name, job_id=job_id, local=local, seed=seed,
                base_model=base_model, model_revision=model_revision, data_source=data_source,
                epochs=epochs, batch_size=batch_size, learning_rate=learning_rate,
                pipeline_image=pipeline_image, trainer_image=trainer_image,
                data_dir=data_dir, models_dir=models_dir, workspace_dir=workspace_dir, **placement, **claims, **secrets,
            )  # fmt: skip
            run = resolved.output

            # Fetch the data set to the data volume.
            raw = fetch_dataset(run=run)

            # Fetch the base model to the model volume, at the same time.
            base = fetch_model(run=run)

            # Convert the data to one Parquet file. No directory means that a promoted run has trained on the same data:
            # only a recipe that asks for it has this condition, because each one costs a pod of the pipeline server.
            data = write_parquet(run=run, source=raw.output, may_end=may_end)
            data_directory = data.outputs["Output"]
            with dsl.If(data_directory != "", name="new-data") if may_end else nullcontext():
                # Train: launch the distributed job and follow it to its end.
                tuned = train_stage(run=run, data_dir=data_directory).after(base)
                tuned_model = tuned.outputs["Output"]

                # Evaluate the base and the tuned model on the validation rows.
                evaluation = evaluate_model(run=run, data_dir=data_directory, tuned_model_dir=tuned_model)

                # Judge the evaluation by the recipe's rules.
                gate = promotion_gate(run=run, evaluation=evaluation.outputs["Output"])

                # Write the report.
                report = write_report(run=run, tuned_model_dir=tuned_model).after(gate)

                # The run of a rejected model fails, with its verdict and report kept.
                with dsl.If(gate.outputs["Output"] == "fail", name="rejected"):
                    rejection = fail_if_rejected(run=run, report=report.outputs["Output"])

        steps = (resolved, base, raw, data, tuned, evaluation, gate, report, rejection)
        for task in steps:
            task.set_caching_options(False)
        if end is None:
            return
        end.set_caching_options(False)
        models = (evaluation, report)
        for task in (end, *steps):
            task.set_container_image(trainer_image if task in models else pipeline_image)
            _place(task, resources, loads_models=task in models, is_last=task is end)
        for task in models:
            task.set_accelerator_type(gpu).set_accelerator_limit(1)
            task.register_pipeline_channels([gpu])  # kfp does not do it: the branch would lack the parameter
        for task in steps[1:]:  # a missing volume must not block the first step, which reports it
            _mount_volumes(task, **claims)
        for task in (raw, base, tuned):  # another attempt at training follows the job that exists
            _retry(task)
            _mount_secrets(task, **secrets)

    return pipeline


def _mount_volumes(task: Any, training_data_pvc: Any, trained_models_pvc: Any, workspace_pvc: Any) -> None:
    from kfp import kubernetes

    claims = {"data_dir": training_data_pvc, "models_dir": trained_models_pvc, "workspace_dir": workspace_pvc}
    for directory, claim in claims.items():
        kubernetes.mount_pvc(task, pvc_name=claim, mount_path=MOUNTS[directory])


def _place(task: Any, resources: Resources, *, loads_models: bool, is_last: bool) -> None:
    """Ask for CPU and memory, as quotas may demand; choose nodes and the queue as for the training job.

    The last step does not queue, because it may have to free what others wait for.
    """
    from kfp import kubernetes

    if loads_models:
        task.set_cpu_request(resources.cpu_request).set_cpu_limit(resources.cpu)
        task.set_memory_request(resources.memory_request).set_memory_limit(resources.memory)
    else:
        task.set_cpu_request(resources.step_cpu_request).set_cpu_limit(resources.step_cpu)
        task.set_memory_request(resources.step_memory_request).set_memory_limit(resources.step_memory)
    for toleration in resources.tolerations:
        kubernetes.add_toleration(task, **toleration)
    for label, value in resources.node_selector.items():
        kubernetes.add_node_selector(task, label_key=label, label_value=value)
    if resources.queue and not is_last:
        kubernetes.add_pod_label(task, QUEUE_LABEL, resources.queue)


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
    trainer, source = recipe.stages[0].trainer, recipe.data.source
    return {
        "base_model": recipe.model.base_model,
        "model_revision": recipe.model.revision,
        "data_source": source if isinstance(source, str) else json.dumps(source),
        "epochs": float(trainer["num_train_epochs"]),
        "batch_size": int(trainer["per_device_train_batch_size"]),
        "learning_rate": float(trainer["learning_rate"]),
        "num_nodes": recipe.resources.num_nodes,
        "ranks_per_node": recipe.resources.ranks_per_node,
        "gpu": recipe.resources.gpu,
        "queue": recipe.resources.queue,
        "training_data_pvc": recipe.cluster.data_claim,
        "trained_models_pvc": recipe.cluster.models_claim,
        "workspace_pvc": recipe.cluster.workspace_claim,
        "hf_secret": recipe.cluster.hf_secret,
        "s3_secret": recipe.cluster.s3_secret,
        "ca_secret": recipe.cluster.ca_secret,
        "pipeline_image": recipe.cluster.pipeline_image,
        "trainer_image": recipe.cluster.trainer_image,
        "seed": recipe.seed,
    }


if __name__ == "__main__":
    from pipeline_cli import main

    main()
