"""Settings of the chat kind. No torch."""

from typing import Annotated

from pydantic import Field

from tailtune.config import Config


class Prompt(Config):
    system: Annotated[str, Field(min_length=1)]
    """Read by training, evaluation, `ask` and serving: one text."""
    user: str
    assistant: str


class Generation(Config):
    """Greedy decoding, the same for evaluation, demo and `ask`, so that answers can be compared."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    repetition_penalty: Annotated[float, Field(ge=1)] = 1.0


class Evaluation(Config):
    batch_size: Annotated[int, Field(ge=1)] = 8
    num_generated_answers: Annotated[int, Field(ge=0)] = 64
    """Validation rows whose answer is generated for ROUGE-L and chrF; 0 leaves both out."""


MODEL_METRICS = ("answer_loss", "perplexity", "bits_per_byte", "token_accuracy", "rouge_l", "chrf", "tokens_per_second")
METRICS = (
    *(f"{side}_{metric}" for side in ("base", "tuned") for metric in MODEL_METRICS),
    *("unigram_answer_loss", "answer_loss_vs_base", "answer_loss_vs_unigram"),
)
"""What the evaluation of an `sft` stage measures (`tailtune.evaluate`)."""


class Demo(Config):
    questions: Annotated[list[str], Field(min_length=1)]
