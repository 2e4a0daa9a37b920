"""Where hidden states are kept, and what may change between attempts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_recipe

from tailtune.errors import UserError
from tailtune.recipe.load import parse_recipe
from tailtune.train.tail import placement
from tailtune.training_key import recipe_settings

GB = 10**9


def choose(num_bytes: int, requested: str = "auto", uses: float = 4.0, **settings: Any) -> tuple[str, str]:
    """Call `choose_placement` with defaults for most arguments."""
    common = {"missing_bytes": num_bytes, "checkpoints": settings["directory"], "num_trainable": 1, "ranks_on_node": 1,
              "device": torch.device("cpu")}  # fmt: skip
    return placement.choose_placement(requested, num_bytes, uses, **{**common, **settings})


@pytest.mark.parametrize(
    ("requested", "num_bytes", "uses", "expected", "reason"),
    [
        ("auto", 1 * GB, 4.0, "host", "1.00 GB; 8.0 GB were free"),
        ("auto", 3 * GB, 4.0, "disk", "3.00 GB, mapped from"),  # two ranks share the memory
        ("auto", 1 * GB, 1.0, "host", "1.00 GB; 8.0 GB were free"),
        ("auto", 1 * GB, 0.5, "none", "a row is used only 0.5 times on average"),
        ("auto", 60 * GB, 4.0, "none", "60.00 GB do not fit into the 50.00 GB free"),
        ("disk", 1 * GB, 1.0, "disk", "as the recipe says"),
        ("disk", 60 * GB, 4.0, "none", "do not fit"),
        ("none", 1 * GB, 4.0, "none", "as the recipe says"),
    ],
)
def test_placement(
    requested: str,
    num_bytes: int,
    uses: float,
    expected: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 8 * GB)
    monkeypatch.setattr(placement, "free_bytes", lambda directory: 50 * GB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen, why = choose(
        num_bytes, requested, uses, directory=tmp_path / "new" / "dir", checkpoints=tmp_path, ranks_on_node=2
    )
    assert chosen == expected and reason in why


@pytest.mark.parametrize(("same", "expected"), [(True, "none"), (False, "host")])
def test_room_is_left_for_checkpoints_on_the_same_volume(
    same: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 64 * GB)
    monkeypatch.setattr(placement, "free_bytes", lambda directory: 20 * GB)
    monkeypatch.setattr(placement, "on_one_volume", lambda path, other_path: same)
    chosen, why = choose(10 * GB, num_trainable=419_000_000, directory=tmp_path)
    assert chosen == expected and (not same or "15.08 GB of them for checkpoints" in why)


def test_volumes_are_distinguished(tmp_path: Path) -> None:
    assert placement.on_one_volume(tmp_path / "new", tmp_path)
    if Path("/proc/self").is_dir():  # Linux
        assert not placement.on_one_volume(tmp_path, Path("/proc/self/new"))


@pytest.mark.parametrize(("free", "expected"), [(20 * GB, "gpu"), (9 * GB, "host")])
def test_gpu_memory_comes_first_when_the_optimizer_leaves_room(
    free: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 24 * GB))
    monkeypatch.setattr(placement, "free_bytes", lambda directory: 500 * GB)
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 64 * GB)
    chosen, _ = choose(GB, num_trainable=419_000_000, directory=tmp_path, device=torch.device("cuda"))
    assert chosen == expected


def test_existing_hidden_states_need_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "free_bytes", lambda directory: 0)
    chosen, _ = choose(GB, uses=1.0, missing_bytes=0, directory=tmp_path)
    assert chosen in ("host", "disk")


def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tail\.cache is gpu, but training runs on the CPU; set it to auto"):
        choose(GB, "gpu", directory=tmp_path)


def test_the_placement_may_change_between_attempts() -> None:
    """For example after running out of memory. `mode` is not allowed to change: its checkpoints are different."""
    auto, disk, off = (
        recipe_settings(tiny_recipe(**{f"stages.0.tail.{key}": value}))
        for key, value in (("cache", "auto"), ("cache", "disk"), ("mode", "off"))
    )
    assert auto == disk != off


@pytest.mark.parametrize("key", ["packing", "answer_head", "shared_prompt", "stop_backward"])
def test_former_keys_are_refused(key: str) -> None:
    with pytest.raises(UserError, match=rf"'stages\.0\.tail\.{key}' is no longer a recipe key"):
        tiny_recipe(**{f"stages.0.tail.{key}": False})
    recipe = tiny_recipe().model_dump(mode="json")
    recipe["stages"][0]["tail"][key] = True
    with pytest.raises(UserError, match=rf"stages\.0\.tail: {key} is no longer a recipe key .*; delete it"):
        parse_recipe(json.dumps(recipe))
