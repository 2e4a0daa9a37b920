"""The gate: every comparison at its threshold; whatever is not a finite number fails."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_recipe, write_rows

from tailtune.errors import UserError
from tailtune.gate import check_data, judge, judge_file, raise_verdict, verdict_lines, verdict_markdown
from tailtune.parquet.write import write_parquet
from tailtune.recipe.load import load_recipe
from tailtune.recipe.schema import GateRule, Recipe
from tailtune.training_key import recipe_settings


def rule(comparison: str = "<=", threshold: float = 1.0, metric: str = "loss") -> GateRule:
    return GateRule(metric=metric, comparison=comparison, threshold=threshold)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("comparison", "below", "equal", "above"),
    [("<", True, False, False), ("<=", True, True, False), (">", False, False, True), (">=", False, True, True)],
)
def test_comparisons(comparison: str, below: bool, equal: bool, above: bool) -> None:
    for value, expected in ((0.999, below), (1.0, equal), (1, equal), (1.001, above)):
        assert judge([rule(comparison)], {"loss": value})["passed"] is expected


HUGE = "a number of about 398 digits"


@pytest.mark.parametrize("comparison", ["<=", ">="])
@pytest.mark.parametrize(
    ("metrics", "reason", "value"),
    [
        pytest.param({}, "the metric is missing; measured: none", None, id="nothing measured"),
        pytest.param({"b": 1, "a": 2}, "the metric is missing; measured: a, b", None, id="another measured"),
        pytest.param({"loss": math.nan}, "the metric is nan", "nan", id="NaN"),
        pytest.param({"loss": math.inf}, "the metric is inf", "inf", id="inf"),
        pytest.param({"loss": -math.inf}, "the metric is -inf", "-inf", id="-inf"),
        pytest.param({"loss": True}, "the metric is bool True, not a number", "True", id="bool"),
        pytest.param({"loss": "1.0"}, "the metric is str '1.0', not a number", "'1.0'", id="str"),
        pytest.param({"loss": None}, "the metric is NoneType None, not a number", None, id="None"),
        pytest.param({"loss": [1.0]}, "the metric is list [1.0], not a number", "[1.0]", id="list"),
        pytest.param({"loss": 10**400}, f"the metric is {HUGE}", HUGE, id="beyond float"),
        pytest.param({"loss": "\ud800"}, r"the metric is str '\ud800', not a number", r"'\ud800'", id="no character"),
        pytest.param(
            {"loss": "x" * 10**6},
            f"the metric is str '{'x' * 37}…{'x' * 38}', not a number",
            f"'{'x' * 37}…{'x' * 38}'",
            id="long",
        ),
        pytest.param({"\ud800": 1}, r"the metric is missing; measured: \ud800", None, id="name of no character"),
    ],
)
def test_whatever_is_not_a_finite_number_fails(
    comparison: str, metrics: dict[str, Any], reason: str, value: Any
) -> None:
    verdict = judge([rule(comparison)], metrics)
    assert verdict["passed"] is False
    assert (verdict["rules"][0]["reason"], verdict["rules"][0]["value"]) == (reason, value)
    json.dumps(verdict, allow_nan=False)


def test_no_rules_fail() -> None:
    assert judge([], {"loss": 0.5}) == {"passed": False, "rules": []}


@pytest.mark.parametrize(("loss", "accuracy", "passed"), [(0.5, 0.5, True), (0.5, 0.1, False), (2, 0.5, False)])
def test_every_rule_must_pass(loss: float, accuracy: float, passed: bool) -> None:
    rules = [rule(), rule(">=", 0.3, "accuracy")]
    assert judge(rules, {"loss": loss, "accuracy": accuracy})["passed"] is passed


def test_a_failed_rule_gives_its_reason() -> None:
    result = judge([rule("<=", 0.95)], {"loss": 1.23456})["rules"][0]
    assert result["reason"] == "1.235 is not <= 0.95"
    assert result["value"] == 1.23456


# -- files -------------------------------------------------------------------------------------------

PASSING = {
    "answer_loss_vs_base": 0.5, "answer_loss_vs_unigram": 0.5, "tuned_token_accuracy": 0.5, "answer_words_vs_base": 0.9,
}  # fmt: skip


def judge_text(tmp_path: Path, text: str | None) -> dict[str, Any]:
    if text is not None:
        (tmp_path / "evaluation.json").write_text(text)
    return judge_file(tiny_recipe(), tmp_path / "evaluation.json", tmp_path / "verdict.json")


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        pytest.param(json.dumps({"metrics": PASSING}), True, id="good"),
        pytest.param(json.dumps({"metrics": PASSING | {"tuned_token_accuracy": math.nan}}), False, id="NaN"),
        pytest.param(json.dumps({"metrics": PASSING | {"tuned_token_accuracy": 10**1000}}), False, id="huge"),
    ],
)
def test_a_file_is_judged(tmp_path: Path, text: str | None, passed: bool) -> None:
    verdict = judge_text(tmp_path, text)
    assert verdict["passed"] is passed and len(verdict["rules"]) == 4
    assert json.loads((tmp_path / "verdict.json").read_text()) == verdict


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(json.dumps({"metrics": [1]}), 'contains no "metrics"', id="metrics are a list"),
        pytest.param(json.dumps([PASSING]), 'contains no "metrics"', id="a list"),
        pytest.param(json.dumps(PASSING), 'contains no "metrics"', id="metrics not below their key"),
        pytest.param('{"metrics": {"answer_lo', "is not JSON that can be judged: Unterminated string", id="cut off"),
        pytest.param('{"metrics": {"a": 2, "a": 1}}', "judged: duplicate key 'a'", id="a metric twice"),
        pytest.param("[" * 100_000, "judged: brackets within brackets in too many levels", id="brackets"),
        pytest.param("1" * 5000, "judged: a number of 5,000 digits", id="many digits"),
        pytest.param("", "is not JSON that can be judged: Expecting value", id="empty"),
        pytest.param(None, "is not a file", id="missing"),
    ],
)
def test_a_file_without_metrics_is_an_error_with_the_reason(tmp_path: Path, text: str | None, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        judge_text(tmp_path, text)
    assert not (tmp_path / "verdict.json").exists()


def test_a_second_verdict_replaces_the_first(tmp_path: Path) -> None:
    judge_text(tmp_path, json.dumps({"metrics": PASSING}))
    judge_text(tmp_path, json.dumps({"metrics": {}}))
    assert json.loads((tmp_path / "verdict.json").read_text())["passed"] is False


def test_the_error_names_the_failed_rules_and_the_report(tmp_path: Path) -> None:
    judge_text(tmp_path, json.dumps({"metrics": PASSING | {"answer_loss_vs_base": 2}}))
    with pytest.raises(UserError) as raised:
        raise_verdict(tmp_path / "verdict.json", "report.html")
    assert str(raised.value) == (
        "the model did not pass the gate (answer_loss_vs_base: 2 is not <= 0.95); see report.html"
    )


def test_the_verdict_on_a_terminal() -> None:
    rules = [rule("<=", 0.95), rule(">=", 0.3, "accuracy")]
    assert verdict_lines(judge(rules, {"loss": 0.5})) == [
        "gate FAILED",
        "  pass  loss 0.5 (<= 0.95)",
        "  FAIL  accuracy — (>= 0.3) — the metric is missing; measured: loss",
    ]


def test_the_verdict_as_a_page_is_a_sound_table() -> None:
    page = verdict_markdown(judge([rule(metric="loss"), rule(metric="bad")], {"loss": 0.5, "bad": "a|b\nc"}))
    lines = page.splitlines()
    assert lines[0] == "# Gate FAILED"
    assert lines[4] == "| loss | 0.5 | <= 1 | pass |  |"
    assert len(lines) == 6 and "'a\\|b\\nc'" in lines[5] and "**FAIL**" in lines[5]


# -- the data against what the recipe expects --------------------------------------------------------


def expecting(*rules: tuple[str, str, float]) -> Recipe:
    expect = [{"metric": metric, "comparison": comparison, "threshold": value} for metric, comparison, value in rules]
    return tiny_recipe(expect=expect)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Answers of five words, without steps and warnings."""
    return write_parquet(write_rows(tmp_path / "rows.jsonl"), tmp_path / "data", tiny_recipe().data).path


