"""The train step: turn a recipe's stage into a job and run it, unless its model is already complete."""

from pathlib import Path

from tailtune.errors import UserError
from tailtune.files import read_json, write_json, write_text
from tailtune.jobs import local
from tailtune.jobs.job import (
    PIPELINE_RUN_LABEL,
    Job,
    JobFailed,
    PermanentFailure,
    PodSpec,
    job_name,
    label_value,
    parse_user_error,
)
from tailtune.log import log
from tailtune.manifest import read_manifest
from tailtune.run import MOUNTS, Run
from tailtune.training_key import refuse_other_checkpoints, training_key


def train_stage(run: Run, data_dir: Path, model_dir: Path) -> Path:
    """Train the recipe's stage and return `best_model/`. If that is already complete, it is left untouched.

    `data_dir` holds `data.parquet` with its manifest, and `model_dir` the base model. Raises JobFailed if the job
    fails, and UserError if the run's checkpoints were made with other settings.
    """
    recipe = run.recipe
    if read_manifest(data_dir) is None:
        raise UserError(f"{data_dir} contains no complete Parquet file", "run the parquet step first")
    key = training_key(recipe, recipe.stages[0], data_dir, model_dir)
    recipe_path = run.models_dir / "recipe.json"
    if read_manifest(run.best_model_dir, key):
        write_text(recipe_path, recipe.model_dump_json(indent=2) + "\n", private=run.local)
        log.info("train: best_model/ is already complete, nothing to train")
        return run.best_model_dir
    refuse_other_checkpoints(run.models_dir / "checkpoints", key)
    write_text(recipe_path, recipe.model_dump_json(indent=2) + "\n", private=run.local)
    job = make_job(run, data_dir, model_dir, recipe_path)
    if run.local:
        local.run_job(job)
    else:
        _run_on_cluster(run, job)
    if read_manifest(run.best_model_dir, key) is None:  # the job's pods have mounted another volume
        raise JobFailed(
            f"job '{job.name}' succeeded, but {run.best_model_dir} contains no model",
            "mount the same volume in this step and in the job's pods",
        )
    return run.best_model_dir


def _run_on_cluster(run: Run, job: Job) -> None:
    """Run the job, unless an earlier attempt of the step has failed for good.

    The pipeline server retries a failed step, whatever the reason, so the reason is kept on the workspace volume. The
    first attempt removes it: either the run is new, or a person has retried it.
    """
    from tailtune.jobs import follow, kubernetes, step_pods

    cluster = kubernetes.KubernetesClient()
    earlier = read_json(run.permanent_failure_path)
    if earlier and earlier["pipeline_run"] == run.pipeline_run != "" and (error := parse_user_error(earlier)):
        if step_pods.own_attempt(cluster, run.pipeline_run) > 1:
            again = f"the same settings are tried again only by python pipeline.py --retry {run.pipeline_run}"
            raise PermanentFailure(error.problem, "; ".join(filter(None, (error.remedy, again))))
        run.permanent_failure_path.unlink()
    try:
        follow.run_job(job, cluster)
    except PermanentFailure as error:
        failure = {"pipeline_run": run.pipeline_run, "problem": error.problem, "remedy": error.remedy}
        write_json(run.permanent_failure_path, failure)
        raise


def make_job(run: Run, data_dir: Path, model_dir: Path, recipe_path: Path) -> Job:
    """The job that trains the recipe's stage."""
    recipe, stage, claims = run.recipe, run.recipe.stages[0], run.recipe.cluster
    resources = recipe.resources_of(stage)
    labels = {
        "app.kubernetes.io/name": "tailtune",
        "app.kubernetes.io/component": "training",
        "app.kubernetes.io/managed-by": "tailtune",
        "app.kubernetes.io/instance": label_value(run.name),
        "tailtune.io/run": label_value(run.name),
        PIPELINE_RUN_LABEL: label_value(run.pipeline_run),
        "tailtune.io/recipe": recipe.name,
        "tailtune.io/stage": stage.name,
    }
    pod = None if run.local else PodSpec(
        image=claims.trainer_image,
        cpu=resources.cpu,
        memory=resources.memory,
        cpu_request=resources.cpu_request,
        memory_request=resources.memory_request,
        gpu=resources.gpu,
        volumes=(
            (claims.data_claim, MOUNTS["data_dir"]),
            (claims.models_claim, MOUNTS["models_dir"]),
            (claims.workspace_claim, MOUNTS["workspace_dir"]),
        ),
        kind=resources.job_kind,
        queue=resources.queue,
        tolerations=tuple(resources.tolerations),
        node_selector=resources.node_selector,
    )  # fmt: skip
    return Job(
        name=f"{recipe.name}-{stage.name}" if run.local else job_name(run.name, stage.name),
        module="tailtune.train",
        args=("--recipe", str(recipe_path), "--stage", stage.name, "--model-dir", str(model_dir)),
        num_nodes=resources.num_nodes,
        ranks_per_node=resources.ranks_per_node,
        max_restarts=resources.max_restarts,
        shutdown_seconds=resources.shutdown_seconds,
        environment={
            "NCCL_DEBUG": "INFO",  # otherwise, NCCL fails without saying why
            **resources.environment,
            "DATA_DIR": str(data_dir),
            "OUTPUT_DIR": str(run.models_dir),
            "HIDDEN_STATE_CACHE_DIR": str(run.hidden_state_cache_dir),
            **(
                {"TAILTUNE_OWNER_FILE": str(run.owner_path), "TAILTUNE_PIPELINE_RUN": run.pipeline_run}
                if run.pipeline_run
                else {}
            ),
        },
        labels=labels,
        start_seconds=resources.start_seconds,
        deadline_seconds=resources.deadline_seconds,
        pod=pod,
        log_dir=None if run.local else run.log_dir,
        progress_path=run.models_dir / "progress.json",
    )
