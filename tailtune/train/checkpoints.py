"""Complete checkpoints: a checkpoint counts only when every file that its `complete.json` lists is there.

Trainer writes a checkpoint file by file, and each rank writes its own random state. A process that dies in between
leaves a directory that looks like a checkpoint; resuming from it would train something else.

`run.find_checkpoint` picks the checkpoint that all ranks resume from.
"""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from tailtune.files import write_json
from tailtune.training_key import CHECKPOINT_KEY

COMPLETE = "complete.json"
ELAPSED = "elapsed.json"


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps of a `checkpoint-N` directory, -1 for other names."""
    match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(match.group(1)) if match else -1


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file in the checkpoint's list is there with its size."""
    try:
        files = json.loads((checkpoint / COMPLETE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return all((checkpoint / n).is_file() and (checkpoint / n).stat().st_size == b for n, b in files.items())


def latest_complete(directory: Path) -> Path | None:
    """Return the complete checkpoint with the most steps."""
    complete = [path for path in directory.glob("checkpoint-*") if step_of(path) >= 0 and is_complete(path)]
    return max(complete, key=step_of, default=None)


def remove_incomplete(directory: Path) -> None:
    """Delete checkpoints of an interrupted save, so that Trainer's rotation never counts them."""
    for path in directory.glob("checkpoint-*"):
        if step_of(path) >= 0 and not is_complete(path):
            shutil.rmtree(path)


def seconds_at(checkpoint: Path | None) -> float:
    """Return the seconds of training behind a checkpoint, over all attempts; 0 without one."""
    return float(json.loads((checkpoint / ELAPSED).read_text())["train_seconds"]) if checkpoint else 0.0


class MarkComplete(TrainerCallback):
    """Writes a checkpoint's key, and its list of files after every rank has written its own.

    Only then are older checkpoints deleted, except for the best one and the `limit - 1` last ones: Trainer would delete
    them before the new one is complete, and a run that is killed in between would resume from the best one. Before
    anything is saved, rank 0 calls `refuse_if_taken_over`.
    """

    def __init__(
        self,
        key: dict[str, Any],
        refuse_if_taken_over: Callable[[], None],
        seconds_before: float = 0.0,
        limit: int | None = None,
    ) -> None:
        self.key, self.refuse_if_taken_over = key, refuse_if_taken_over
        self.seconds_before, self.limit = seconds_before, limit
        self.start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save and state.is_world_process_zero:
            self.refuse_if_taken_over()

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:  # Trainer saves after the evaluation, which may have taken long
            self.refuse_if_taken_over()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the best checkpoint where the run is now: Trainer's state has the path at which it was saved."""
        self.start = time.monotonic()
        best = Path(args.output_dir) / f"checkpoint-{state.best_global_step}"
        state.best_model_checkpoint = str(best) if best.is_dir() else None

    def seconds(self) -> float:
        """Return the seconds of training so far, earlier attempts included."""
        return self.seconds_before + time.monotonic() - self.start

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            dist.barrier()
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_json(checkpoint / CHECKPOINT_KEY, self.key)
            write_json(checkpoint / ELAPSED, {"train_seconds": self.seconds()})
            files = {p.relative_to(checkpoint).as_posix(): p.stat().st_size
                     for p in sorted(checkpoint.rglob("*")) if p.is_file()}  # fmt: skip
            write_json(checkpoint / COMPLETE, files)
            rotate_checkpoints(args.output_dir, self.limit, state.best_model_checkpoint)