def test_rows_that_teach_something_else_are_one_warning(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tailtune")
    recipe = expecting(
        ("answer_words", ">=", 60), ("answers_with_steps", "<", 0.5), ("answers_with_warnings", ">=", 0.2)
    )
    document = check_data(recipe, data, tmp_path / "check.json")
    assert document["metrics"] == {"answer_words": 5, "answers_with_steps": 0, "answers_with_warnings": 0}
    assert [rule["passed"] for rule in document["rules"]] == [False, True, False]
    assert json.loads((tmp_path / "check.json").read_text()) == document
    assert [(record.levelname, record.getMessage()) for record in caplog.records[-2:]] == [
        ("INFO", "parquet: the rows teach words per answer 5, answers with numbered steps 0 %, "
                 "answers with a warning 0 %"),
        ("WARNING", "parquet: the recipe expects words per answer >= 60, answers with a warning >= 20 %; a model "
                    "learns from its rows, whatever the prompt says: change the rows, the prompt or `expect`"),
    ]  # fmt: skip


@pytest.mark.parametrize("rules", [[], [("answer_words", "<", 10)]], ids=["none", "met"])
def test_rows_as_expected_are_no_warning(
    rules: list[tuple[str, str, float]], data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = check_data(expecting(*rules), data, tmp_path / "check.json")
    assert [rule["passed"] for rule in document["rules"]] == [True] * len(rules)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_flagship_is_not_promoted_for_learning_to_be_brief() -> None:
    """The prompt asks for thorough answers; from 190 words to the data's 23, a better loss is no promotion."""
    verdict = judge(load_recipe("survival").gate, PASSING | {"answer_words_vs_base": 23 / 190})
    assert [rule["metric"] for rule in verdict["rules"] if not rule["passed"]] == ["answer_words_vs_base"]


def test_what_is_expected_is_no_setting_of_the_training() -> None:
    """Else a run that has trained would refuse another expectation."""
    with_it, without = expecting(("answer_words", ">=", 60)), expecting()
    assert with_it.expect and recipe_settings(with_it) == recipe_settings(without)


def test_only_metrics_of_texts_can_be_expected() -> None:
    with pytest.raises(UserError, match="expect: metric 'answer_word' is not measured, did you mean 'answer_words'"):
        expecting(("answer_word", ">=", 60))
    with pytest.raises(
        UserError, match=r"expect: metric 'tuned_token_accuracy' is not measured.*; measured: answer_words"
    ):
        expecting(("tuned_token_accuracy", ">=", 0.3))
