"""Fixtures for tests of the launcher: a cluster, and what the launcher prints."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes_server import Server, cluster
from launchers import MODULES

from tailtune.jobs import follow as launcher


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, source in MODULES.items():
        (tmp_path / f"pod_{name}.py").write_text(source)
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.2)
    with cluster(tmp_path / "server", PYTHONPATH=str(tmp_path), MARK=str(tmp_path / "mark")) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Function that returns what a step's log would contain: the ranks' lines, then the launcher's own."""
    caplog.set_level("INFO", "tailtune")
    return lambda: capsys.readouterr().err + caplog.text
