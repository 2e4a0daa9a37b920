"""Build a small model of the recipe's own architecture, for runs without a downloaded one.

The tokenizer is trained on the training rows. The weights start at random and are pretrained briefly on
the same rows as plain text (no chat format, no system prompt), so that "before" in the report is a
model that knows words, not noise. Validation rows are never used.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tailtune.errors import UserError
from tailtune.kinds.chat.prompt import freeze_chat_template, row_messages
from tailtune.log import log
from tailtune.manifest import publish
from tailtune.progress import Progress
from tailtune.recipe.schema import Recipe, SmallModel

SEQUENCE_LENGTH = 128
BATCH_SIZE = 8
WARMUP_STEPS = 20
MAX_TOKENIZER_ROWS = 200_000  # more do not improve BPE, and counting their words takes minutes
NOTE = (
    "A small model of the recipe's architecture, built on this machine: tokenizer trained on the training "
    "rows, random weights pretrained for {steps} steps on the same rows as plain text. Its answers show the "
    "mechanism, not what the full-size model can do."
)


def build_small_model(
    recipe: Recipe, small: SmallModel, train: pa.Table, key: Mapping[str, Any], directory: Path
) -> None:
    """Build and pretrain a small model and publish it in `directory` under `key`. Raises UserError.

    `train` contains the training rows only, with the columns of `data.columns`.
    """
    facts: dict[str, object] = {"kind": "small", "note": NOTE.format(steps=small.pretrain_steps)}
    with publish(directory, key, facts) as partial_dir:
        rows = train.to_pylist()
        texts = ["\n".join(message["content"] for message in row_messages(recipe.prompt, row)
                           if message["role"] != "system") for row in rows]  # fmt: skip
        random.Random(recipe.seed).shuffle(texts)
        tokenizer = train_tokenizer(small, [recipe.prompt.system or "", *texts[:MAX_TOKENIZER_ROWS]])
        model = _new_model(small, tokenizer, recipe.seed)
        _pretrain(model, tokenizer, texts, small)
        model.save_pretrained(partial_dir)
        tokenizer.save_pretrained(partial_dir)
    log.info("model: built %s with %s parameters", small.model_type, f"{model.num_parameters():,}")


def train_tokenizer(small: SmallModel, texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with ChatML's markers on the texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=small.vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with Progress("model: training the tokenizer"):
        bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    freeze_chat_template(tokenizer)
    return tokenizer


def _new_model(small: SmallModel, tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    if small.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"model.small.model_type '{small.model_type}' is not a causal-LM architecture in Transformers",
            "use for example smollm3, llama or gpt_neox",
        )
    config = AutoConfig.for_model(
        small.model_type,
        vocab_size=len(tokenizer),
        hidden_size=small.hidden_size,
        intermediate_size=small.intermediate_size,
        num_hidden_layers=small.num_layers,
        num_attention_heads=small.num_heads,
        num_key_value_heads=small.num_key_value_heads,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _pretrain(model: Any, tokenizer: PreTrainedTokenizerFast, texts: list[str], small: SmallModel) -> None:
    """Train on the texts, joined by the end-of-text token and cut into sequences, with a cosine schedule."""
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    with Progress("model: tokenizing the rows"):
        stream = [token for ids in tokenizer(texts)["input_ids"] for token in [*ids, end]]
    batch_tokens = BATCH_SIZE * SEQUENCE_LENGTH
    while len(stream) < batch_tokens:  # few rows are repeated
        stream += stream
    tokens = torch.tensor(stream)
    optimizer = torch.optim.AdamW(model.parameters(), lr=small.pretrain_learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=WARMUP_STEPS),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, small.pretrain_steps - WARMUP_STEPS)),
        ],
        milestones=[WARMUP_STEPS],
    )
    model.train()
    with Progress("model: pretraining step", small.pretrain_steps, "steps") as progress:
        for step in range(small.pretrain_steps):
            start = (step * batch_tokens) % (len(tokens) - batch_tokens + 1)
            batch = tokens[start : start + batch_tokens].view(BATCH_SIZE, SEQUENCE_LENGTH)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.note = f"loss {loss.item():.3f}"
            progress.update()
