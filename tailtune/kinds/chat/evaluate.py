"""Scores of one chat model on the validation rows: teacher-forced loss and generated answers.

Losses are per answer token, the end mark included, over identical prompts. The floor is a unigram model of the training
answers: a model that does not beat it has learned no more than word frequencies.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import CHRF
from transformers import PreTrainedTokenizerBase

from tailtune.kinds.chat.config import Evaluation, Generation, Prompt
from tailtune.kinds.chat.inference import ChatModel, answer, load_chat_model, load_tokenizer
from tailtune.kinds.chat.prompt import encode_row, row_answer, row_question
from tailtune.metrics import ModelScores

NUM_EXAMPLES = 5
"""Generated answers that are kept next to the scores."""


def evaluate_model(
    directory: Path, validation: pa.Table, prompt: Prompt, generation: Generation, evaluation: Evaluation
) -> ModelScores:
    """Score one model. Metrics of generated answers are absent where none are generated."""
    chat = load_chat_model(directory)
    rows = validation.to_pylist()
    metrics = score_answers(chat, prompt, rows, evaluation.batch_size)
    generated = rows[: evaluation.num_generated_answers]
    examples: list[dict[str, str]] = []
    if generated:
        questions = [row_question(prompt, row) for row in generated]
        references = [row_answer(prompt, row) for row in generated]
        answers = answer(chat, prompt, questions, generation, evaluation.batch_size)
        metrics |= score_texts(answers.texts, references)
        metrics["tokens_per_second"] = answers.num_tokens / answers.seconds
        texts = zip(questions, references, answers.texts, strict=True)
        examples = [{"question": q, "reference": r, "answer": a} for q, r, a in texts][:NUM_EXAMPLES]
    return ModelScores(metrics, examples, len(generated))


def measure_floor(directory: Path, train: pa.Table, validation: pa.Table, prompt: Prompt) -> float:
    """The unigram floor, in nats per answer token of the tokenizer in `directory`."""
    return unigram_loss(load_tokenizer(directory), prompt, train.to_pylist(), validation.to_pylist())


@torch.inference_mode()
def score_answers(chat: ChatModel, prompt: Prompt, rows: list[dict[str, Any]], batch_size: int) -> dict[str, float]:
    """Teacher-forced scores of the rows' answers, in batches of `batch_size` rows of similar length.

    Rows are padded on the left, so that the answers end together and the head runs only on the last positions. Logits
    are converted to fp32 before the loss.
    """
    tokenizer, model = chat.tokenizer, chat.model
    encoded = sorted((encode_row(tokenizer, prompt, row) for row in rows), key=lambda qa: len(qa[0]) + len(qa[1]))
    loss = correct = count = 0.0
    for first in range(0, len(encoded), batch_size):
        batch = encoded[first : first + batch_size]
        inputs = tokenizer.pad({"input_ids": [q + a for q, a in batch]}, return_tensors="pt").to(model.device)
        width = max(len(a) for _, a in batch)
        labels = torch.full((len(batch), width), -100)  # [rows, width], the answers at its end
        for i, (_, ids) in enumerate(batch):
            labels[i, width - len(ids) :] = torch.tensor(ids)
        labels = labels.to(model.device)
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = model(**inputs, position_ids=positions, logits_to_keep=width + 1, use_cache=False).logits
        logits = logits[:, :-1].float()
        loss += torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        correct += (logits.argmax(-1) == labels).sum().item()
        count += (labels != -100).sum().item()
    num_bytes = sum(len(row_answer(prompt, row).encode()) for row in rows)
    return {
        "answer_loss": loss / count,
        "perplexity": math.exp(min(loss / count, 700)),
        "bits_per_byte": loss / math.log(2) / num_bytes,
        "token_accuracy": correct / count,
    }


def score_texts(texts: list[str], references: list[str]) -> dict[str, float]:
    """ROUGE-L F-measure (mean, 0–1; Lin 2004) and corpus chrF (0–100; Popović 2015)."""
    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    rouge = [
        scorer.score(reference, text)["rougeL"].fmeasure for text, reference in zip(texts, references, strict=True)
    ]
    return {"rouge_l": sum(rouge) / len(rouge), "chrf": CHRF().corpus_score(texts, [references]).score}


def unigram_loss(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, train: list[dict[str, Any]], validation: list[dict[str, Any]]
) -> float:
    """Nats per validation answer token under the training answers' token frequencies (add-one smoothed)."""
    counts = Counter(token for row in train for token in encode_row(tokenizer, prompt, row)[1])
    total = sum(counts.values()) + len(tokenizer)
    tokens = [token for row in validation for token in encode_row(tokenizer, prompt, row)[1]]
    return -sum(math.log((counts[token] + 1) / total) for token in tokens) / len(tokens)
