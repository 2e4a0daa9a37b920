"""Damaged checkpoints are noticed, and only the weights of the best one are published."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tailtune.errors import UserError
from tailtune.files import write_json
from tailtune.train.checkpoints import MarkComplete, latest_complete, refuse_other_weights, remove_incomplete, step_of

WEIGHTS = {"layer.weight": torch.arange(64.0), "head.weight": torch.tensor([1.0, float("nan")])}


def save(directory: Path, step: int, best: int) -> Path:
    checkpoint = directory / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    save_file(WEIGHTS, checkpoint / "model.safetensors")
    torch.save({"exp_avg": torch.arange(4096.0)}, checkpoint / "optimizer.pt")
    write_json(checkpoint / "trainer_state.json", {"global_step": step, "best_global_step": best})
    state = SimpleNamespace(is_world_process_zero=True, global_step=step, best_model_checkpoint=None)
    MarkComplete({}, lambda: None).on_save(SimpleNamespace(output_dir=str(directory)), state, None)
    return checkpoint


def flip(path: Path, position: int = -1) -> None:
    """Change one bit in the middle, or at a position."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position < 0 else position] ^= 1
    path.write_bytes(content)


def refill(path: Path) -> None:
    """Truncate the file, and fill it up with zeros."""
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 3].ljust(size, b"\0"))


@pytest.mark.parametrize("damage", [flip, refill])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "trainer_state.json", "elapsed.json", "key.json", "sha256.json"]
)
def test_a_damaged_checkpoint_is_not_resumed(
    tmp_path: Path, name: str, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 10, best=10)
    damaged = save(tmp_path, 20, best=10)
    remove_incomplete(tmp_path)
    assert step_of(latest_complete(tmp_path)) == 20, "it is intact"
    damage(damaged / name)
    remove_incomplete(tmp_path)
    assert step_of(latest_complete(tmp_path)) == 10 and not damaged.exists()
    assert caplog.messages[0].startswith("train: checkpoint-20 is not used: its ")


def test_a_damaged_list_of_files_is_an_incomplete_checkpoint(tmp_path: Path) -> None:
    for content in (b"", b"[]", b"3", b"\xff{}"):
        (save(tmp_path, 10, best=10) / "complete.json").write_bytes(content)
        remove_incomplete(tmp_path)
        assert latest_complete(tmp_path) is None


def test_training_does_not_go_on_without_its_best_weights(tmp_path: Path) -> None:
    """It would end with another model, or with none."""
    best = save(tmp_path, 10, best=10)
    save(tmp_path, 20, best=10)
    flip(best / "optimizer.pt")
    remove_incomplete(tmp_path)  # nothing resumes from it
    flip(best / "model.safetensors")
    with pytest.raises(UserError, match=r"checkpoint-10 has the best eval_loss, but its model.safetensors was damaged"):
        remove_incomplete(tmp_path)
    assert best.exists() and step_of(latest_complete(tmp_path)) == 20


def test_only_the_weights_of_the_best_checkpoint_are_published(tmp_path: Path) -> None:
    best = save(tmp_path, 10, best=10)
    refuse_other_weights({**WEIGHTS, "frozen.weight": torch.ones(1)}, best)
    for other in (WEIGHTS["layer.weight"].nextafter(torch.tensor(99.0)), WEIGHTS["layer.weight"].half()):
        with pytest.raises(UserError, match=r"layer.weight is not that of checkpoint-10, which has the best eval_loss"):
            refuse_other_weights({**WEIGHTS, "layer.weight": other}, best)
    flip(best / "model.safetensors")
    with pytest.raises(UserError, match=r"model.safetensors was damaged after it was saved; delete .* and train again"):
        refuse_other_weights(WEIGHTS, best)
