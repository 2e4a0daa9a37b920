"""Servers with an organisation's own certificates are trusted if, and only if, the bundle is mounted."""

import datetime
import functools
import http.server
import ipaddress
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from conftest import write_rows
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an organisation")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public, private = tmp_path / "ca-bundle.crt", tmp_path / "server.key"
    public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                          serialization.NoEncryption()))  # fmt: skip
    (tmp_path / "served").mkdir()
    write_rows(tmp_path / "served" / "rows.jsonl")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, private)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}", public
    server.shutdown()


def test_the_mounted_bundle_is_trusted_by_every_client(
    own_server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, certificate = own_server
    source = f"{address}/rows.jsonl"
    with pytest.raises(UserError, match=r"(?i)certificate"):
        fetch_dataset(source, tmp_path / "before")
    monkeypatch.setenv("TAILTUNE_CA_FILE", str(certificate))
    trust_mounted_certificates()
    assert fetch_dataset(source, tmp_path / "after").path.is_file()
    assert requests.get(source, timeout=10).ok
    bundle = Path(os.environ["AWS_CA_BUNDLE"]).read_text()
    assert bundle.count("BEGIN CERTIFICATE") > 50, "the public ones are still trusted"


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
