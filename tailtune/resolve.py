"""The first step: recipe and run parameters become one checked run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailtune.errors import UserError
from tailtune.files import free_bytes, write_json
from tailtune.imports import INSTALL_TRAIN, uncollected
from tailtune.log import log
from tailtune.owner import refuse_if_not_free, take_ownership
from tailtune.recipe.load import PARAMETERS, list_recipes, load_recipe, parse_recipe, with_local_overlay, with_overrides
from tailtune.recipe.schema import ClusterNames, Recipe, show_sources, source_list
from tailtune.retention import start_anew
from tailtune.run import MOUNTS, RUN_NAME, SHARED_DIRECTORIES, Run
from tailtune.train.arguments import check_trainer_arguments, check_trainer_values
from tailtune.train.hardware import find_profile
from tailtune.training_key import has_trained, refuse_other_settings

RESERVED_VOLUMES = frozenset({
    "kfp-launcher", "gcs-scratch", "s3-scratch", "minio-scratch", "dot-local-scratch", "dot-cache-scratch",
    "dot-config-scratch", "kfp-workspace", "artifact-local-root", "ca-bundle", "custom-ca", "var-run-argo",
    "tmp-dir-argo", "scratch", "shared-memory",
})  # fmt: skip
"""Volumes of a step's pod: kubeflow/pipelines 2.14 to 2.17, backend/src/v2/compiler/argocompiler (`ca-bundle` became
`custom-ca` in 2.16), and Argo's own; and those of a training pod (jobs/pods.py). KFP names a volume after its claim or
secret."""


def resolve_run(
    recipe_json: str,
    overrides: Mapping[str, Any],
    run_name: str,
    pipeline_run: str,
    data_dir: str,
    models_dir: str,
    workspace_dir: str,
    local: bool,
) -> Run:
    """Check everything that can be checked without data and volumes. Raises UserError.

    A run without a name takes the id of the pipeline's run. On a cluster, the doctor looks for what would stop the run;
    the volumes are not mounted yet, and `claim_directories` does the rest when they are.
    """
    name = run_name or pipeline_run
    check_run_name(name, "run_name")
    recipe = with_overrides(parse_recipe(recipe_json), overrides)
    for index, stage in enumerate(recipe.stages if local else ()):
        if (num_nodes := recipe.resources_of(stage).num_nodes) != 1:
            raise UserError(f"num_nodes is {num_nodes}, but this machine is one node",
                            f"set {recipe.resource_key(index, 'num_nodes').removeprefix('resources.')}=1")  # fmt: skip
    if not _has_built_in_training(recipe):
        check_recipe(recipe)
    templates = {"data_dir": data_dir, "models_dir": models_dir, "workspace_dir": workspace_dir}
    for field, template in templates.items():
        if not local and not (template.startswith(f"{MOUNTS[field]}/") and template.endswith("/{run}")):
            raise UserError(f"{field} '{template}': give a directory below {MOUNTS[field]}, where the volume is, that "
                            "ends in /{run}, so that runs do not share it")  # fmt: skip
    directories = {field: Path(template.replace("{run}", name)) for field, template in templates.items()}
    run = Run(name=name, recipe=recipe, local=local, pipeline_run="" if local else pipeline_run, **directories)
    if local:
        claim_directories(run)
    else:
        from tailtune.doctor.examine import refuse_blocked

        _clean_up()
        refuse_blocked(recipe, images=(recipe.cluster.pipeline_image, recipe.cluster.trainer_image))
    log.info(
        "resolve: recipe %s, base model %s, data %s",
        recipe.name,
        recipe.model.base_model,
        show_sources(recipe.data.source),
    )
    return run


def _clean_up() -> None:
    """Delete jobs that ended runs have left, before the doctor counts what is free."""
    from kubernetes.client import ApiException

    from tailtune.jobs.cleanup import delete_jobs_of_ended_runs
    from tailtune.jobs.kubernetes import KubernetesClient, in_words

    try:
        for name in delete_jobs_of_ended_runs(KubernetesClient()):
            log.info("resolve: job %s of a run that was ended is deleted", name)
    except (UserError, ApiException) as error:  # the doctor says what is missing
        problem = error.problem if isinstance(error, UserError) else in_words(error)
        log.info("resolve: jobs of ended runs are not looked for: %s", problem)


def claim_directories(run: Run) -> None:
    """Make the directories those of this run, and write `run.json`, before a step writes data.

    Raises UserError for checkpoints that were made with other settings, and while another run of the same name is in
    progress.
    """
    if not run.local:  # first, because the remedy for other settings may be to delete the directories
        refuse_if_not_free(run, _is_active)
    if run.run_path.is_file() and has_trained(run.models_dir):
        earlier = Run.from_json(run.run_path.read_text(encoding="utf-8")).recipe
        refuse_other_settings(earlier, run.recipe, run.models_dir)
    if not run.local:
        take_ownership(run, _is_active)
        directories = ((MOUNTS[name], getattr(run, name)) for name in MOUNTS)
        free = ", ".join(f"{mount} {free_bytes(path) / 1e9:.0f} GB" for mount, path in directories)
        log.info("free on the volumes: %s", free)
    start_anew(run)
    write_json(run.run_path, run.model_dump(mode="json"), private=run.local)  # on a cluster, pods have other users


def _is_active(pipeline_run: str) -> bool:
    from tailtune.jobs.kubernetes import pipeline_run_is_active  # a second, which most steps do not need

    return pipeline_run_is_active(pipeline_run)


def _has_built_in_training(recipe: Recipe) -> bool:
    """Whether the trainer arguments are those of a built-in recipe, apart from the run parameters.

    The tests have checked these, so a run need not import TRL for it, which takes long in a small pod.
    """
    if recipe.name not in list_recipes():
        return False
    built_in = load_recipe(recipe.name)
    checked = [_fixed_arguments(each) for each in (built_in, with_local_overlay(built_in))]
    return _fixed_arguments(recipe) in checked and recipe.hardware == built_in.hardware


def _fixed_arguments(recipe: Recipe) -> list[dict[str, Any]]:
    """Each stage's trainer arguments without those that are run parameters, which the schema checks."""
    parameters = {path.rpartition(".")[2] for path in PARAMETERS.values() if ".trainer." in path}
    return [{name: value for name, value in stage.trainer.items() if name not in parameters} for stage in recipe.stages]


