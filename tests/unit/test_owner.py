"""Several pipeline runs of one name: their directories belong to one of them at a time."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailtune.errors import UserError
from tailtune.owner import refuse_if_taken_over, take_ownership
from tailtune.run import Run


def test_a_run_is_refused_while_another_of_its_name_is_active(make_run: Callable[..., Run]) -> None:
    first = make_run("mine").model_copy(update={"pipeline_run": "first"})
    second = first.model_copy(update={"pipeline_run": "second"})
    asked: list[str] = []

    def is_active(pipeline_run: str) -> bool:
        asked.append(pipeline_run)
        return active

    active = True
    take_ownership(first, is_active)
    take_ownership(first, is_active)  # another attempt of the same step
    assert asked == []
    with pytest.raises(
        UserError, match=r"run 'mine' is already in progress, as pipeline run first; wait for it, end it"
    ):
        take_ownership(second, is_active)
    refuse_if_taken_over(first.owner_path, "first")
    assert asked == ["first"]
    active = False
    take_ownership(second, is_active)
    refuse_if_taken_over(first.owner_path, "second")
    with pytest.raises(UserError, match=r"pipeline run second has taken over .*; to go on here, submit again"):
        take_ownership(first, is_active)


STEPS: dict[str, dict[str, Any]] = {
    "write_parquet": {"source": "rows.jsonl", "may_end": False, "facts": None, "note": None},
    "train_stage": {"data_dir": "data", "summary": None},
    "evaluate_model": {"data_dir": "data", "tuned_model_dir": "model", "metrics": None},
    "promotion_gate": {"evaluation": "evaluation.json", "verdict": None, "page": None},
    "write_report": {"tuned_model_dir": "model", "report": None},
    "fail_if_rejected": {"report": "report.html"},
    "fetch_dataset": {},
    "fetch_model": {},
}


@pytest.mark.usefixtures("stderr_log")
@pytest.mark.parametrize("name", STEPS)
def test_a_retried_step_leaves_the_directories_to_the_run_that_took_them_over(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Somebody retries an earlier run in the dashboard, which knows nothing of run names."""
    local = make_run("mine")
    earlier, later = (local.model_copy(update={"pipeline_run": each, "local": False}) for each in ("first", "second"))
    for run in (earlier, later):
        take_ownership(run, lambda pipeline_run: False)
    before = sorted(local.local_dir.rglob("*"))
    component = importlib.import_module(f"components.{name}")
    with pytest.raises(SystemExit):
        getattr(component, name).python_func(run=earlier.to_json(), **STEPS[name])
    assert "pipeline run second has taken over this run's directories" in capsys.readouterr().err
    assert sorted(local.local_dir.rglob("*")) == before


def test_a_run_that_no_longer_owns_its_directories_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    refuse_if_taken_over(path, "first")  # nobody owns them yet
    path.write_text('{"pipeline_run": "first"}')
    refuse_if_taken_over(path, "first")
    with pytest.raises(UserError, match=r"pipeline run first has taken over this run's directories, so nothing more"):
        refuse_if_taken_over(path, "second")
