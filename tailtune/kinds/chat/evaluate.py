"""Scores of one chat model on the validation rows: teacher-forced loss and generated answers.

Losses are per answer token, the end mark included, over identical prompts; in a conversation, all turns of the
assistant are answers. Only the last one is generated, from the messages before it. The floor is a unigram model of the
training answers: a model that does not beat it has learned no more than word frequencies.
"""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import CHRF
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tailtune.config import WHOLE_ROWS, Truncation
from tailtune.kinds.chat.config import Evaluation, Generation, Prompt
from tailtune.kinds.chat.inference import ChatModel, answer, load_chat_model, load_tokenizer
from tailtune.kinds.chat.prompt import Encoded, encode_row, row_messages, show_question
from tailtune.kinds.chat.style import measure_texts
from tailtune.metrics import ModelScores
from tailtune.progress import track
from tailtune.train.tail.tokenized_rows import IGNORED

NUM_EXAMPLES = 5
"""Generated answers that are kept next to the scores."""
MAX_BATCH_TOKENS = 16_384
"""Tokens of a batch, padding included; a row that has more is a batch of its own."""
LOGIT_BYTES = 256 << 20
"""Memory for the logits that are computed at once, in fp32."""


def evaluate_model(
    directory: Path,
    validation: pa.Table,
    prompt: Prompt,
    generation: Generation,
    evaluation: Evaluation,
    truncation: Truncation = WHOLE_ROWS,
) -> ModelScores:
    """Score one model. Metrics of generated answers are absent where none are generated.

    Rows are cut as in training: attention takes memory that grows with the square of a row's length.
    """
    chat = load_chat_model(directory)
    rows = validation.to_pylist()
    metrics, num_truncated = score_answers(chat, prompt, rows, evaluation.batch_size, truncation)
    generated = rows[: evaluation.num_generated_answers]
    examples: list[dict[str, str]] = []
    described: dict[str, float] = {}
    if generated:
        conversations = [row_messages(prompt, row) for row in generated]
        references = [messages[-1]["content"] for messages in conversations]
        asked = [messages[:-1] for messages in conversations]
        limit = truncation.max_length
        answers = answer(chat, asked, generation, evaluation.batch_size, max_length=limit)
        references = [_beginning(chat.tokenizer, reference, limit) for reference in references]
        metrics |= score_texts(answers.texts, references)
        metrics |= measure_texts([pa.array(answers.texts)])
        described = measure_texts([pa.array(references)])
        metrics["tokens_per_second"] = answers.num_tokens / answers.seconds
        questions = [show_question(messages[:-1]) for messages in conversations]
        texts = zip(questions, references, answers.texts, strict=True)
        examples = [{"question": q, "reference": r, "answer": a} for q, r, a in texts][:NUM_EXAMPLES]
    return ModelScores(metrics, examples, len(generated), described, num_truncated)


