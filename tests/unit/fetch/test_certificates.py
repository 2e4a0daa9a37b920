"""Servers with an organisation's own certificates are trusted if, and only if, the bundle is mounted."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from conftest import write_rows
from https_server import https_server

from tailtune.errors import UserError
from tailtune.fetch import transfer
from tailtune.fetch.certificates import VARIABLES, trust_mounted_certificates
from tailtune.fetch.dataset import fetch_dataset


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """(address, certificate) of an https server with a self-signed certificate."""
    monkeypatch.setattr(transfer, "RETRY_WAIT_SECONDS", 0.01)
    for variable in (*VARIABLES, "TAILTUNE_CA_FILE"):
        monkeypatch.setenv(variable, "")  # so that it is restored after the test
        monkeypatch.delenv(variable)
    (tmp_path / "served").mkdir()
    write_rows(tmp_path / "served" / "rows.jsonl")
    with https_server(tmp_path) as server:
        yield server


def test_the_mounted_bundle_is_trusted_by_every_client(
    own_server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address, certificate = own_server
    source = f"{address}/rows.jsonl"
    words = r"could not be fetched: the certificate is not trusted \(self-signed.*\); name .* TAILTUNE_CA_FILE$"
    with pytest.raises(UserError, match=words):
        fetch_dataset(source, tmp_path / "before")
    assert "attempt" not in caplog.text, "another attempt does not help"
    monkeypatch.setenv("TAILTUNE_CA_FILE", str(certificate))
    trust_mounted_certificates()
    assert fetch_dataset(source, tmp_path / "after").path.is_file()
    assert requests.get(source, timeout=10).ok
    bundle = Path(os.environ["AWS_CA_BUNDLE"]).read_text()
    assert bundle.count("BEGIN CERTIFICATE") > 50, "the public ones are still trusted"


def test_a_step_leaves_no_bundle_behind(own_server: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    program = "import os; from tailtune.fetch import certificates; certificates.trust_mounted_certificates()\n"
    program += "assert os.path.getsize(os.environ['AWS_CA_BUNDLE'])"
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "TAILTUNE_CA_FILE": str(own_server[1])}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert not any((tmp_path / "tmp").iterdir())


def test_a_secret_that_does_not_exist_changes_nothing(
    own_server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILTUNE_CA_FILE", str(tmp_path / "empty" / "ca-bundle.crt"))
    trust_mounted_certificates()
    assert not any(variable in os.environ for variable in VARIABLES)


def test_a_file_without_a_certificate_is_refused(
    own_server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.crt").write_text("a key, not a certificate")
    monkeypatch.setenv("TAILTUNE_CA_FILE", str(tmp_path / "wrong.crt"))
    with pytest.raises(UserError, match=r"contains no certificate; store PEM text under ca-bundle\.crt"):
        trust_mounted_certificates()


def test_a_directory_is_refused(own_server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILTUNE_CA_FILE", str(tmp_path))
    with pytest.raises(UserError, match=r"TAILTUNE_CA_FILE is .*, a directory; name the PEM file in it"):
        trust_mounted_certificates()


def test_a_damaged_certificate(own_server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.crt").write_text(own_server[1].read_text().replace("MII", "MIX"))
    monkeypatch.setenv("TAILTUNE_CA_FILE", str(tmp_path / "wrong.crt"))
    with pytest.raises(UserError, match=r"wrong\.crt contains a damaged certificate"):
        trust_mounted_certificates()


def test_no_space_for_temporary_files(
    own_server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILTUNE_CA_FILE", str(own_server[1]))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"temporary file: .*; free space for temporary files, or set TMPDIR"):
        trust_mounted_certificates()


def test_a_bundle_that_the_platform_has_set_is_added_to(
    own_server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = tmp_path / "platform.crt"
    platform.write_text("# the platform's\n")
    monkeypatch.setenv("TAILTUNE_CA_FILE", str(own_server[1]))
    monkeypatch.setenv("SSL_CERT_FILE", str(platform))
    trust_mounted_certificates()
    text = Path(os.environ["SSL_CERT_FILE"]).read_text()
    assert text.startswith("# the platform's\n") and text.count("BEGIN CERTIFICATE") == 1
