"""The command line of pipeline.py: compile, run on this machine, submit, schedule, cancel."""

import difflib
import hashlib
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import yaml

from pipeline import make_pipeline, parameter_values
from pipeline_local import local_parameters, local_recipe, relative, run_local
from pipeline_server import ActiveRun, PipelineServer, find_connection, trigger
from tailtune import __version__, images
from tailtune.console import command_line, echo_lines
from tailtune.errors import UserError
from tailtune.imports import require_train
from tailtune.jobs.local import share_cores
from tailtune.owner import in_progress
from tailtune.recipe.addresses import literal
from tailtune.recipe.load import PARAMETERS, list_recipes, load_recipe, parse_parameters, with_overrides
from tailtune.recipe.schema import Recipe
from tailtune.resolve import check_recipe, check_run_name, check_volume_names

ROOT = Path(__file__).resolve().parent
COMPILED = ROOT / "compiled"
COMPILED_RESOURCES = (
    "cpu", "cpu_request", "memory", "memory_request", "step_cpu", "step_cpu_request", "step_memory",
    "step_memory_request", "queue", "tolerations", "node_selector",
)  # fmt: skip
"""Keys of a recipe's resources that are compiled into the steps; all others are run parameters."""
END_SECONDS = 300
"""How long --end-runs waits for terminated runs: their last step still runs."""


def compile_recipe(recipe: Recipe, path: Path) -> None:
    """Write the pipeline's YAML. The same recipe gives the same bytes."""
    from kfp import compiler

    # `local:` is only read by local runs, and holds paths of this machine
    compiler.Compiler().compile(make_pipeline(recipe.model_copy(update={"local": {}})), str(path))


def compile_all() -> None:
    """Write compiled/RECIPE.yaml for every built-in recipe."""
    COMPILED.mkdir(exist_ok=True)
    for name in list_recipes():
        path = COMPILED / f"{name}.yaml"
        compile_recipe(load_recipe(name), path)
        click.echo(path.relative_to(ROOT))


