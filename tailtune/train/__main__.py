"""The entry of every rank: `torchrun … -m tailtune.train`, on a cluster, a laptop or bare machines.

Precedence: recipe < `-p` parameters < environment (EPOCHS, BATCH_SIZE, LEARNING_RATE, DATA_DIR, OUTPUT_DIR,
HIDDEN_STATE_CACHE_DIR, TAILTUNE_ERROR_FILE, TAILTUNE_OWNER_FILE, TAILTUNE_PIPELINE_RUN). The launcher removes the first
three: its recipe has these settings. Only this module reads the training container's environment. WORLD_SIZE, RANK,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT come from torchrun or the operator, never from here.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path

import click

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL's trainers would report their use
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks share the cores

from tailtune import owner
from tailtune.errors import UserError, explain
from tailtune.files import write_json
from tailtune.imports import uncollected
from tailtune.lifeline import hold_lifeline
from tailtune.log import configure, log
from tailtune.recipe.load import load_recipe, parse_parameters, with_environment, with_overrides
from tailtune.run import DATA_FILE


@click.command(context_settings={"max_content_width": 110})
@click.option("--recipe", required=True, help="A built-in recipe's name, or a .yaml or .json file.")
@click.option("--data-dir", type=click.Path(path_type=Path), default="/shared/data", show_default=True,
              help="Directory with data.parquet; DATA_DIR in the environment wins.")  # fmt: skip
@click.option("--model-dir", type=click.Path(path_type=Path), required=True, help="Directory of the base model.")
@click.option("--output-dir", type=click.Path(path_type=Path), default="/shared/models", show_default=True,
              help="Where best_model/ and checkpoints/ go; OUTPUT_DIR in the environment wins.")  # fmt: skip
@click.option("--hidden-state-cache-dir", type=click.Path(path_type=Path),
              help="Directory for hidden states of frozen layers, shared by all ranks; HIDDEN_STATE_CACHE_DIR wins. "
                   "By default hidden_state_cache/ in the output directory.")  # fmt: skip
@click.option("--stage", "stage_name", help="Stage of the recipe; the first one by default.")
@click.option("-p", "parameters", multiple=True, metavar="KEY=VALUE", help="Run parameter or dotted recipe key.")
def main(
    recipe: str,
    data_dir: Path,
    model_dir: Path,
    output_dir: Path,
    hidden_state_cache_dir: Path | None,
    stage_name: str | None,
    parameters: tuple[str, ...],
) -> None:
    """Train one stage of a recipe. Start it with torchrun, one process per GPU."""
    configure()
    hold_lifeline()
    try:
        resolved = with_environment(with_overrides(load_recipe(recipe), parse_parameters(parameters)), os.environ)
        names = [stage.name for stage in resolved.stages]
        if stage_name and stage_name not in names:
            raise UserError(f"the recipe has no stage '{stage_name}'", f"use one of {', '.join(names)}")
        stage = resolved.stages[names.index(stage_name) if stage_name else 0]
        data = Path(os.environ.get("DATA_DIR") or data_dir) / DATA_FILE
        if not data.is_file():
            raise UserError(f"{data} does not exist", "write it with the parquet step, or set --data-dir")
        output = Path(os.environ.get("OUTPUT_DIR") or output_dir)
        cache = os.environ.get("HIDDEN_STATE_CACHE_DIR") or hidden_state_cache_dir or output / "hidden_state_cache"
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(output / "tensorboard"))
        with uncollected():
            kind = importlib.import_module(f"tailtune.kinds.{stage.kind}.train")
            from tailtune.train.run import Paths, leave_process_group, train
        owner_path, own_id = os.environ.get("TAILTUNE_OWNER_FILE"), os.environ.get("TAILTUNE_PIPELINE_RUN", "")

        def refuse_if_taken_over() -> None:
            if owner_path:
                owner.refuse_if_taken_over(Path(owner_path), own_id)

        paths = Paths(data, model_dir, output, Path(cache))
        status = train(resolved, stage, paths, kind.make_trainer, refuse_if_taken_over)
        leave_process_group()
    except UserError as error:
        report(error)
        sys.exit(1)
    except Exception as error:
        if "TAILTUNE_ERROR_FILE" in os.environ:
            raise  # torchrun restarts the ranks, and reports the exception of the first one that failed
        traceback.print_exc()
        report(explain(error))
        sys.exit(1)
    sys.exit(status)


def report(error: UserError) -> None:
    """Hand the error to the launcher through the file that it names; without a launcher, only log it."""
    path = os.environ.get("TAILTUNE_ERROR_FILE")
    if path is None:
        log.error("train: error: %s", error)
    else:
        write_json(Path(path), {"problem": error.problem, "remedy": error.remedy})
        print(f"train: error: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with uncollected():
        from torch.distributed.elastic.multiprocessing.errors import record
    record(main)(standalone_mode=True)
