"""Several pipeline runs of one name: their directories belong to one of them at a time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tailtune.errors import UserError
from tailtune.owner import read_owner, refuse_if_taken_over, take_ownership
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
    assert read_owner(first.owner_path) == "first" and asked == ["first"]
    active = False
    take_ownership(second, is_active)
    assert read_owner(first.owner_path) == "second"


def test_a_run_that_no_longer_owns_its_directories_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    refuse_if_taken_over(path, "first")  # nobody owns them yet
    path.write_text('{"pipeline_run": "first"}')
    refuse_if_taken_over(path, "first")
    with pytest.raises(UserError, match=r"pipeline run first has taken over this run's directories, so nothing more"):
        refuse_if_taken_over(path, "second")
