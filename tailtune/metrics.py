"""The metrics that a kind of training declares, once.

The recipe check, the evaluation and the report read a kind's `MetricTable`; none of them knows a metric by its name.
The gate needs no table: it compares the numbers that it finds.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

SIDES = ("base", "tuned")
REFERENCE = "reference"
"""The side of the validation rows' own answers, in the names of metrics that describe texts."""
FEW_ROWS = 30
"""With fewer validation rows, differences may be due to chance; the log and the report say so."""


@dataclass(frozen=True)
class Metric:
    """A number that is measured for the base model and for the tuned one."""

    name: str
    """`answer_loss`; evaluation.json has it as `base_answer_loss` and `tuned_answer_loss`."""
    label: str
    unit: str
    """Unit or range, as the report shows it; empty for a plain number."""
    better: Literal["lower", "higher", "neither"]
    measurement: str
    """How it is measured, with its source."""
    is_share: bool = False
    """A number from 0 to 1 that is shown in percent."""
    of_generated: bool = False
    """Measured on the `num_generated` rows for which text is generated, so it may be absent."""
    of_texts: bool = False
    """Describes texts, whoever wrote them: also measured on the references and on all rows of the data."""
    compared_with: tuple[str, ...] = ()
    """Sides that the tuned model's value is divided by; `base` gives `answer_words_vs_base`."""
    long_label: str = ""
    """Label that says the unit as well, for a place without a column of units."""

    def describe(self, value: float, comparison: str = "") -> str:
        """The value in a log line: `words per answer 23`, `answers with a warning >= 20 %`."""
        label = self.long_label or self.label
        number = f"{100 * value:.3g} %" if self.is_share else f"{value:g}"
        return " ".join(filter(None, (label[0].lower() + label[1:], comparison, number)))


@dataclass(frozen=True)
class Floor:
    """The headline's value for a model that has learned nothing of interest."""

    name: str
    """`unigram`; evaluation.json has the value as `unigram_answer_loss`."""
    label: str
    bar_label: str
    """Label of its bar, next to the bars Base and Tuned."""
    explanation: str


@dataclass(frozen=True)
class MetricTable:
    """All metrics of one kind, in the order in which they are shown."""

    metrics: tuple[Metric, ...]
    headline: Metric
    """The metric that the report opens with and that the gate's ratios compare."""
    floor: Floor | None = None
    trainer_loss: Metric | None = None
    """The metric that equals the trainer's loss; its base value is the reference line of the loss chart."""
    highlights: tuple[Metric, ...] = ()
    """Metrics that are shown next to the headline."""

    def __post_init__(self) -> None:
        assert {self.headline, self.trainer_loss or self.headline, *self.highlights} <= {*self.metrics}

    def headline_of(self, side: str) -> str:
        """Name of the headline's value for `base`, for `tuned`, or for the floor's name."""
        return f"{side}_{self.headline.name}"

    @cached_property
    def of_texts(self) -> tuple[Metric, ...]:
        """The metrics that describe texts. A recipe's `expect` names them without a side."""
        return tuple(metric for metric in self.metrics if metric.of_texts)

    @cached_property
    def ratios(self) -> tuple[tuple[Metric, str], ...]:
        """Each metric of which a ratio is measured, and the side that the tuned model's value is divided by."""
        floor = [(self.headline, self.floor.name)] if self.floor else []
        others = ((metric, side) for metric in self.metrics for side in metric.compared_with)
        return (*floor, (self.headline, "base"), *others)

    @cached_property
    def labels(self) -> dict[str, str]:
        """Every name that evaluation.json may hold → its label: `tuned_token_accuracy` → Token accuracy, tuned.

        First each metric of each model, then those of the references, the floor, and the ratios.
        """
        labels = {f"{side}_{metric.name}": f"{metric.label}, {side}" for side in SIDES for metric in self.metrics}
        labels |= {f"{REFERENCE}_{metric.name}": f"{metric.label}, {REFERENCE}" for metric in self.of_texts}
        if self.floor:
            labels[self.headline_of(self.floor.name)] = f"{self.headline.label}, {self.floor.label}"
        for metric, side in self.ratios:
            divisor = self.floor.label if self.floor and side == self.floor.name else side
            labels[f"{metric.name}_vs_{side}"] = f"{metric.label}, tuned ÷ {divisor}"
        return labels


@dataclass(frozen=True)
class ModelScores:
    """What a kind's `evaluate_model` returns."""

    metrics: dict[str, float]
    """Metric's name, without the model's → value."""
    examples: list[dict[str, str]]
    """What a few rows ask for, and this model's `answer`. All other entries are the same for every model."""
    num_generated: int
    """Rows for which text was generated."""
    references: dict[str, float]
    """The metrics that describe texts, of the references of these rows; the same for every model."""
    num_truncated: int = 0
    """Rows that were cut at the recipe's `max_length`, as in training."""