def _beginning(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int | None) -> str:
    """The first `max_length` tokens of a text, with which alone generated answers are compared."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return text if max_length is None or len(ids) <= max_length else str(tokenizer.decode(ids[:max_length]))


def measure_floor(
    directory: Path, train: pa.Table, validation: pa.Table, prompt: Prompt, truncation: Truncation
) -> float:
    """The unigram floor, in nats per answer token of the tokenizer in `directory`."""
    return unigram_loss(load_tokenizer(directory), prompt, train.to_pylist(), validation.to_pylist(), truncation)


@torch.inference_mode()
def score_answers(
    chat: ChatModel, prompt: Prompt, rows: list[dict[str, Any]], batch_size: int, truncation: Truncation = WHOLE_ROWS
) -> tuple[dict[str, float], int]:
    """Teacher-forced scores of the rows' answers, in batches of up to `batch_size` rows of similar length.

    Returns the number of rows that were cut, too. Rows are padded on the left. Logits are converted to fp32 before the
    loss.
    """
    tokenizer, model = chat.tokenizer, chat.model
    shown = track(rows, "evaluate: tokenizing row", "rows")
    whole = [encode_row(tokenizer, prompt, row) for row in shown]
    kept = [row.cut(truncation) for row in whole]
    encoded = sorted(kept, key=lambda row: len(row.ids))
    loss = correct = count = 0.0
    for batch in track(batches(encoded, batch_size), f"evaluate: {chat.name}, token", "tokens", size=_num_tokens):
        inputs = tokenizer.pad({"input_ids": [row.ids for row in batch]}, return_tensors="pt").to(model.device)
        length = inputs["input_ids"].shape[1]
        labels = torch.tensor([[IGNORED] * (length - len(row.labels)) + row.labels for row in batch]).to(model.device)
        following = labels.roll(-1, dims=1)  # [rows, length], what each position predicts
        following[:, -1] = IGNORED
        predicts = following != IGNORED
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        targets = following[predicts]  # [K]
        count += len(targets)
        for logits in predict(model, {**inputs, "position_ids": positions, "use_cache": False}, predicts):
            part, targets = targets[: len(logits)], targets[len(logits) :]
            loss += torch.nn.functional.cross_entropy(logits.float(), part, reduction="sum").item()
            correct += (logits.argmax(-1) == part).sum().item()
    num_truncated = num_bytes = 0
    for row, before, after in zip(rows, whole, kept, strict=True):
        texts = [message["content"] for message in row_messages(prompt, row) if message["role"] == "assistant"]
        if after is not before:
            num_truncated += 1
            texts = [tokenizer.decode(after.answer_ids, skip_special_tokens=True)]
        num_bytes += sum(len(text.encode()) for text in texts)
    scores = {
        "answer_loss": loss / count,
        "perplexity": math.exp(min(loss / count, 700)),
        "bits_per_byte": loss / math.log(2) / num_bytes if num_bytes else math.nan,
        "token_accuracy": correct / count,
    }
    return scores, num_truncated


def batches(rows: list[Encoded], batch_size: int) -> list[list[Encoded]]:
    """Rows, sorted by length, in batches of up to `batch_size` rows and MAX_BATCH_TOKENS."""
    result: list[list[Encoded]] = []
    for row in rows:
        num_rows = len(result[-1]) if result else batch_size
        if num_rows == batch_size or (num_rows + 1) * len(row.ids) > MAX_BATCH_TOKENS:
            result.append([])
        result[-1].append(row)
    return result


def predict(model: PreTrainedModel, inputs: dict[str, Any], predicts: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the logits [K, vocabulary] where the mask `predicts` [rows, length] is true, up to LOGIT_BYTES at once.

    The layers run once. The logits are those of the model's own forward, because some models bound or scale what the
    head returns: where the hidden states do not fit at once, it runs again on one token, and the next ones take the
    place of this token's on their way into the head.
    """
    head = model.get_output_embeddings()
    size = max(1, LOGIT_BYTES // (4 * len(head.weight)))
    parts: list[torch.Tensor] = []

    def replace(module: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        if not parts:
            parts.extend(reversed(arguments[0][predicts].split(size)))
        return (parts.pop()[None],)

    handle = head.register_forward_pre_hook(replace)
    try:
        (logits,) = model(**inputs).logits
        yield logits
        while parts:
            (logits,) = model(input_ids=inputs["input_ids"][:1, -1:], use_cache=False).logits
            yield logits
    finally:
        handle.remove()


def _num_tokens(batch: list[Encoded]) -> int:
    return sum(len(row.ids) for row in batch)


def score_texts(texts: list[str], references: list[str]) -> dict[str, float]:
    """ROUGE-L F-measure (mean, 0–1; Lin 2004) and corpus chrF (0–100; Popović 2015)."""
    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    rouge = [
        scorer.score(reference, text)["rougeL"].fmeasure for text, reference in zip(texts, references, strict=True)
    ]
    return {"rouge_l": sum(rouge) / len(rouge), "chrf": CHRF().corpus_score(texts, [references]).score}


def unigram_loss(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    train: list[dict[str, Any]],
    validation: list[dict[str, Any]],
    truncation: Truncation = WHOLE_ROWS,
) -> float:
    """Nats per validation answer token under the training answers' token frequencies (add-one smoothed)."""

    def answer_ids(row: dict[str, Any]) -> list[int]:
        return encode_row(tokenizer, prompt, row).cut(truncation).answer_ids

    rows = track(train, "evaluate: unigram floor, row", "rows")
    counts = Counter(token for row in rows for token in answer_ids(row))
    total = sum(counts.values()) + len(tokenizer)
    tokens = [token for row in validation for token in answer_ids(row)]
    return -sum(math.log((counts[token] + 1) / total) for token in tokens) / len(tokens)
