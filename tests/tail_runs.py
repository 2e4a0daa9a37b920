"""Tiny models of every architecture, trained as a whole by TRL and by tail training, to be compared."""

import random
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer

from tailtune.recipe.schema import LastLayers, TailSettings
from tailtune.train.tail.savings import ALL_SAVINGS, Savings
from tailtune.train.tail.tokenized_rows import TokenizedRows
from tailtune.train.tail.trainer import TailLoop, attach
from tailtune.train.weights import select_trainable

VOCABULARY = 96
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "smollm3": {"tie_word_embeddings": True},
    "smollm3-sliding": {"use_sliding_window": True, "sliding_window": 8,
                        "layer_types": ["sliding_attention", "full_attention"] * 2},
    "llama": {"tie_word_embeddings": False},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 20.0,
                    "layer_types": ["full_attention", "sliding_attention"] * 2},
    "gpt_neox": {},
    "gpt_neox-serial": {"use_parallel_residual": False},
    "qwen3": {},
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")


def new_model(architecture: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A tiny model with weights large enough that attention and windows matter."""
    torch.manual_seed(0)
    settings = {**SMALL, **ARCHITECTURES.get(architecture, {}), **overrides}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture.partition("-")[0], **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    if dtype is torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(norm64, module)  # type: ignore[method-assign]
    return model.to(dtype)


def norm64(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """A model's RMSNorm without its conversion to fp32, whose rounding would hide the differences to be measured."""
    gemma = "Gemma" in type(norm).__name__
    eps = norm.eps if gemma else norm.variance_epsilon
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps) * (gemma + norm.weight)


def new_rows(
    num_rows: int, *, shared: float = 1.0, prefix_length: int = 20, seed: int = 0
) -> list[tuple[list[int], list[int]]]:
    """Question and answer ids; a share of the rows begins with the same prefix."""
    prefix = random.Random(7).sample(range(2, VOCABULARY), prefix_length)
    draw = random.Random(seed)

    def words(max_words: int) -> list[int]:
        return [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, max_words))]

    return [((prefix if draw.random() < shared else []) + words(8), words(6)) for _ in range(num_rows)]


def dataset(rows: list[tuple[list[int], list[int]]], loss: str = "answer") -> datasets.Dataset:
    if loss == "turns":  # a conversation: earlier answers of three tokens between questions of three
        labels = [[token if i // 3 % 2 else -100 for i, token in enumerate(q)] + a for q, a in rows]
    else:
        labels = [([-100] * len(q) if loss == "answer" else q) + a for q, a in rows]
    return datasets.Dataset.from_dict({"input_ids": [q + a for q, a in rows], "labels": labels})


def tail_rows(**kwargs: Any) -> TokenizedRows:
    """Twenty rows as the tail sees them."""
    data = dataset(new_rows(20, **kwargs))
    return TokenizedRows(data["input_ids"][:], data["labels"][:])


@dataclass(frozen=True)
class Case:
    architecture: str
    loss: str = "answer"
    shared: float = 1.0
    accumulation: int = 1
    dtype: str = "float32"
    num_layers: int = 2
    """Trainable layers."""
    arguments: tuple[tuple[str, Any], ...] = ()
    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    overrides: tuple[tuple[str, Any], ...] = ()
    """Settings of the model's configuration."""


@dataclass
class Result:
    trainer: Any
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


class Trainer64(SFTTrainer):
    """SFTTrainer with its loss in fp64. TRL and Transformers compute the loss in fp32 for every model."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        labels = inputs.pop("labels")
        logits = model(**inputs, use_cache=False).logits
        assert logits.dtype is torch.float64
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return loss / num_items_in_batch


class Record(TrainerCallback):
    """Records the losses of the optimizer steps in full precision (Trainer logs fp32), and the logged accuracies."""

    def __init__(self, result: Result) -> None:
        self.result, self.sum = result, 0.0

    def watch(self, trainer: Any) -> None:
        step = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = step(*args, **kwargs)
            self.sum += loss.item()
            return loss

        trainer.training_step = training_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.result.losses.append(self.sum)
        self.sum = 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "mean_token_accuracy" in logs:
            self.result.accuracies.append(logs["mean_token_accuracy"])


def prepare(
    case: Case, folder: Path, callbacks: list[Any], trainer_class: type[SFTTrainer] = SFTTrainer
) -> tuple[PreTrainedModel, SFTTrainer]:
    """Return the model with its last layers and head trainable, and TRL's trainer of the whole model."""
    dtype = getattr(torch, case.dtype)
    model = new_model(case.architecture, dtype, **dict(case.overrides))
    select_trainable(model, LastLayers(last_layers=case.num_layers))
    if dtype is torch.float64:
        model.double()
    arguments = {
        "max_steps": 50, "eval_strategy": "no", "save_strategy": "no", "learning_rate": 3e-4,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": case.accumulation,
        "gradient_checkpointing": False, "bf16": case.dtype == "bfloat16", "weight_decay": 0.1,
        "adam_epsilon": 1e-6, **dict(case.arguments),
    }  # fmt: skip
    config = SFTConfig(output_dir=str(folder), logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
                       include_num_input_tokens_seen="non_padding", **arguments)  # fmt: skip
    rows = [(list(q), list(a)) for q, a in case.rows] or new_rows(40, shared=case.shared)
    trainer_class = trainer_class if case.dtype != "float64" else Trainer64
    plain = trainer_class(model=model, args=config, train_dataset=dataset(rows, case.loss),
                       eval_dataset=dataset(new_rows(9, shared=case.shared, seed=1), case.loss),
                       processing_class=tokenizer(), callbacks=callbacks)  # fmt: skip
    return model, plain


def attach_tail(
    plain: SFTTrainer,
    folder: Path,
    callbacks: list[Any],
    dtype: str = "float32",
    base: str = "tiny",
    savings: Savings = ALL_SAVINGS,
    **settings: Any,
) -> Any:
    """Return the tail's trainer, or None."""
    return attach(plain, TailSettings(**settings), dtype=getattr(torch, dtype), cache_dir=folder / "cache",
                  base_model_sha256=base, callbacks=callbacks, trainer_class=TailLoop, savings=savings)  # fmt: skip


def train(case: Case, folder: Path, *, tail: bool, resume: str | None = None, **settings: Any) -> Result:
    """Train one case; `settings` are those of `attach_tail`."""
    result = Result(None)
    record = Record(result)
    callbacks = [record]
    model, plain = prepare(case, folder, callbacks)
    result.trainer = attach_tail(plain, folder, callbacks, case.dtype, **settings) if tail else plain
    assert result.trainer is not None
    result.trainer.remove_callback(PrinterCallback)
    record.watch(result.trainer)
    result.trainer.train(resume_from_checkpoint=resume)
    result.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


@cache
def train_whole(case: Case) -> Result:
    """Train the reference: TRL's SFTTrainer on the whole model."""
    with TemporaryDirectory() as folder:
        return train(case, Path(folder), tail=False)


def relative(a: list[float], b: list[float]) -> float:
    """Largest relative difference of two lists of losses."""
    assert len(a) == len(b) > 0
    return max(abs(x - y) / max(abs(x), 1e-12) for x, y in zip(a, b, strict=True))


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of two sets of weights."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)
