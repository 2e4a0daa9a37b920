"""The entry of every rank: `torchrun … -m tailtune.train`, on a cluster, a laptop or bare machines.

Precedence: recipe < `-p` parameters < environment (EPOCHS, BATCH_SIZE, LEARNING_RATE, DATA_DIR,
OUTPUT_DIR, HIDDEN_STATE_CACHE_DIR). This is the one place that reads the training container's environment. WORLD_SIZE,
RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT come from torchrun or the operator, never from here.
"""

import os
import sys
from pathlib import Path

import click

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL's trainers would report their use
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks share the cores

from torch.distributed.elastic.multiprocessing.errors import record

from tailtune.errors import UserError
from tailtune.log import configure, log
from tailtune.recipe.load import load_recipe, parse_parameters, with_environment, with_overrides


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
    try:
        from tailtune.train.run import Paths, leave_process_group, train

        resolved = with_environment(with_overrides(load_recipe(recipe), parse_parameters(parameters)), os.environ)
        stage = next((s for s in resolved.stages if s.name == (stage_name or resolved.stages[0].name)), None)
        if stage is None:
            raise UserError(f"no stage '{stage_name}'; the recipe has {[s.name for s in resolved.stages]}")
        data = Path(os.environ.get("DATA_DIR") or data_dir) / "data.parquet"
        if not data.is_file():
            raise UserError(f"{data} does not exist; write it with the parquet step, or set --data-dir")
        output = Path(os.environ.get("OUTPUT_DIR") or output_dir)
        cache = os.environ.get("HIDDEN_STATE_CACHE_DIR") or hidden_state_cache_dir or output / "hidden_state_cache"
        paths = Paths(data, model_dir, output, Path(cache))
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(paths.output / "tensorboard"))
        status = train(resolved, stage, paths)
        leave_process_group()
    except UserError as error:
        log.error("train: error: %s", error)
        sys.exit(1)
    sys.exit(status)


if __name__ == "__main__":
    record(main)(standalone_mode=True)
