"""The command `tailtune`: ask a model, evaluate one, judge an evaluation, check a cluster, clean up jobs."""

import json
import sys
from pathlib import Path

import click

from tailtune import __version__
from tailtune.console import command_line, echo_lines
from tailtune.errors import UserError
from tailtune.imports import require_train
from tailtune.jobs.local import share_cores
from tailtune.manifest import read_manifest
from tailtune.recipe.load import load_recipe, parse_parameters, with_overrides
from tailtune.recipe.schema import Recipe
from tailtune.retention import refuse_removed
from tailtune.run import DATA_FILE, Run, any_run
from tailtune.train.arguments import truncation

DIRECTORY = click.Path(path_type=Path)
parameter_option = click.option(
    "-p", "parameters", multiple=True, metavar="KEY=VALUE", help="Run parameter or dotted recipe key. Repeatable."
)
recipe_option = click.option("--recipe", required=True, help="A built-in recipe's name, or the path of a file.")
namespace_option = click.option("--namespace", help="Project on the cluster. By default, that of the login.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")


@click.group(context_settings={"max_content_width": 110})
@click.version_option(__version__, prog_name="tailtune")
def main() -> None:
    """Ask a tuned model, evaluate one, judge an evaluation. Pipelines run with `python pipeline.py`."""
    share_cores()


@main.command()
@click.argument("question")
@click.option("--model", "which", type=click.Choice(["tuned", "base", "both"]), default="tuned", show_default=True)
@click.option(
    "--run", "run_dir", type=DIRECTORY, help="The run, by name or directory. By default, the newest one below runs/."
)
@command_line(1)
def ask(question: str, which: str, run_dir: Path | None) -> None:
    """Ask one QUESTION, with the system prompt and the settings that the model was trained with."""
    if not question.strip():
        raise UserError("the question is empty", "write one in quotes")
    require_train("ask")
    run = _load_run(run_dir)
    models = {"base": run.base_model_path, "tuned": run.best_model_dir}
    chosen = ["base", "tuned"] if which == "both" else [which]
    for name in chosen:
        refuse_removed(models[name])
        if not (models[name] / "config.json").is_file():
            raise UserError(f"the {name} model of run '{run.name}' is not at {models[name]}", "finish the run first")
    from tailtune.kinds.chat.inference import load_chat_model, stream_answer

    click.echo(f"run {run.name}", err=True)
    for name in chosen:
        if which == "both":
            click.secho(f"{name}:", bold=True)
        chat, limit = load_chat_model(models[name]), truncation(run.recipe.stages[0]).max_length
        stream_answer(chat, run.recipe.prompt, question, run.recipe.generation, limit)


@main.command()
@click.argument("model", type=DIRECTORY)
@click.option("--base", type=DIRECTORY, help="The untuned model, to compare with.")
@recipe_option
@click.option("--data-dir", type=DIRECTORY, required=True, help="The parquet step's directory, with data.parquet.")
@parameter_option
@command_line(1)
def evaluate(model: Path, base: Path | None, recipe: str, data_dir: Path, parameters: tuple[str, ...]) -> None:
    """Evaluate a MODEL directory on the validation rows; prints JSON that `tailtune gate` reads."""
    require_train("evaluate")
    resolved = _recipe(recipe, parameters)
    path = data_dir / DATA_FILE
    refuse_removed(data_dir, model, *([base] if base else []))
    if not path.is_file():
        raise UserError(f"{data_dir} contains no {DATA_FILE}", "give the data/parquet directory of a run")
    models = {"tuned": model} if base is None else {"base": base, "tuned": model}
    for directory in models.values():
        if not (directory / "config.json").is_file():
            raise UserError(f"{directory} contains no config.json", "give the directory of a Transformers model")
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tailtune.evaluate import compare_models

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read: {reason}", "give the data/parquet directory of a run") from None
    if missing := [name for name in resolved.data.columns if name not in table.column_names]:
        raise UserError(f"{path} has no column '{missing[0]}', it has {', '.join(table.column_names)}",
                        "give the data of a run of this recipe")  # fmt: skip
    click.echo(json.dumps(compare_models(resolved, path, models), indent=2, ensure_ascii=False))


@main.command()
@click.argument("evaluation", type=DIRECTORY)
@recipe_option
@parameter_option
@command_line(1)
def gate(evaluation: Path, recipe: str, parameters: tuple[str, ...]) -> None:
    """Judge an EVALUATION (JSON file with `metrics`) against a recipe's rules; exit status 1 when it fails."""
    from tailtune.gate import judge, read_metrics, verdict_lines

    verdict = judge(_recipe(recipe, parameters).gate, read_metrics(evaluation))
    echo_lines(verdict_lines(verdict))
    sys.exit(0 if verdict["passed"] else 1)


@main.command()
@click.option("--recipe", default="survival", show_default=True, help="The recipe to run.")
@parameter_option
@namespace_option
@click.option("--local", "local_only", is_flag=True, help="Check only this machine.")
@click.option("--image-registry", metavar="REGISTRY/PROJECT", help="Where the images are, as for pipeline.py.")
@click.option("--json", "print_json", is_flag=True, help="Print the findings as JSON.")
@command_line(1)
def doctor(recipe: str, parameters: tuple[str, ...], namespace: str | None, local_only: bool,
           image_registry: str | None, print_json: bool) -> None:  # fmt: skip
    """Find what would stop a run, with the command that fixes it; exit status 1 when something would."""
    from tailtune import images
    from tailtune.doctor.examine import examine
    from tailtune.doctor.findings import as_json, as_lines, blocked

    overrides = {**images.in_registry(image_registry), **parse_parameters(parameters)}
    asked = with_overrides(load_recipe(recipe), overrides)
    findings = examine(asked, namespace, cluster=not local_only,
                       images=(asked.cluster.pipeline_image, asked.cluster.trainer_image))  # fmt: skip
    echo_lines(json.dumps(as_json(findings), indent=2).splitlines() if print_json else as_lines(findings))
    sys.exit(1 if blocked(findings) else 0)


