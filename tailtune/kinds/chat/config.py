"""Settings and metrics of the chat kind. Imports no torch."""

from typing import Annotated

from pydantic import Field, model_validator

from tailtune.config import Config
from tailtune.metrics import Floor, Metric, MetricTable


class Prompt(Config):
    """How a row becomes a conversation: `user` and `assistant`, or `messages`."""

    system: Annotated[str, Field(min_length=1)] | None = None
    """The one system prompt of training, evaluation, `ask` and serving. With `messages`, the default of the rows that
    have no system message of their own."""
    user: str | None = None
    """Template of the question over the Parquet file's columns."""
    assistant: str | None = None
    """Template of the answer, likewise."""
    messages: str | None = None
    """Column of the Parquet file that holds whole conversations."""

    @model_validator(mode="after")
    def _one_form(self) -> "Prompt":
        given = [name for name in ("user", "assistant") if getattr(self, name) is not None]
        if self.messages is not None and given:
            raise ValueError(f"messages and {given[0]} are both given; keep messages, or user and assistant")
        missing = [name for name in ("system", "user", "assistant") if getattr(self, name) is None]
        if self.messages is None and missing:
            instead = "" if missing[0] == "system" else ", or give messages, a column of conversations"
            raise ValueError(f"{missing[0]} is missing; add it{instead}")
        return self


class Generation(Config):
    """Greedy decoding, the same for evaluation, demo and `ask`, so that answers can be compared."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    repetition_penalty: Annotated[float, Field(ge=1)] = 1.0


class Evaluation(Config):
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Rows of a batch, at most: batches of long rows are smaller."""
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
ANSWER_WORDS = Metric(
    "answer_words", "Answer length", "words", "neither",
    "median number of words, by white space", of_generated=True, of_texts=True, compared_with=("base", "reference"),
    long_label="Words per answer",
)  # fmt: skip
ANSWERS_WITH_STEPS = Metric(
    "answers_with_steps", "Answers with numbered steps", "", "neither",
    "share of answers with a list that counts 1, 2", is_share=True, of_generated=True, of_texts=True,
)  # fmt: skip
ANSWERS_WITH_WARNINGS = Metric(
    "answers_with_warnings", "Answers with a warning", "", "neither",
    "share of answers with an English word that warns, forbids or sends for help; an upper bound", is_share=True,
    of_generated=True, of_texts=True,
)  # fmt: skip
TOKENS_PER_SECOND = Metric(
    "tokens_per_second", "Generation speed", "tokens/s, depends on the answers' length", "neither",
    "generated tokens, padding not counted, by seconds of generation", of_generated=True,
    long_label="Generated tokens per second",
)  # fmt: skip

METRICS = MetricTable(
    metrics=(
        *(ANSWER_LOSS, PERPLEXITY, BITS_PER_BYTE, TOKEN_ACCURACY, ROUGE_L, CHRF),
        *(ANSWER_WORDS, ANSWERS_WITH_STEPS, ANSWERS_WITH_WARNINGS, TOKENS_PER_SECOND),
    ),
    headline=ANSWER_LOSS,
    trainer_loss=ANSWER_LOSS,
    highlights=(TOKEN_ACCURACY, ANSWER_WORDS),
    floor=Floor(
        name="unigram",
        label="word-frequency floor",
        bar_label="Word frequencies",
        explanation="The word-frequency floor is the loss of a model that knows only how often each token occurs in "
        "the training answers. A model that does not beat it has learned nothing about the order of words.",
    ),
)
"""What the evaluation of a `chat` stage measures."""
