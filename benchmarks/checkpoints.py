"""Measures what checkpoints cost: tail training and training of all weights, at the width of SmolLM3-3B.

    python benchmarks/checkpoints.py --data offline-practical-skills-qa.jsonl

The model has SmolLM3-3B's width and vocabulary, but only some of its layers, and random weights. Checkpoints of tail
training hold only what trains: with survival's two layers and head, as much as those of SmolLM3-3B. Both trainings run
through the entry point of a rank, save after every step, and are timed from the call to the callbacks' end. Then the
disk is synchronised, which training does not wait for. Needs 16 GiB of memory and 25 GB of disk.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tail import SHAPES, prepare

from tailtune.recipe.load import load_recipe

WHOLE = "smollm3-3b"
INTERVAL = load_recipe("survival").resources.checkpoint_seconds
TRAININGS = {"tail, 2 layers and head": {}, "all weights": {"stages.0.train_weights": "all"}}
VOLUMES = (100, 200, 500, 1000)
"""Speeds of volumes for the computed rows, in MB/s."""


def train(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train in this process, and return the bytes of a checkpoint and the seconds of each save and synchronisation."""
    from transformers import Trainer

    from tailtune.train.__main__ import main

    save: list[float] = []
    sync: list[float] = []
    log_save_evaluate = Trainer._maybe_log_save_evaluate

    def timed(self: Any, *args: Any, **kwargs: Any) -> None:
        only_saves, start = self.control.should_save and not self.control.should_evaluate, time.perf_counter()
        log_save_evaluate(self, *args, **kwargs)
        if only_saves:
            save.append(time.perf_counter() - start)
            subprocess.run(["sync"], check=True)
            sync.append(time.perf_counter() - start)

    Trainer._maybe_log_save_evaluate = timed  # type: ignore[method-assign]
    arguments = ["--recipe", "survival", "--data-dir", str(folder / "data"), "--model-dir", str(folder / "base"),
                 "--output-dir", str(folder / "out")]  # fmt: skip
    arguments += [part for key, value in settings.items() for part in ("-p", f"{key}={json.dumps(value)}")]
    try:
        main(arguments, standalone_mode=False)
    except SystemExit as end:
        if end.code:
            raise
    checkpoint = next((folder / "out" / "checkpoints").glob("checkpoint-*"))
    summary = json.loads((folder / "out" / "training_summary.json").read_text())
    return {"bytes": sum(path.stat().st_size for path in checkpoint.iterdir()), "save": save, "sync": sync,
            "trained": summary["num_trainable_parameters"]}  # fmt: skip


def num_parameters() -> int:
    """Return the number of SmolLM3-3B's parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(
            "smollm3", **SHAPES[WHOLE], tie_word_embeddings=True, pad_token_id=0)).num_parameters()  # fmt: skip


def row(name: str, trained: float, size: float, each: list[float], seconds: float, synced: float) -> None:
    shown = ", ".join(f"{value:.1f}" for value in each) or "computed"
    shares = " | ".join(f"{100 * value / INTERVAL:.1f} %" for value in (seconds, synced))
    print(f"| {name} | {trained / 1e6:,.0f} | {size / 1e9:.2f} | {shown} | {size / seconds / 1e6:,.0f} "
          f"| {synced:.1f} | {shares} |", flush=True)  # fmt: skip


@click.command()
@click.option("--data", type=click.Path(exists=True, path_type=Path), help="JSON Lines with topic, question, answer.")
@click.option("--layers", default=3, show_default=True, help="Layers of the model that is trained.")
@click.option("--saves", default=6, show_default=True, help="Checkpoints; the first is a warm-up.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default="runs",
    show_default=True,
    help="Where to write: a directory on the volume that is measured.",
)
@click.option("--child", "child_spec", hidden=True)
def main(data: Path | None, layers: int, saves: int, folder: Path, child_spec: str | None) -> None:
    if child_spec:
        print(json.dumps(train(folder, json.loads(child_spec))))
        return
    if data is None:
        raise click.UsageError("--data is missing; give a JSON Lines file with topic, question and answer")
    folder = folder / "tailtune-checkpoints"  # deleted at the end
    folder.mkdir(parents=True, exist_ok=True)
    with data.open() as rows:  # few and short ones, because steps and the evaluation at the end only cost time here
        (folder / "rows.jsonl").write_text("".join(islice(rows, 50)))
    SHAPES["cut"] = SHAPES[WHOLE] | {"num_hidden_layers": layers}
    prepare(folder, folder / "rows.jsonl", "cut")
    common = {"resources.checkpoint_seconds": 1, "stages.0.trainer.max_steps": saves + 1,
              "stages.0.trainer.eval_steps": saves + 1, "batch_size": 1, "prompt.system": "Answer.",
              "stages.0.trainer.gradient_accumulation_steps": 1}  # fmt: skip
    print("| training | weights trained, M | GB | seconds, each | MB/s | median until on disk, s "
          f"| of {INTERVAL} s | until on disk |\n|---|" + "---:|" * 7)  # fmt: skip
    for name, settings in TRAININGS.items():
        shutil.rmtree(folder / "out", ignore_errors=True)
        command = [sys.executable, __file__, "--folder", str(folder), "--child", json.dumps(common | settings)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        result = json.loads(output.splitlines()[-1])
        save, sync = (result[key][1:] for key in ("save", "sync"))
        row(f"{name}, {layers} layers", result["trained"], result["bytes"], save, statistics.median(save),
            statistics.median(sync))  # fmt: skip
        if settings:
            larger = num_parameters() / result["trained"]
            whole = result["bytes"] * larger
            row(f"{name}, SmolLM3-3B", num_parameters(), whole, [], statistics.median(save) * larger,
                statistics.median(sync) * larger)  # fmt: skip
        else:
            whole = result["bytes"]
        for speed in VOLUMES:
            seconds = whole / speed / 1e6
            row(f"{name}, SmolLM3-3B, {speed} MB/s", whole / result["bytes"] * result["trained"], whole, [], seconds,
                seconds)  # fmt: skip
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
