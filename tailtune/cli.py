"""`tailtune`: ask a model, evaluate one, judge an evaluation."""

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from tailtune import __version__
from tailtune.errors import UserError
from tailtune.files import read_json
from tailtune.jobs.local import share_cores
from tailtune.log import configure
from tailtune.manifest import read_manifest
from tailtune.recipe.load import load_recipe, parse_parameters, with_overrides
from tailtune.recipe.schema import Recipe
from tailtune.run import Run

DIRECTORY = click.Path(path_type=Path)


def _one_line_errors(function: Callable[..., None]) -> Callable[..., None]:
    """A UserError as one line on stderr and exit status 1."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        configure()
        try:
            function(*args, **kwargs)
        except UserError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(1)

    return wrapped


@click.group(context_settings={"max_content_width": 110})
@click.version_option(__version__, prog_name="tailtune")
def main() -> None:
    """Ask a tuned model, evaluate one, judge an evaluation. Pipelines run with `python pipeline.py`."""
    share_cores()


@main.command()
@click.argument("question")
@click.option("--model", "which", type=click.Choice(["tuned", "base", "both"]), default="tuned", show_default=True)
@click.option(
    "--run", "run_dir", type=DIRECTORY, help="The run, by name or directory; the newest one below runs/ by default."
)
@_one_line_errors
def ask(question: str, which: str, run_dir: Path | None) -> None:
    """Ask one QUESTION, with the system prompt and the settings that the model was trained with."""
    if not question.strip():
        raise UserError("the question is empty; write one in quotes")
    run = _load_run(run_dir)
    models = {"base": _base_model_dir(run), "tuned": run.best_model_dir}
    chosen = ["base", "tuned"] if which == "both" else [which]
    for name in chosen:
        if not (models[name] / "config.json").is_file():
            raise UserError(f"the {name} model of run '{run.name}' is not at {models[name]}; finish the run first")
    from tailtune.kinds.chat.inference import load_chat_model, stream_answer

    click.echo(f"run {run.name}", err=True)
    for name in chosen:
        if which == "both":
            click.secho(f"{name}:", bold=True)
        stream_answer(load_chat_model(models[name]), run.recipe.prompt, question, run.recipe.generation)


@main.command()
@click.argument("model", type=DIRECTORY)
@click.option("--base", type=DIRECTORY, help="The untuned model, to compare with.")
@click.option("--recipe", required=True, help="A built-in recipe's name, or a file.")
@click.option("--data-dir", type=DIRECTORY, required=True, help="Directory with data.parquet, of the parquet step.")
@click.option("-p", "parameters", multiple=True, metavar="KEY=VALUE", help="Run parameter or dotted recipe key.")
@_one_line_errors
def evaluate(model: Path, base: Path | None, recipe: str, data_dir: Path, parameters: tuple[str, ...]) -> None:
    """Evaluate a MODEL directory on the validation rows; prints JSON that `tailtune gate` reads."""
    resolved = _recipe(recipe, parameters)
    if not (data_dir / "data.parquet").is_file():
        raise UserError(f"{data_dir} holds no data.parquet; give the data/parquet directory of a run")
    models = {"tuned": model} if base is None else {"base": base, "tuned": model}
    for directory in models.values():
        if not (directory / "config.json").is_file():
            raise UserError(f"{directory} holds no config.json; give the directory of a Transformers model")
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tailtune.evaluate import compare_models

    try:
        table = pq.read_table(data_dir / "data.parquet")
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{data_dir / 'data.parquet'} cannot be read: {str(error).splitlines()[0]}; give the "
                        "data/parquet directory of a run") from None  # fmt: skip
    if missing := [name for name in resolved.data.columns if name not in table.column_names]:
        raise UserError(f"{data_dir / 'data.parquet'} has no column '{missing[0]}', it has "
                        f"{', '.join(table.column_names)}; give the data of a run of this recipe")  # fmt: skip
    click.echo(json.dumps(compare_models(resolved, data_dir / "data.parquet", models), indent=2, ensure_ascii=False))


@main.command()
@click.argument("evaluation", type=DIRECTORY)
@click.option("--recipe", required=True, help="A built-in recipe's name, or a file.")
@click.option("-p", "parameters", multiple=True, metavar="KEY=VALUE", help="Run parameter or dotted recipe key.")
@_one_line_errors
def gate(evaluation: Path, recipe: str, parameters: tuple[str, ...]) -> None:
    """Judge an EVALUATION (JSON file with `metrics`) by a recipe's rules; exit status 1 when it fails."""
    from tailtune.gate import judge, verdict_lines

    if not evaluation.is_file():
        raise UserError(f"{evaluation} is no file; give the evaluation.json of a run")
    try:
        document = read_json(evaluation)
    except UnicodeDecodeError:
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("metrics"), dict):
        raise UserError(f'{evaluation} holds no "metrics"; give the evaluation.json of a run')
    verdict = judge(_recipe(recipe, parameters).gate, document["metrics"])
    click.echo("\n".join(verdict_lines(verdict)))
    sys.exit(0 if verdict["passed"] else 1)


