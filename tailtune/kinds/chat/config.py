"""Settings and metrics of the chat kind. Imports no torch."""

from typing import Annotated

from pydantic import Field

from tailtune.config import Config
from tailtune.metrics import Floor, Metric, MetricTable


class Prompt(Config):
    system: Annotated[str, Field(min_length=1)]
    """The one system prompt of training, evaluation, `ask` and serving."""
    user: str
    """Template of the question over the Parquet file's columns."""
    assistant: str
    """Template of the answer, likewise."""


class Generation(Config):
    """Greedy decoding, the same for evaluation, demo and `ask`, so that answers can be compared."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    repetition_penalty: Annotated[float, Field(ge=1)] = 1.0


class Evaluation(Config):
    batch_size: Annotated[int, Field(ge=1)] = 8
    num_generated_answers: Annotated[int, Field(ge=0)] = 64
    """Validation rows whose answer is generated for ROUGE-L and chrF; 0 leaves both out."""


class Demo(Config):
    questions: Annotated[list[str], Field(min_length=1)]


ANSWER_LOSS = Metric(
    "answer_loss", "Answer loss", "nats per token", "lower",
    "teacher-forced cross-entropy per answer token, the end mark included",
)  # fmt: skip
PERPLEXITY = Metric("perplexity", "Perplexity", "", "lower", "exponential of the answer loss")
BITS_PER_BYTE = Metric(
    "bits_per_byte", "Bits per byte", "", "lower",
    "answer loss per UTF-8 byte of the answers, which is comparable between tokenizers",
)  # fmt: skip
TOKEN_ACCURACY = Metric(
    "token_accuracy", "Token accuracy", "next token right", "higher",
    "share of answer tokens that get the highest logit, teacher-forced", is_share=True,
)  # fmt: skip
ROUGE_L = Metric(
    "rouge_l", "ROUGE-L", "0 to 1", "higher",
    "mean F-measure of generated answers against the references (Lin 2004)", of_generated=True,
)  # fmt: skip
CHRF = Metric(
    "chrf", "chrF", "0 to 100", "higher",
    "corpus score of generated answers against the references (Popović 2015)", of_generated=True,
)  # fmt: skip
TOKENS_PER_SECOND = Metric(
    "tokens_per_second", "Generation speed", "tokens/s, depends on the answers' length", "neither",
    "generated tokens, padding not counted, by seconds of generation", of_generated=True,
    long_label="Generated tokens per second",
)  # fmt: skip

METRICS = MetricTable(
    metrics=(ANSWER_LOSS, PERPLEXITY, BITS_PER_BYTE, TOKEN_ACCURACY, ROUGE_L, CHRF, TOKENS_PER_SECOND),
    headline=ANSWER_LOSS,
    trainer_loss=ANSWER_LOSS,
    highlights=(PERPLEXITY, TOKEN_ACCURACY),
    floor=Floor(
        name="unigram",
        label="word-frequency floor",
        bar_label="Word frequencies",
        explanation="The word-frequency floor is the loss of a model that knows only how often each token occurs in "
        "the training answers. A model that does not beat it has learned nothing about the order of words.",
    ),
)
"""What the evaluation of a `chat` stage measures."""
