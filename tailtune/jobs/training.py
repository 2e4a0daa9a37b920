"""The train step: launch a stage as a job, once."""

from pathlib import Path

from tailtune.errors import UserError
from tailtune.identity import claim_checkpoints, training_key
from tailtune.jobs.job import Job
from tailtune.jobs.local import run_job
from tailtune.log import log
from tailtune.manifest import read_manifest, write_text
from tailtune.run import Run


def train_stage(run: Run, data_dir: Path, model_dir: Path) -> Path:
    """Train the recipe's stage and return `best_model/`; a finished one is left untouched.

    `data_dir` holds `data.parquet` with its manifest, `model_dir` the base model. Raises JobFailed,
    and UserError when the run's checkpoints come from other settings.
    """
    recipe, resources = run.recipe, run.recipe.resources
    if read_manifest(data_dir) is None:
        raise UserError(f"{data_dir} holds no complete Parquet file; run the parquet step first")
    key = training_key(recipe, data_dir, model_dir)
    recipe_path = run.models_dir / "recipe.json"
    if read_manifest(run.best_model_dir, key):
        write_text(recipe_path, recipe.model_dump_json(indent=2) + "\n")
        log.info("train: best_model/ is complete, no step to do")
        return run.best_model_dir
    claim_checkpoints(run.models_dir / "checkpoints", key)
    write_text(recipe_path, recipe.model_dump_json(indent=2) + "\n")
    stage = recipe.stages[0]
    run_job(
        Job(
            name=f"{recipe.name}-{stage.name}",
            module="tailtune.train",
            args=("--recipe", str(recipe_path), "--stage", stage.name, "--model-dir", str(model_dir)),
            num_nodes=resources.num_nodes,
            ranks_per_node=resources.ranks_per_node,
            max_restarts=resources.max_restarts,
            shutdown_seconds=resources.shutdown_seconds,
            environment={
                "DATA_DIR": str(data_dir),
                "OUTPUT_DIR": str(run.models_dir),
                "PREFIX_CACHE_DIR": str(run.prefix_cache_dir),
            },
        )
    )
    return run.best_model_dir
