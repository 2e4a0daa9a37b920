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
from tailtune.kinds.chat.config import Prompt
from tailtune.kinds.chat.inference import check_model, load_tokenizer
from tailtune.train.weights import explain_unreadable, load_causal_lm


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


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda model_dir: (model_dir / name).write_text(text) and None


def change(name: str, **values: Any) -> Callable[[Path], None]:
    return lambda model_dir: change_json(model_dir / name, **values)


def cut_weights(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def without_tokenizer(model_dir: Path) -> None:
    for path in model_dir.glob("token*"):
        path.unlink()


def with_template(text: str) -> Callable[[Path], None]:
    """A model without ChatML markers, whose own template is kept."""

    def damage(model_dir: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            path = model_dir / name
            path.write_text(path.read_text().replace("<|im_", "<|my_"))
        (model_dir / "chat_template.jinja").write_text(text)

    return damage


def with_another_token(model_dir: Path) -> None:
    """ChatML's markers were added to the tokenizer, but not to the model."""
    with_template("")(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained(model_dir)


UNREADABLE = "no model can be loaded from "
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (without_tokenizer, UNREADABLE),
    "weights are cut": (cut_weights, UNREADABLE),
    "weights are empty": (write("model.safetensors", ""), UNREADABLE),
    "weights are HTML": (write("model.safetensors", "<html>" * 99), UNREADABLE),
    "config is a list": (write("config.json", "[]"), UNREADABLE),
    "config is no JSON": (write("config.json", "{"), UNREADABLE),
    "config without a type": (write("config.json", "{}"), UNREADABLE),
    "config is deep": (write("config.json", "[" * 100_000), UNREADABLE),
    "a text for a number": (change("config.json", hidden_size="wide"), UNREADABLE),
    "more layers than weights": (
        change("config.json", num_hidden_layers=9, layer_types=None, no_rope_layers=None), "weights are missing"),
    "not a language model": (
        write("config.json", '{"model_type": "vit", "architectures": ["ViTModel"]}'), UNREADABLE),
    "tokenizer is a list": (write("tokenizer.json", "[]"), UNREADABLE),
    "tokenizer without a model": (write("tokenizer.json", "{}"), UNREADABLE),
    "tokenizer of another version": (write("tokenizer.json", '{"version": "9"}'), UNREADABLE),
    "tokenizer_config is a list": (write("tokenizer_config.json", "[]"), UNREADABLE),
    "template does not end": (with_template("{% for m in messages %}"), "the chat template cannot render"),
    "template calls nothing": (with_template("{{ messages.nothing() }}"), "the chat template cannot render"),
    "template divides": (with_template("{{ 1 / 0 }}"), "the chat template cannot render"),
    "template refuses": (with_template("{{ raise_exception('no system role') }}"), "TemplateError: no system role"),
    "template leaves the sandbox": (with_template("{{ ''.__class__.__mro__ }}{{ x.y.z }}"), "cannot render"),
    "a token has no embedding": (with_another_token, "but the model has embeddings for"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_refused_before_training(model_dir: Path, damage: str) -> None:
    apply, problem = DAMAGES[damage]
    apply(model_dir)
    with pytest.raises(UserError) as raised:
        check_model(model_dir, Prompt(messages="messages", system="Be brief."))
    assert problem in raised.value.problem and raised.value.remedy
    assert "\n" not in str(raised.value)


def test_a_good_model_passes(prepared: Path) -> None:
    check_model(prepared / "base", Prompt(messages="messages"))


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(5, "Input/output error"),
     RuntimeError("DefaultCPUAllocator: can't allocate memory"), UserError("known", "already"),
     Exception("Error while reading: Input/output error (os error 5)")],
)  # fmt: skip
def test_a_fault_of_the_machine_is_not_the_models(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explain_unreadable(Path("model")):
        raise error
    assert raised.value is error
