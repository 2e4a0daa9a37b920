"""Load a chat model and ask it, with the same prompt and generation settings in evaluation, demo and `tailtune ask`."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.utils.logging import disable_progress_bar

from tailtune.kinds.chat.config import Generation, Prompt
from tailtune.kinds.chat.prompt import encode_question, freeze_chat_template
from tailtune.train.weights import explain_unreadable, load_causal_lm


@dataclass(frozen=True)
class ChatModel:
    """A loaded model with its tokenizer, in evaluation mode."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer with the frozen chat template. Raises UserError when there is none."""
    with explain_unreadable(directory):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    freeze_chat_template(tokenizer)
    return tokenizer


def load_chat_model(directory: Path) -> ChatModel:
    """Load a model for inference: on the GPU where there is one, in its saved precision. Raises UserError."""
    disable_progress_bar()  # a bar per shard would appear above every answer
    tokenizer = load_tokenizer(directory)
    tokenizer.padding_side = "left"
    model = load_causal_lm(directory, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends]) - {None}  # some models end a turn with another token
    model.generation_config.eos_token_id = sorted({*ends, tokenizer.eos_token_id})
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return ChatModel(model, tokenizer)


@dataclass(frozen=True)
class Answers:
    """Generated answers, in the order of their questions."""

    texts: list[str]
    num_tokens: int
    """Generated tokens, padding not counted."""
    seconds: float


@torch.inference_mode()
def answer(chat: ChatModel, prompt: Prompt, questions: list[str], generation: Generation, batch_size: int) -> Answers:
    """Generate greedy answers to questions, in batches with left padding."""
    tokenizer = chat.tokenizer
    texts: list[str] = []
    num_tokens = 0
    start = time.perf_counter()
    for first in range(0, len(questions), batch_size):
        batch = [encode_question(tokenizer, prompt, q) for q in questions[first : first + batch_size]]
        inputs = tokenizer.pad({"input_ids": batch}, return_tensors="pt").to(chat.model.device)
        output = chat.model.generate(**inputs, **generation_arguments(generation))
        new = output[:, inputs["input_ids"].shape[1] :]
        num_tokens += int((new != tokenizer.pad_token_id).sum())
        texts += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return Answers(texts, num_tokens, time.perf_counter() - start)


@torch.inference_mode()
def stream_answer(chat: ChatModel, prompt: Prompt, question: str, generation: Generation) -> None:
    """Print one answer to stdout, word by word."""
    ids = torch.tensor([encode_question(chat.tokenizer, prompt, question)], device=chat.model.device)
    streamer = TextStreamer(chat.tokenizer, skip_prompt=True, skip_special_tokens=True)
    chat.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        streamer=streamer,
        **generation_arguments(generation),
    )


def generation_arguments(generation: Generation) -> dict[str, object]:
    """Arguments of `model.generate`."""
    return {
        "max_new_tokens": generation.max_new_tokens,
        "repetition_penalty": generation.repetition_penalty,
        "do_sample": False,
        "num_beams": 1,
    }
