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
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

from tailtune.errors import UserError
from tailtune.kinds.chat.config import Generation, Prompt
from tailtune.kinds.chat.prompt import (
    Message,
    encode_messages,
    encode_question,
    freeze_chat_template,
    question_messages,
)
from tailtune.progress import Progress
from tailtune.train.weights import OWN_FILES_ONLY, explain_unreadable, load_causal_lm, refuse_unknown_tokens


@dataclass(frozen=True)
class ChatModel:
    """A loaded model with its tokenizer, in evaluation mode."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def name(self) -> str:
        """Name of the model's directory."""
        return Path(self.model.name_or_path).name


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer with the frozen chat template. Raises UserError when there is none."""
    with explain_unreadable(directory):
        tokenizer = AutoTokenizer.from_pretrained(directory, **OWN_FILES_ONLY)
        freeze_chat_template(tokenizer)
    return tokenizer


def check_model(directory: Path, prompt: Prompt) -> None:
    """Raise UserError for a base model that cannot be trained on conversations; its weights are not read.

    Its files are complete, its tokenizer works, and its chat template renders a conversation.
    """
    tokenizer = load_tokenizer(directory)
    model = load_causal_lm(directory, device_map="meta")
    sample = [*question_messages(prompt, "How are you?"), {"role": "assistant", "content": "I am well."}]
    with explain_unreadable(directory):
        ids = encode_messages(tokenizer, sample).ids
    refuse_unknown_tokens(model, [*ids, tokenizer.pad_token_id])


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
def answer(
    chat: ChatModel,
    questions: list[list[Message]],
    generation: Generation,
    batch_size: int,
    step: str = "evaluate",
    max_length: int | None = None,
) -> Answers:
    """Generate greedy answers in batches with left padding. A question is all messages before the answer.

    `step` is the pipeline's step that asks. Of a longer question, the last `max_length` tokens are asked: at its end is
    the beginning of the answer.
    """
    tokenizer = chat.tokenizer
    texts: list[str] = []
    num_tokens = 0
    start = time.perf_counter()
    with Progress(f"{step}: {chat.name}, answer", len(questions), "answers") as progress:
        for first in range(0, len(questions), batch_size):
            batch = [
                encode_question(tokenizer, messages)[-(max_length or 0) :]
                for messages in questions[first : first + batch_size]
            ]
            inputs = tokenizer.pad({"input_ids": batch}, return_tensors="pt").to(chat.model.device)
            counter = _AnswerCounter(progress, len(batch) / generation.max_new_tokens)
            output = chat.model.generate(**inputs, **generation_arguments(generation), streamer=counter)
            new = output[:, inputs["input_ids"].shape[1] :]
            num_tokens += int((new != tokenizer.pad_token_id).sum())
            texts += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
            progress.done = len(texts)
    return Answers(texts, num_tokens, time.perf_counter() - start)


class _AnswerCounter(BaseStreamer):
    """Counts the parts of answers that a batch's tokens are, as if each answer had all tokens that it may have."""

    def __init__(self, progress: Progress, answers_per_token: float) -> None:
        self.progress, self.answers_per_token = progress, answers_per_token

    def put(self, value: torch.Tensor) -> None:
        if value.ndim == 1:  # not the prompts, which come first
            self.progress.update(self.answers_per_token)

    def end(self) -> None:
        """The batch has ended, and `answer` counts its answers."""


@torch.inference_mode()
def stream_answer(
    chat: ChatModel, prompt: Prompt, question: str, generation: Generation, max_length: int | None = None
) -> None:
    """Print one answer to stdout, word by word. Raises UserError for a question of more than `max_length` tokens.

    By default, that is what the model has positions for.
    """
    limit = max_length or getattr(chat.model.config, "max_position_embeddings", None)
    asked = encode_question(chat.tokenizer, question_messages(prompt, question))
    if limit and len(asked) > limit:
        raise UserError(
            f"the question with its system prompt has {len(asked):,} tokens, and the model was trained on {limit:,}",
            "shorten the question",
        )
    ids = torch.tensor([asked], device=chat.model.device)
    streamer = TextStreamer(chat.tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = chat.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        streamer=streamer,
        **generation_arguments(generation),
    )
    if not chat.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip():
        print("(empty answer)")


def generation_arguments(generation: Generation) -> dict[str, object]:
    """Arguments of `model.generate`."""
    return {
        "max_new_tokens": generation.max_new_tokens,
        "repetition_penalty": generation.repetition_penalty,
        "do_sample": False,
        "num_beams": 1,
    }
