"""Trust an organisation's own certificates besides the public ones, in every client at once."""

import os
import tempfile
from pathlib import Path

import certifi

from tailtune.errors import UserError

VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")
"""What OpenSSL, requests, httpx, huggingface_hub and botocore read."""


def trust_mounted_certificates() -> None:
    """Trust the PEM file that TAILTUNE_CA_FILE names; nothing to do when it is not there. Raises UserError.

    A secret that does not exist is mounted as an empty directory, so a file that is missing is no error.
    """
    path = Path(os.environ.get("TAILTUNE_CA_FILE") or "/nowhere")
    if not path.is_file():
        return
    own = path.read_text(encoding="utf-8", errors="replace")
    if "-----BEGIN CERTIFICATE-----" not in own:
        raise UserError(f"{path} holds no certificate; store PEM text under ca-bundle.crt in the secret")
    for variable in VARIABLES:
        before = Path(os.environ.get(variable) or certifi.where())  # a platform may have set some already
        public = before if before.is_file() else Path(certifi.where())
        with tempfile.NamedTemporaryFile("w", prefix="tailtune-ca-", suffix=".crt", delete=False) as bundle:
            bundle.write(f"{public.read_text(encoding='utf-8')}\n{own}")
        os.environ[variable] = bundle.name
