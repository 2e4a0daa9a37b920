"""Scores of one chat model on the validation rows: teacher-forced loss and generated answers."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import CHRF

from tailtune.kinds.chat.config import Prompt
from tailtune.kinds.chat.inference import ChatModel, answer, load_chat_model
from tailtune.kinds.chat.prompt import encode_row, row_answer, row_question
from tailtune.recipe.schema import Recipe

NUM_EXAMPLES = 5  # generated answers that are kept beside the scores


def evaluate_model(recipe: Recipe, directory: Path, train: pa.Table, validation: pa.Table) -> dict[str, Any]:
    """Metrics of one model: answer loss (nats per token), perplexity, bits per byte, token accuracy,
    ROUGE-L (0–1), chrF (0–100), generated tokens per second; the unigram floor of its tokenizer."""
    chat = load_chat_model(directory)
    rows = validation.to_pylist()
    metrics = score_answers(chat, recipe.prompt, rows, recipe.evaluation.batch_size)
    generated = rows[: recipe.evaluation.num_generated_answers]
    examples: list[dict[str, str]] = []
    if generated:
        questions = [row_question(recipe.prompt, row) for row in generated]
        references = [row_answer(recipe.prompt, row) for row in generated]
        answers = answer(chat, recipe.prompt, questions, recipe.generation, recipe.evaluation.batch_size)
        metrics |= score_texts(answers.texts, references)
        metrics["tokens_per_second"] = answers.num_tokens / answers.seconds
        examples = [{"question": q, "reference": r, "answer": a}
                    for q, r, a in zip(questions, references, answers.texts, strict=True)][:NUM_EXAMPLES]  # fmt: skip
    floor = unigram_loss(chat, recipe.prompt, train.to_pylist(), rows)
    return {
        "metrics": metrics,
        "unigram_answer_loss": floor,
        "examples": examples,
        "num_generated": len(generated),
    }


@torch.inference_mode()
def score_answers(chat: ChatModel, prompt: Prompt, rows: list[dict[str, Any]], batch_size: int) -> dict[str, float]:
    """Teacher-forced scores of the rows' answers.

    Rows are padded on the left, so that the answers end together and the head runs on the last
    positions only; logits are made fp32 before the loss.
    """
    tokenizer, model = chat.tokenizer, chat.model
    encoded = sorted((encode_row(tokenizer, prompt, row) for row in rows), key=lambda qa: len(qa[0]) + len(qa[1]))
    loss = correct = count = 0.0
    for first in range(0, len(encoded), batch_size):
        batch = encoded[first : first + batch_size]
        inputs = tokenizer.pad({"input_ids": [q + a for q, a in batch]}, return_tensors="pt").to(model.device)
        width = max(len(a) for _, a in batch)
        labels = torch.full((len(batch), width), -100)
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
    chat: ChatModel, prompt: Prompt, train: list[dict[str, Any]], validation: list[dict[str, Any]]
) -> float:
    """Nats per validation answer token under the training answers' token frequencies (add-one smoothed)."""
    counts = Counter(t for row in train for t in encode_row(chat.tokenizer, prompt, row)[1])
    total = sum(counts.values()) + len(chat.tokenizer)
    tokens = [t for row in validation for t in encode_row(chat.tokenizer, prompt, row)[1]]
    return -sum(math.log((counts[t] + 1) / total) for t in tokens) / len(tokens)
