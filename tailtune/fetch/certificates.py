"""Trust an organisation's own certificates in addition to the public ones, in every client."""

import atexit
import os
import tempfile
from pathlib import Path

import certifi

from tailtune.errors import UserError

VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")
"""Variables that OpenSSL, requests, httpx, huggingface_hub and botocore read."""


def trust_mounted_certificates() -> None:
    """Trust the PEM file that TAILTUNE_CA_FILE names, if it exists. Raises UserError.

    A missing file is not an error: a secret that does not exist is mounted as an empty directory.
    """
    path = Path(os.environ.get("TAILTUNE_CA_FILE") or "/nowhere")
    if not path.is_file():
        return
    own = path.read_text(encoding="utf-8", errors="replace")
    if "-----BEGIN CERTIFICATE-----" not in own:
        raise UserError(f"{path} contains no certificate", "store PEM text under ca-bundle.crt in the secret")
    for variable in VARIABLES:
        current = Path(os.environ.get(variable) or certifi.where())  # the platform may have set some
        public = current if current.is_file() else Path(certifi.where())
        with tempfile.NamedTemporaryFile("w", prefix="tailtune-ca-", suffix=".crt", delete=False) as bundle:
            atexit.register(Path(bundle.name).unlink, missing_ok=True)
            bundle.write(f"{public.read_text(encoding='utf-8')}\n{own}")
        os.environ[variable] = bundle.name
