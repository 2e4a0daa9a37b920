"""Trust an organisation's own certificates in addition to the public ones, in every client."""

import atexit
import os
import ssl
import tempfile
from pathlib import Path

import certifi

from tailtune.errors import UserError, one_line

VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")
"""Variables that OpenSSL, requests, httpx, huggingface_hub and botocore read."""


def trust_mounted_certificates() -> None:
    """Trust the PEM file that TAILTUNE_CA_FILE names, if it exists. Raises UserError.

    A missing file is not an error: a secret that does not exist is mounted as an empty directory.
    """
    path = Path(os.environ.get("TAILTUNE_CA_FILE") or "/nowhere")
    if path.is_dir():
        raise UserError(f"TAILTUNE_CA_FILE is {path}, a directory", "name the PEM file in it")
    if not path.is_file():
        return
    own = path.read_text(encoding="utf-8", errors="replace")
    if "-----BEGIN CERTIFICATE-----" not in own:
        raise UserError(f"{path} contains no certificate", "store PEM text under ca-bundle.crt in the secret")
    try:
        ssl.create_default_context(cadata=own)
    except (ssl.SSLError, ValueError) as error:  # ValueError: not ASCII
        problem = f"{path} contains a damaged certificate: {one_line(error)}"
        raise UserError(problem, "store PEM text under ca-bundle.crt in the secret") from None
    for variable in VARIABLES:
        current = Path(os.environ.get(variable) or certifi.where())  # the platform may have set some
        public = current if current.is_file() else Path(certifi.where())
        try:
            with tempfile.NamedTemporaryFile("w", prefix="tailtune-ca-", suffix=".crt", delete=False) as bundle:
                atexit.register(Path(bundle.name).unlink, missing_ok=True)
                bundle.write(f"{public.read_text(encoding='utf-8', errors='replace')}\n{own}")
        except OSError as error:
            problem = f"the certificates cannot be put together in a temporary file: {one_line(error)}"
            raise UserError(problem, "free space for temporary files, or set TMPDIR to another directory") from None
        os.environ[variable] = bundle.name
