"""A run's training job as a manifest, for people who apply it by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client

from tailtune.errors import UserError
from tailtune.jobs import pytorchjob, trainjob
from tailtune.jobs.job import PIPELINE_RUN_LABEL, Job
from tailtune.jobs.kubernetes import KubernetesClient, in_words
from tailtune.jobs.objects import find_kind
from tailtune.jobs.train_step import make_job
from tailtune.recipe.schema import Recipe
from tailtune.run import MOUNTS, Run

API_SECONDS = 20.0
"""How long to ask a cluster which version of a TrainJob it has."""
HEAD = """\
# The training job of run '{name}', without its pipeline: nobody follows it, counts its restarts or evaluates its model.
# It needs these files; they exist once a pipeline run of this name has reached its train step:
#   {recipe} on claim {models_claim}: the recipe that is trained
#   {data} on claim {data_claim}
#   {base_model}: the base model
# Apply it only while no other job of this run exists: both would write {models}.
"""


def export_job(recipe: Recipe, run_name: str) -> str:
    """Return the manifest in YAML, after a comment that says what it needs. Raises UserError.

    It is a PyTorchJob, unless the recipe asks for a TrainJob.
    """
    data_dir, models_dir, workspace_dir = (Path(MOUNTS[field]) / run_name for field in MOUNTS)
    run = Run(name=run_name, recipe=recipe, local=False, data_dir=data_dir, models_dir=models_dir,
              workspace_dir=workspace_dir)  # fmt: skip
    base_model = Path(recipe.model.base_model)
    model_dir = base_model if base_model.is_absolute() else run.base_model_dir
    recipe_path = run.models_dir / "recipe.json"
    job = make_job(run, run.parquet_dir, model_dir, recipe_path)
    job = replace(job, labels={key: value for key, value in job.labels.items() if key != PIPELINE_RUN_LABEL})
    built = _train_job(job) if recipe.resources.job_kind == "trainjob" else pytorchjob.build(job, {})
    manifest = client.ApiClient().sanitize_for_serialization(built)
    del manifest["metadata"]["annotations"]
    head = HEAD.format(name=run_name, recipe=recipe_path, models=run.models_dir, base_model=model_dir,
                       data=run.parquet_dir, models_claim=recipe.cluster.models_claim,
                       data_claim=recipe.cluster.data_claim)  # fmt: skip
    return head + yaml.safe_dump(manifest, sort_keys=False)


def _train_job(job: Job) -> dict[str, Any]:
    """The manifest for the cluster of the login, because versions of TrainJob differ in their fields."""
    try:
        jobs = find_kind(KubernetesClient(api_seconds=API_SECONDS), trainjob)
    except client.ApiException as error:
        raise UserError(f"the cluster does not tell the fields of a TrainJob: {in_words(error)}", "oc whoami") from None
    if jobs is None:
        raise UserError("this cluster has no TrainJob", "set -p resources.job_kind=pytorchjob")
    return dict(jobs.build(job, {}))
