"""Fixtures: a cluster, and what the launcher and the steps print."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes_server import Server, cluster
from launchers import MODULES

from tailtune.jobs import follow as launcher
from tailtune.log import log

LIGHT_TORCHRUN = Path(__file__).resolve().parents[1] / "light_torchrun"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A cluster. In `make test`, only tests with the mark `torchrun` run torch's own in the pods."""
    for name, source in MODULES.items():
        (tmp_path / f"pod_{name}.py").write_text(source)
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.2)
    light = "not slow" in request.config.option.markexpr and not request.node.get_closest_marker("torchrun")
    path = os.pathsep.join([*([str(LIGHT_TORCHRUN)] if light else []), str(tmp_path)])
    with cluster(tmp_path / "server", PYTHONPATH=path, MARK=str(tmp_path / "mark")) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Function that returns what a step's log would contain: the ranks' lines, then the launcher's own."""
    caplog.set_level("INFO", "tailtune")
    return lambda: capsys.readouterr().err + caplog.text


@pytest.fixture
def stderr_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log goes to the stderr of the moment."""
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)  # else pytest adds handlers of its own, and ours is left out