@main.command()
@click.option("--recipe", default="survival", show_default=True, help="The recipe that is to run.")
@click.option("-p", "parameters", multiple=True, metavar="KEY=VALUE", help="Run parameter or dotted recipe key.")
@click.option("--namespace", help="Project on the cluster; that of the login where not given.")
@click.option("--local", "local_only", is_flag=True, help="Look at this machine alone.")
@click.option("--image-registry", metavar="REGISTRY/PROJECT", help="As for pipeline.py: where the images are.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@_one_line_errors
def doctor(recipe: str, parameters: tuple[str, ...], namespace: str | None, local_only: bool,
           image_registry: str | None, as_json: bool) -> None:  # fmt: skip
    """Find what would stop a run, with the command that mends it; exit status 1 when something does."""
    from tailtune import images
    from tailtune.doctor import findings
    from tailtune.doctor.examine import examine

    found = examine(_recipe(recipe, parameters), namespace, cluster=not local_only,
                              images=images.both(image_registry))  # fmt: skip
    lines = findings.as_lines(found)
    click.echo(json.dumps(findings.as_json(found), indent=2) if as_json else "\n".join(lines))
    sys.exit(1 if findings.blocked(found) else 0)


@main.command()
@click.argument("run")
@click.option("--namespace", help="Project on the cluster; that of the login where not given.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@_one_line_errors
def cancel(run: str, namespace: str | None, dry_run: bool) -> None:
    """Delete the training jobs that a RUN has left behind; checkpoints stay.

    A run that goes on makes its job again: end it with `python pipeline.py --cancel RUN`.
    """
    from tailtune.jobs import cleanup
    from tailtune.jobs.kubernetes import KubernetesClient

    _say_deleted(cleanup.cancel(KubernetesClient(namespace, api_seconds=20), run=run, dry_run=dry_run), dry_run)


@main.command()
@click.option("--namespace", help="Project on the cluster; that of the login where not given.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@_one_line_errors
def gc(namespace: str | None, dry_run: bool) -> None:
    """Delete training jobs that no pipeline step waits for any more.

    A step that is between two attempts does not wait either: its next attempt makes the job again, and resumes.
    """
    from tailtune.jobs import cleanup
    from tailtune.jobs.kubernetes import KubernetesClient

    _say_deleted(cleanup.collect_garbage(KubernetesClient(namespace, api_seconds=20), dry_run=dry_run), dry_run)


def _say_deleted(names: list[str], dry_run: bool) -> None:
    for name in names:
        click.echo(name)
    click.echo(f"{len(names)} jobs {'would be ' if dry_run else ''}deleted", err=True)


def _recipe(name_or_path: str, parameters: tuple[str, ...]) -> Recipe:
    return with_overrides(load_recipe(name_or_path), parse_parameters(parameters))


def _load_run(directory: Path | None) -> Run:
    """The run in a directory, or the one below runs/ that was started last, of those that have a model."""
    if directory is None:
        found = [p for p in Path("runs").glob("*/workspace/run.json") if (p.parent / "pipeline.log").is_file()]
        if not found:
            raise UserError("there is no run below runs/; start one with `make demo`, or give --run DIRECTORY")
        finished = [p for p in found if read_manifest(p.parents[1] / "models" / "best_model")]
        path = max(finished or found, key=lambda p: (p.parent / "pipeline.log").stat().st_mtime)
    else:
        # a run's directory, a workspace directory on a volume, or the name of a run
        places = [
            directory / "workspace" / "run.json",
            directory / "run.json",
            "runs" / directory / "workspace/run.json",
        ]
        path = next((place for place in places if place.is_file()), places[0])
        if not path.is_file():
            there = sorted(p.parents[1].name for p in Path("runs").glob("*/workspace/run.json"))
            raise UserError(f"{directory} holds no run; there are: {', '.join(there) or 'none below runs/'}")
    try:
        return Run.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _base_model_dir(run: Run) -> Path:
    """Where the run's base model lies: its own copy, or the directory that was named."""
    named = Path(run.recipe.model.base_model).expanduser()
    return named if named.is_dir() else run.base_model_dir
