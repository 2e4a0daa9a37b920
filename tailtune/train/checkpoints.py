"""Complete checkpoints: a checkpoint counts only when every file that its `complete.json` lists is there, undamaged.

Trainer writes a checkpoint file by file, and each rank writes its own random state. A process that dies in between
leaves a directory that looks like a checkpoint; resuming from it would train something else. So would a file that has
been damaged since, which torch and safetensors load without a word: the files of torch contain checksums, and
`sha256.json` has the hashes of the others.

`run.find_checkpoint` picks the checkpoint that all ranks resume from.
"""

import re
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from tailtune.errors import UserError
from tailtune.files import read_json, sha256_file, write_json
from tailtune.log import log
from tailtune.training_key import CHECKPOINT_KEY

COMPLETE = "complete.json"
ELAPSED = "elapsed.json"
HASHES = "sha256.json"
TORCH_FILES = (".pt", ".pth", ".bin")
"""Zip archives, which contain a CRC-32 of every tensor."""
SHARDS = ".distcp"
"""Parts of every rank, on a volume that may be slow: only their size is compared."""
WEIGHTS = "*.safetensors"


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps of a `checkpoint-N` directory, -1 for other names."""
    match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(match.group(1)) if match else -1


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file in the checkpoint's list is there with its size."""
    files = read_json(checkpoint / COMPLETE)
    if not isinstance(files, dict):
        return False
    return all((checkpoint / n).is_file() and (checkpoint / n).stat().st_size == b for n, b in files.items())


def damaged_file(checkpoint: Path, pattern: str = "*") -> str | None:
    """Return a file of a complete checkpoint that is not what was saved, of those whose names match the pattern.

    Checkpoints of earlier versions have no hashes and are not examined.
    """
    hashes = read_json(checkpoint / HASHES)
    names = [name for name in read_json(checkpoint / COMPLETE) if Path(name).match(pattern)]
    if not isinstance(hashes, dict):
        return HASHES if HASHES in names else None
    return next((name for name in names if not _is_intact(checkpoint / name, hashes.get(name))), None)


def _is_intact(path: Path, sha256: str | None) -> bool:
    if sha256 is not None:
        return sha256_file(path) == sha256
    if path.suffix not in TORCH_FILES:  # any other file without a hash: the list of hashes is damaged
        return path.suffix == SHARDS or path.name == HASHES
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError):  # its directory is damaged
        return False


def latest_complete(directory: Path) -> Path | None:
    """Return the complete checkpoint with the most steps."""
    complete = [path for path in directory.glob("checkpoint-*") if step_of(path) >= 0 and is_complete(path)]
    return max(complete, key=step_of, default=None)


def remove_incomplete(directory: Path) -> None:
    """Delete checkpoints of an interrupted save, so that Trainer's rotation never counts them, and the last damaged
    ones: training goes on from the one before them, and writes them again.

    Raises UserError when the best checkpoint so far is damaged, but a later one is not.
    """
    for path in directory.glob("checkpoint-*"):
        if step_of(path) >= 0 and not is_complete(path):
            shutil.rmtree(path)
    while (last := latest_complete(directory)) and (name := damaged_file(last)):
        log.warning("train: %s is not used: its %s was damaged after it was saved", last.name, name)
        shutil.rmtree(last)
    if last:
        best = directory / f"checkpoint-{(read_json(last / TRAINER_STATE_NAME) or {}).get('best_global_step')}"
        if is_complete(best):
            refuse_damaged_weights(best)


def refuse_damaged_weights(best: Path) -> None:
    """Raise UserError when the weights of the best checkpoint are not those that were saved."""
    if name := damaged_file(best, WEIGHTS):
        raise UserError(
            f"{best.name} has the best eval_loss, but its {name} was damaged after it was saved",
            f"delete {best.parent} and train again",
        )


def refuse_other_weights(state_dict: Mapping[str, torch.Tensor], best: Path) -> None:
    """Raise UserError unless the weights that are about to be published are, bit by bit, those of the best checkpoint.

    A checkpoint of tail training contains only what trains. Names that an architecture changes when it is saved are
    passed over.
    """
    refuse_damaged_weights(best)
    for path in best.glob(WEIGHTS):
        with safe_open(path, framework="pt") as saved:
            for name in saved.keys() & state_dict.keys():
                if not _equal(saved.get_tensor(name), state_dict[name].cpu()):
                    raise UserError(
                        f"{name} is not that of {best.name}, which has the best eval_loss",
                        "start the run again: it resumes from its last checkpoint",
                    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits; NaN is equal to itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)))


def seconds_at(checkpoint: Path | None) -> float:
    """Return the seconds of training behind a checkpoint, over all attempts; 0 without one."""
    return float(read_json(checkpoint / ELAPSED)["train_seconds"]) if checkpoint else 0.0


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
            paths = {p.relative_to(checkpoint).as_posix(): p for p in sorted(checkpoint.rglob("*")) if p.is_file()}
            without_checksum = {name: p for name, p in paths.items() if p.suffix not in (*TORCH_FILES, SHARDS)}
            write_json(checkpoint / HASHES, {name: sha256_file(p) for name, p in without_checksum.items()})
            paths[HASHES] = checkpoint / HASHES
            write_json(checkpoint / COMPLETE, {name: p.stat().st_size for name, p in paths.items()})
            rotate_checkpoints(args.output_dir, self.limit, state.best_model_checkpoint)
