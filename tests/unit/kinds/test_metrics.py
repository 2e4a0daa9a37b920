"""Every kind declares its metrics once, without torch, and its evaluation measures exactly these."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_recipe

from tailtune import kinds
from tailtune.kinds import kind_module, metric_table

KINDS = [path.parent.name for path in Path(kinds.__file__).parent.glob("*/config.py")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_metric_has_its_own_name_and_label(kind: str) -> None:
    table = metric_table(kind)
    assert len({metric.name for metric in table.metrics}) == len(table.metrics)
    assert len({*table.labels.values()}) == len(table.labels)
    assert all(metric.label and metric.measurement for metric in table.metrics)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_needs_no_torch(kind: str) -> None:
    code = f"import sys; from tailtune.kinds import metric_table; metric_table({kind!r}); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_every_function_that_the_steps_call(kind: str) -> None:
    assert callable(kind_module(kind, "evaluate").evaluate_model)
    assert callable(kind_module(kind, "sections").write_demo)
    if metric_table(kind).floor:
        assert callable(kind_module(kind, "evaluate").measure_floor)


def test_the_labels_of_chat() -> None:
    labels = metric_table("chat").labels
    assert labels["tuned_token_accuracy"] == "Token accuracy, tuned"
    assert labels["unigram_answer_loss"] == "Answer loss, word-frequency floor"
    assert labels["answer_loss_vs_unigram"] == "Answer loss, tuned ÷ word-frequency floor"
    assert labels["answer_loss_vs_base"] == "Answer loss, tuned ÷ base"


def test_the_recipe_refuses_a_metric_that_the_kind_does_not_measure() -> None:
    known = ", ".join(metric_table("chat").labels)
    with pytest.raises(ValueError, match=f"metric 'xyz' is not measured; measured: {known}"):
        tiny_recipe(**{"gate.0.metric": "xyz"})


@pytest.mark.parametrize(
    "file", ["recipe/schema.py", "evaluate.py", "gate.py", "report/page.py", "report/report.html.j2"]
)
def test_no_metric_is_named_outside_its_kind(file: str) -> None:
    text = (Path(kinds.__file__).parents[1] / file).read_text(encoding="utf-8")
    for kind in KINDS:
        table = metric_table(kind)
        names = {*table.labels, table.headline.name, *(metric.label for metric in table.metrics)}
        assert [name for name in names if name in text] == []


@pytest.mark.parametrize("file", [*Path(kinds.__file__).parent.rglob("*.py")], ids=lambda path: path.name)
def test_a_kind_does_not_import_the_recipe(file: Path) -> None:
    assert not re.search(r"^ *(from|import) tailtune\.recipe", file.read_text(encoding="utf-8"), re.MULTILINE)