@main.command()
@click.argument("run")
@namespace_option
@dry_run_option
@command_line(1)
def cancel(run: str, namespace: str | None, dry_run: bool) -> None:
    """Delete the training jobs that a RUN has left behind; checkpoints stay.

    An active run recreates its job: end it with `python pipeline.py --cancel RUN`.
    """
    from tailtune.jobs import cleanup
    from tailtune.jobs.kubernetes import KubernetesClient

    _print_deleted(cleanup.cancel(KubernetesClient(namespace, api_seconds=20), run=run, dry_run=dry_run), dry_run)


@main.command()
@namespace_option
@dry_run_option
@click.option("--runs", "old_runs", is_flag=True, help="Remove what old runs no longer need, instead of jobs.")
@click.option("--keep", type=click.IntRange(min=1), metavar="N", help="With --runs: instead of keep_runs.")
@click.option("--keep-models", type=click.IntRange(min=1), metavar="N", help="With --runs: instead of keep_models.")
@click.option("--named", is_flag=True, help="With --runs: also runs that somebody has named, as all local ones are.")
@command_line(1)
def gc(namespace: str | None, dry_run: bool, old_runs: bool, keep: int | None, keep_models: int | None,
       named: bool) -> None:  # fmt: skip
    """Delete orphaned training jobs: those that no pipeline step is waiting for.

    A step between two attempts is not waiting either; its next attempt recreates the job and resumes.

    With --runs: remove checkpoints, base models, cached hidden states, models and data of old runs, below runs/ or, in
    a pod that mounts the volumes, on these. Try --dry-run first.
    """
    if old_runs:
        if namespace:
            raise click.UsageError("--namespace is for jobs; --runs works where the volumes are mounted")
        _remove_runs(keep, keep_models, named=named, dry_run=dry_run)
        return
    if keep or keep_models or named:
        raise click.UsageError("--keep, --keep-models and --named need --runs")
    from tailtune.jobs import cleanup
    from tailtune.jobs.kubernetes import KubernetesClient

    _print_deleted(cleanup.collect_garbage(KubernetesClient(namespace, api_seconds=20), dry_run=dry_run), dry_run)


def _remove_runs(keep: int | None, keep_models: int | None, *, named: bool, dry_run: bool) -> None:
    from tailtune import retention

    layout = any_run()
    if not any(layout.siblings()):
        raise UserError(
            f"there is no run in {layout.promotions_dir.parent}/", "start it where runs/ or the volumes are"
        )
    total = 0
    for line, num_bytes in retention.collect_runs(
        layout, keep_runs=keep, keep_models=keep_models, named=named, dry_run=dry_run
    ):
        echo_lines([line])
        total += num_bytes
    kept = 0 if named else sum(run.is_named for run in retention.stored_runs(layout))
    hint = f"; {kept} runs have names and stay, unless you add --named" if kept else ""
    click.echo(f"{retention.in_words(total)} {'would be ' if dry_run else ''}removed{hint}", err=True)


def _print_deleted(names: list[str], dry_run: bool) -> None:
    echo_lines(names)
    click.echo(f"{len(names)} jobs {'would be ' if dry_run else ''}deleted", err=True)


def _recipe(name_or_path: str, parameters: tuple[str, ...]) -> Recipe:
    return with_overrides(load_recipe(name_or_path), parse_parameters(parameters))


def _load_run(directory: Path | None) -> Run:
    path = _newest_run() if directory is None else _find_run(directory)
    try:
        return Run.from_json(path.read_text(encoding="utf-8"))
    except UserError as error:
        raise UserError(f"{path}: {error.problem}", error.remedy) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {error}") from None


def _newest_run() -> Path:
    """Return the `run.json` of the run below runs/ that was started last, preferably of those that have a model."""
    paths = [path for path in Path("runs").glob("*/workspace/run.json") if _log_path(path).is_file()]
    if not paths:
        raise UserError("there is no run in runs/", "start one with `make demo`, or give --run DIRECTORY")
    finished = [path for path in paths if read_manifest(path.parents[1] / "models" / "best_model")]
    return max(finished or paths, key=lambda path: _log_path(path).stat().st_mtime)


def _log_path(run_json: Path) -> Path:
    return run_json.with_name("pipeline.log")


def _find_run(directory: Path) -> Path:
    """Return the `run.json` of a run's directory, of a workspace directory on a volume, or of a run by name."""
    candidates = (
        directory / "workspace" / "run.json",
        directory / "run.json",
        "runs" / directory / "workspace" / "run.json",
    )
    for path in candidates:
        if path.is_file():
            return path
    names = sorted(path.parents[1].name for path in Path("runs").glob("*/workspace/run.json"))
    raise UserError(f"{directory} contains no run", f"there are: {', '.join(names) or 'none in runs/'}")
