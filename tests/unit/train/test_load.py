"""Models come from complete safetensors files, and nothing in their directory is executed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tailtune.errors import UserError
from tailtune.kinds.chat.inference import load_tokenizer
from tailtune.train.weights import load_causal_lm


@pytest.fixture
def model_dir(prepared: Path, tmp_path: Path) -> Path:
    """A copy of a small model that a test may change."""
    return Path(shutil.copytree(prepared / "base", tmp_path / "model"))


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def bring_code(model_dir: Path) -> None:
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    (model_dir / "evil.py").write_text(f"open({str(model_dir / 'executed')!r}, 'w')\n")
    change_json(model_dir / "config.json", model_type="evil", auto_map=names)
    change_json(model_dir / "tokenizer_config.json", tokenizer_class="Evil", auto_map=names)


@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer])
def test_code_of_a_model_directory_is_neither_run_nor_offered(
    model_dir: Path, load: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_code(model_dir)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "y")
    with pytest.raises(UserError, match="no model can be loaded from"):
        load(model_dir)
    assert not (model_dir / "executed").exists() and asked == []


def test_pickled_weights_are_not_loaded(model_dir: Path) -> None:
    weights = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    torch.save(weights, model_dir / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no model can be loaded from .*safetensors"):
        load_causal_lm(model_dir)


def test_a_model_without_some_of_its_weights_is_refused(model_dir: Path) -> None:
    """Transformers would train beside random layers, and say so only in a table of its log."""
    load_causal_lm(model_dir)
    change_json(model_dir / "config.json", num_hidden_layers=5, layer_types=None, no_rope_layers=None)
    with pytest.raises(UserError, match=r"model: \d+ of the model's weights are missing, for example model\.layers\.3"):
        load_causal_lm(model_dir)


def test_a_model_of_another_shape_is_refused(model_dir: Path) -> None:
    weights = load_file(model_dir / "model.safetensors")
    save_file({name: each[..., :-1].contiguous() for name, each in weights.items()}, model_dir / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(UserError, match=r"model: \d+ of the model's weights have another shape than in config.json"):
        load_causal_lm(model_dir)


def test_a_tokenizer_loads(prepared: Path) -> None:
    """The directory of the other tests, unchanged."""
    assert load_tokenizer(prepared / "base").get_vocab() == AutoTokenizer.from_pretrained(prepared / "base").get_vocab()
