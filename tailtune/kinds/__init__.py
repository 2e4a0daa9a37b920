"""What is learned: one folder for each kind of training, found by the `kind` of a recipe's stage.

Nothing else imports a kind by its name, apart from the recipe's schema. Each folder has the same files:

- `config.py`: the kind's settings, and `METRICS`, its `MetricTable`. Imports no torch.
- `train.py`: `make_trainer` returns a ready Hugging Face Trainer.
- `evaluate.py`: `evaluate_model` scores one model; `measure_floor` is needed where `METRICS` has a floor.
- `inference.py`: `check_model` refuses a base model that cannot be trained, without reading its weights.
- `style.py`: `measure_data` describes the rows by the metrics of `METRICS` that are `of_texts`. Imports no torch.
- `sections.py`: `write_demo` asks both models the demo questions for the report; `loading_lines` load the model.

No file of a kind imports `tailtune.recipe`: functions take the settings that they need.
"""

import sys
from importlib import import_module
from typing import Any

from tailtune.imports import uncollected
from tailtune.metrics import MetricTable


def kind_module(kind: str, name: str) -> Any:
    """The module `name` of a kind: `kind_module("chat", "evaluate")`."""
    full_name = f"{__name__}.{kind}.{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    with uncollected():
        return import_module(full_name)


def metric_table(kind: str) -> MetricTable:
    """The metrics that a kind declares. Imports no torch."""
    table: MetricTable = kind_module(kind, "config").METRICS
    return table