def check_run_name(name: str, parameter: str) -> None:
    """Raise UserError unless the name can be a directory's name. `parameter` is what the user calls it."""
    if not RUN_NAME.fullmatch(name):
        raise UserError(
            f"{parameter} '{name}': use letters, digits, '-', '_' and '.', at most 100, not starting with '-' or '.'"
        )
    if name in SHARED_DIRECTORIES:
        raise UserError(f"{parameter} '{name}' is the name of a directory that all runs share", "choose another")


def check_volume_names(names: ClusterNames) -> None:
    """Raise UserError for claims and secrets whose volumes would clash in a step's pod. The claims may be one claim.

    A run that exists already is not checked: on its server, the names may be fine.
    """
    claims = {"training_data_pvc": names.data_claim, "trained_models_pvc": names.models_claim,
              "workspace_pvc": names.workspace_claim}  # fmt: skip
    secrets = {"hf_secret": names.hf_secret, "s3_secret": names.s3_secret, "ca_secret": names.ca_secret}
    for parameter, name in {**claims, **secrets}.items():
        if name in RESERVED_VOLUMES:
            raise UserError(f"{parameter} '{name}' is also the name of a volume that every pod has", "choose another")
    for parameter, name in secrets.items():
        if [*claims.values(), *secrets.values()].count(name) > 1:
            raise UserError(f"{parameter} '{name}' is also the name of another claim or secret", "choose another")


def check_recipe(recipe: Recipe, *, before_submit: bool = False) -> None:
    """Check what the schema cannot: hardware profile and trainer arguments. Imports torch and TRL. Raises UserError.

    Before a run is submitted, TRL may not be installed: then the run's first step checks what only TRL knows.
    """
    if before_submit:
        refuse_own_paths(recipe)
    find_profile("cpu", recipe.hardware.profile)
    check_trainer_values(recipe)
    try:
        with uncollected():
            import transformers.integrations.integration_utils  # noqa: F401  SFTConfig imports it when it is made
            from trl import SFTConfig  # noqa: F401
    except ModuleNotFoundError:
        if not before_submit:
            raise
        log.info(
            "TRL is not installed, so the run's first step checks the trainer arguments; to check them here: %s",
            INSTALL_TRAIN,
        )
        return
    check_trainer_arguments(recipe)


def refuse_own_paths(recipe: Recipe) -> None:
    """Raise UserError where a recipe names a path on this machine, which the pods of a cluster do not have."""
    sources = [*source_list(recipe.data.source), *source_list(recipe.data.validation_source)]
    paths = [(source, "data_dir") for source in sources if source != "embedded" and "://" not in source]
    if recipe.model.base_model.startswith(("/", ".", "~")):
        paths.append((recipe.model.base_model, "models_dir"))
    for path, field in paths:
        if not path.startswith(tuple(f"{mount}/" for mount in MOUNTS.values())):
            raise UserError(
                f"{path} is a path on this machine, and a cluster's pods cannot read it",
                f"copy it to the volume and name it as {MOUNTS[field]}/…, as step 17 of the runbook shows, or give an "
                "address",
            )