def check_compiled() -> bool:
    """Return whether compiled/ is what the recipes compile to. Prints the differences."""
    expected = {f"{name}.yaml" for name in list_recipes()}
    drifted = [
        f"{path.name}: no recipe of this name\n" for path in COMPILED.glob("*.yaml") if path.name not in expected
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in list_recipes():
            fresh, stored = Path(folder) / f"{name}.yaml", COMPILED / f"{name}.yaml"
            compile_recipe(load_recipe(name), fresh)
            old = stored.read_text().splitlines(keepends=True) if stored.is_file() else []
            new = fresh.read_text().splitlines(keepends=True)
            drifted += difflib.unified_diff(old, new, f"compiled/{name}.yaml", "recompiled")
    click.echo("".join(drifted), nl=False)
    return not drifted


@dataclass(frozen=True)
class Uploaded:
    """A version of a pipeline on the server."""

    pipeline: str
    version: str
    """Ids."""
    version_name: str
    steps: frozenset[str]
    """Names of the tasks that run a container, not those of conditions and the exit handler."""


def upload(recipe: Recipe, final: Recipe, server: PipelineServer) -> Uploaded:
    """Upload the recipe's compiled file.

    The version's name follows from the file's bytes, so that the same file is the same version.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = compiled_file(recipe, final, Path(folder))
        name = f"{__version__}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"
        pipeline, version = server.upload(path, recipe.name, name)
        return Uploaded(pipeline, version, name, step_names(path))


def step_names(compiled: Path) -> frozenset[str]:
    """Return the names of the steps in a compiled file."""
    import pipeline_runs  # imports the cluster's client

    spec = next(yaml.load_all(compiled.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    return pipeline_runs.step_names(spec)


def compiled_file(recipe: Recipe, final: Recipe, folder: Path) -> Path:
    """Return the path of the recipe's compiled file. Raises UserError.

    It is the committed one in compiled/, unless the recipe is a user's own, or `final`, the recipe with all its
    overrides, asks for other nodes, a queue or other quantities for the steps, or for the condition that ends a run
    without new data. Then it is compiled into `folder`.
    """
    placement = {name: getattr(final.resources, name) for name in COMPILED_RESOURCES}
    data = recipe.data.model_copy(update={"skip_unchanged": final.data.skip_unchanged})
    variant = recipe.model_copy(update={"resources": recipe.resources.model_copy(update=placement), "data": data})
    committed = COMPILED / f"{recipe.name}.yaml"
    path = folder / committed.name
    compile_recipe(variant, path)
    if recipe.name in list_recipes():
        built_in, given = (each.model_copy(update={"local": {}}) for each in (load_recipe(recipe.name), recipe))
        if built_in.to_json() != given.to_json():  # unlike ==, it tells which fields a stage sets
            raise UserError(
                f"a recipe of your own is named '{recipe.name}' like a built-in one", "give it another name"
            )
        if variant.to_json() == recipe.to_json():
            if not committed.is_file() or committed.read_bytes() != path.read_bytes():
                raise UserError(
                    f"{relative(committed)} is not what the recipe compiles to", "run python pipeline.py first"
                )
            return committed
    return path


def cluster_parameters(recipe: Recipe, run_name: str) -> dict[str, Any]:
    """Return the parameters of a run on a cluster, for a recipe with all its overrides."""
    recipe = recipe.model_copy(update={"local": {}})
    return {**parameter_values(recipe), "recipe": recipe.to_json(), "run_name": run_name}


def submit(recipe: Recipe, final: Recipe, run_name: str, experiment: str, server: PipelineServer, *, watch: bool,
           timeout_seconds: float | None) -> bool:  # fmt: skip
    """Start a run on a cluster and print its address or id. Return False if it was watched and did not succeed.

    `final` is the recipe with its overrides: they are parameters of the run, not part of the uploaded version.
    """
    if active := server.active_runs(run_name, by_parameter=True):
        raise in_progress(run_name, active[0].id)
    uploaded = upload(recipe, final, server)
    run = server.start(uploaded.pipeline, uploaded.version, experiment=experiment, run_name=run_name,
                       parameters=cluster_parameters(final, run_name))  # fmt: skip
    click.echo(f"{recipe.name} {uploaded.version_name} runs as {run_name}", err=True)
    click.echo(server.address(run))
    if not os.environ.get("TAILTUNE_DASHBOARD"):
        click.echo(
            f"in the dashboard: Develop & train, Pipelines, Runs, project {server.connection.namespace}", err=True
        )
    if not watch:
        return True
    import pipeline_runs

    return pipeline_runs.watch(run, server, timeout_seconds, uploaded.steps)


def schedule(recipe: Recipe, final: Recipe, when: str, name: str, experiment: str, server: PipelineServer, *,
             latest: dict[str, Any] | None, max_concurrency: int, catch_up: bool) -> None:  # fmt: skip
    """Create or replace the schedule with this name.

    With `latest`, each run uses the pipeline's latest version and its recipe, and only the run parameters in `latest`
    differ. Otherwise each run uses this version and all of `final`.
    """
    parameters = cluster_parameters(final, "") if latest is None else latest
    if unknown := parameters.keys() - parameter_values(recipe).keys() - {"recipe", "run_name"}:
        raise UserError(f"with --latest, the recipe is that of the latest version, so -p {min(unknown)} has no place",
                        "give run parameters (see --list), or leave --latest out")  # fmt: skip
    uploaded = upload(recipe, final, server)
    active = server.schedule(name, when, pipeline=uploaded.pipeline,
                             version=uploaded.version if latest is None else None, experiment=experiment,
                             parameters=parameters, max_concurrency=max_concurrency, catch_up=catch_up)  # fmt: skip
    shown_version = uploaded.version_name if latest is None else "its latest version"
    click.echo(
        f"schedule '{name}': {recipe.name}, {shown_version}, '{when}' in the pipeline server's time zone, UTC", err=True
    )
    if active:
        click.echo(f"the earlier schedule is disabled; {continues(active)}, next to the new one's, and the next "
                   "change of the schedule deletes it", err=True)  # fmt: skip


def unschedule(name: str, server: PipelineServer, *, ending: bool) -> None:
    """Delete the schedules with this name, or only disable those whose runs are in progress.

    With `ending`, these runs are ended first.
    """
    active = server.unschedule(name)
    if active and ending:
        end_runs(active, server)
        server.wait_until_ended(active, END_SECONDS)
        active = server.unschedule(name)
    if active:
        click.echo(f"schedule '{name}' is disabled and starts no more runs; {continues(active)}. Deleting the "
                   "schedule now would end its runs without their last step: repeat this command later, or add "
                   "--end-runs", err=True)  # fmt: skip
    else:
        click.echo(f"schedule '{name}' deleted", err=True)


def continues(runs: list[ActiveRun]) -> str:
    ids = ", ".join(run.id for run in runs)
    return f"run {ids} continues" if len(runs) == 1 else f"runs {ids} continue"


def cancel_run(name: str, server: PipelineServer) -> None:
    """Terminate the active runs with this name or id or of this schedule, and delete the jobs that they leave.

    Deleting only the job is not enough: KFP retries the train step, which creates it again.
    """
    runs = server.active_runs(name)
    jobs = end_runs(runs, server, run_name="" if any(run.id == name for run in runs) else name)
    if not runs and not jobs:
        raise UserError(f"no active run '{name}' in {server.connection.namespace}", "see python pipeline.py --runs")


def end_runs(runs: list[ActiveRun], server: PipelineServer, run_name: str = "") -> list[str]:
    """Terminate the runs, and delete their jobs and, with `run_name`, all jobs of that name; return those jobs."""
    from tailtune.jobs.cleanup import cancel
    from tailtune.jobs.kubernetes import KubernetesClient

    server.terminate(runs)
    jobs: list[str] = []
    where = ""
    try:
        cluster = KubernetesClient(server.connection.namespace, api_seconds=20)
        jobs += cancel(cluster, run=run_name) if run_name else []
        jobs += [job for run in runs for job in cancel(cluster, pipeline_run=run.id) if job not in jobs]
        where = f" at {cluster.configuration.host}"
    except UserError as error:
        if not runs:
            raise
        click.echo(f"jobs are left to the run's own steps: {error}", err=True)
    for job in jobs:
        click.echo(job)
    click.echo(f"runs ended: {len(runs)}, jobs deleted: {len(jobs)}{where}", err=True)
    return jobs


@click.command(context_settings={"max_content_width": 110})
@click.option("--recipe", "recipe_name", help="A built-in recipe's name, or the path of your own .yaml file.")
@click.option("--local", "local_run", is_flag=True, help="Run the whole pipeline on this machine.")
@click.option("--submit", "submit_run", is_flag=True, help="Start a run on the cluster; prints its address or id.")
@click.option("--schedule", "when", metavar="WHEN",
              help="Start runs on the cluster by cron ('0 2 * * *', or six fields) or 'every 6 hours'.")  # fmt: skip
@click.option("--run-name", help="Name of the run. With --local, an existing run of this name is continued.")
@click.option("-p", "parameters", multiple=True, metavar="KEY=VALUE",
              help="Run parameter or dotted recipe key, for example -p epochs=2. Repeatable.")  # fmt: skip
@click.option("--experiment", default="tailtune", show_default=True, help="Group of runs in the dashboard.")
@click.option("--runs", "list_runs", is_flag=True, help="List the newest runs, and those that have not ended.")
@click.option("--status", metavar="RUN", help="Show the steps of a run, and why it failed. RUN is a name, an id, or a "
              "schedule's name (its newest run).")  # fmt: skip
@click.option("--logs", metavar="RUN", help="Print the logs of a run's steps.")
@click.option("--follow", is_flag=True, help="With --logs: until the run's end.")
@click.option("--watch", is_flag=False, flag_value="", metavar="[RUN]", help="Wait for the end of RUN, or of that of "
              "--submit or --retry; exit status 1 when it fails.")  # fmt: skip
@click.option("--retry", metavar="RUN", help="Run the failed steps of a run again; training resumes.")
@click.option("--export-job", "exporting", is_flag=True, help="Print the training job of a run as YAML, to apply it by "
              "hand. -p resources.job_kind=trainjob for a TrainJob.")  # fmt: skip
@click.option("--timeout", "timeout_seconds", type=float, help="With --watch: the longest time to wait, in seconds.")
@click.option("--schedule-name", help="With --schedule: its name. By default, the recipe's.")
@click.option("--latest", is_flag=True, help="With --schedule: always the pipeline's latest version.")
@click.option("--max-concurrency", type=click.IntRange(1, 10), default=1, show_default=True,
              help="With --schedule: how many runs may be active at the same time.")  # fmt: skip
@click.option("--catch-up", is_flag=True, help="With --schedule: also start the runs that were missed.")
@click.option(
    "--cancel",
    metavar="RUN",
    help="Terminate the runs with this name or id, or of the schedule with this name, and delete their training jobs.",
)
@click.option("--list-schedules", is_flag=True, help="List the schedules of the project.")
@click.option("--unschedule", "unscheduled", metavar="NAME", help="Delete the schedule of this name. While a run of it "
              "is in progress, only disable it.")  # fmt: skip
@click.option("--end-runs", "ending", is_flag=True, help="With --unschedule: end its runs first.")
@click.option("--image-registry", metavar="REGISTRY/PROJECT", help="Where the images are, if not in image streams of "
              "the project: sets pipeline_image and trainer_image. Overrides TAILTUNE_IMAGE_REGISTRY.")  # fmt: skip
@click.option("--endpoint", help="Address of the pipeline server. By default, that of the login's project.")
@click.option("--namespace", help="Project on the cluster. By default, that of the login.")
@click.option("--dry-run", is_flag=True, help="Check and print the resolved recipe and parameters; run nothing.")
@click.option("--check", is_flag=True, help="Exit with status 1 and a diff when compiled/ is out of date.")
@click.option("--list", "list_them", is_flag=True, help="List the built-in recipes and the run parameters.")
@click.option("--inspect", "inspected", metavar="SOURCE", help="Show what a data set contains, and the recipe keys "
              "that would fit. Further sources may follow.")  # fmt: skip
@click.option("--write-recipe", type=click.Path(path_type=Path), metavar="FILE", help="With --inspect: write a recipe "
              "with these keys, which can be run as it is.")  # fmt: skip
@click.argument("sources", nargs=-1, metavar="")
@command_line(2)
def main(
    recipe_name: str | None,
    local_run: bool,
    submit_run: bool,
    when: str | None,
    run_name: str | None,
    parameters: tuple[str, ...],
    experiment: str,
    list_runs: bool,
    status: str | None,
    logs: str | None,
    follow: bool,
    watch: str | None,
    retry: str | None,
    exporting: bool,
    timeout_seconds: float | None,
    schedule_name: str | None,
    latest: bool,
    max_concurrency: int,
    catch_up: bool,
    cancel: str | None,
    list_schedules: bool,
    unscheduled: str | None,
    ending: bool,
    image_registry: str | None,
    endpoint: str | None,
    namespace: str | None,
    dry_run: bool,
    check: bool,
    list_them: bool,
    inspected: str | None,
    write_recipe: Path | None,
    sources: tuple[str, ...],
) -> None:
    """Compile the recipes into compiled/ (no arguments), or run one here (--local) or on a cluster (--submit)."""
    share_cores()
    modes = {"--local": local_run and not dry_run, "--submit": submit_run, "--schedule": when is not None,
             "--dry-run": dry_run, "--check": check, "--list": list_them, "--list-schedules": list_schedules,
             "--unschedule": unscheduled is not None, "--cancel": cancel is not None, "--runs": list_runs,
             "--status": status is not None, "--logs": logs is not None, "--watch RUN": bool(watch),
             "--retry": retry is not None, "--export-job": exporting, "--inspect": inspected is not None}  # fmt: skip
    if sum(modes.values()) > 1:
        raise click.UsageError(f"give one of {', '.join(modes)} (--dry-run may join --local)")
    runs = local_run or dry_run or submit_run or exporting or when is not None
    if (recipe_name or parameters) and not runs and inspected is None:
        raise click.UsageError("--recipe and -p need --local, --submit, --schedule, --export-job, --dry-run or "
                               "--inspect; without arguments all recipes are compiled")  # fmt: skip
    if sources and inspected is None:
        raise click.UsageError(f"Got unexpected extra argument ({sources[0]}): only --inspect takes several sources")
    if write_recipe and inspected is None:
        raise click.UsageError("--write-recipe needs --inspect SOURCE")
    if write_recipe and recipe_name not in (None, *list_recipes()):
        raise click.UsageError(f"--write-recipe starts from a built-in recipe: {', '.join(list_recipes())}")
    if run_name is not None and not (local_run or submit_run or exporting):
        raise click.UsageError("--run-name needs --local, --submit or --export-job")
    if exporting and run_name is None:
        raise click.UsageError("--export-job needs --run-name")
    if ending and unscheduled is None:
        raise click.UsageError("--end-runs needs --unschedule")
    if watch == "" and not (submit_run or retry is not None):
        raise click.UsageError("--watch needs a RUN, --submit or --retry")
    if follow and logs is None:
        raise click.UsageError("--follow needs --logs")
    if image_registry and not re.fullmatch(r"[a-z0-9][a-z0-9.:-]*(/[a-z0-9._-]+)*", image_registry):
        raise click.UsageError(f"--image-registry '{image_registry}': give HOST[:PORT]/PROJECT without scheme and tag")
    if list_them:
        for name in list_recipes():
            click.echo(f"{name:12} {load_recipe(name).description}")
        click.echo(f"parameters: {', '.join(PARAMETERS)}, or any dotted key of a recipe")
    elif check:
        sys.exit(0 if check_compiled() else 1)
    elif inspected is not None:
        from tailtune.inspection import inspect_sources

        recipe = with_overrides(load_recipe(recipe_name or "survival"), parse_parameters(parameters))
        lines = inspect_sources([inspected, *sources], recipe, write_to=write_recipe, parameters=parameters)
        echo_lines(lines)
    elif list_runs or status is not None or logs is not None or watch or retry is not None:
        import pipeline_runs

        server = PipelineServer(find_connection(endpoint, namespace))
        if list_runs or status is not None:
            lines = pipeline_runs.list_runs(server) if status is None else pipeline_runs.show_status(status, server)
            echo_lines(lines)
        elif logs is not None:
            pipeline_runs.show_logs(logs, server, follow=follow)
        else:
            run_id = pipeline_runs.retry(retry, server) if retry else pipeline_runs.find_run(watch or "", server).run_id
            sys.exit(0 if watch is None or pipeline_runs.watch(run_id, server, timeout_seconds) else 1)
    elif cancel is not None:
        cancel_run(cancel, PipelineServer(find_connection(endpoint, namespace)))
    elif list_schedules or unscheduled is not None:
        server = PipelineServer(find_connection(endpoint, namespace))
        if unscheduled is not None:
            unschedule(unscheduled, server, ending=ending)
        else:
            echo_lines(server.list_schedules())
    elif runs:
        overrides = local_parameters(parse_parameters(parameters))
        if local_run:
            require_train("--local")
            recipe = local_recipe(recipe_name, run_name, overrides)
        else:
            loaded = load_recipe(recipe_name or "survival")
            overrides = {**images.in_registry(image_registry), **overrides}
            recipe = with_overrides(loaded, overrides)
        if dry_run:
            check_recipe(recipe, before_submit=not local_run)
            if not local_run:
                check_volume_names(recipe.cluster)
            _print_resolved(recipe)
            return
        name = f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}" if run_name is None else run_name
        check_run_name(name, "--run-name")
        if exporting:
            from tailtune.jobs.export import export_job

            click.echo(export_job(recipe, name), nl=False)
            return
        if local_run:
            succeeded = run_local(make_pipeline(recipe, cluster=False), parameter_values(recipe), recipe, name)
            click.echo(Path("runs") / name)
            sys.exit(0 if succeeded else 1)
        # everything is checked before anything is uploaded
        if when is not None:
            trigger(when)
        check_recipe(recipe, before_submit=True)
        check_volume_names(recipe.cluster)
        server = PipelineServer(find_connection(endpoint, namespace))
        if when is not None:
            schedule(loaded, recipe, when, schedule_name or recipe.name, experiment, server,
                     latest=overrides if latest else None, max_concurrency=max_concurrency,
                     catch_up=catch_up)  # fmt: skip
        else:
            succeeded = submit(
                loaded, recipe, name, experiment, server, watch=watch is not None, timeout_seconds=timeout_seconds
            )
            sys.exit(0 if succeeded else 1)
    else:
        compile_all()


def _print_resolved(recipe: Recipe) -> None:
    jobs = {stage.name: recipe.resources_of(stage).model_dump(mode="json") for stage in recipe.stages}
    resolved = {"parameters": parameter_values(recipe), "recipe": json.loads(recipe.to_json()), "jobs": jobs}
    click.echo(literal(json.dumps(resolved, indent=2)))
