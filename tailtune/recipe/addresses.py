"""Addresses of data and models. A recipe is stored, shown and sent, so its addresses hold no secrets, only their names.

`https://HOST/rows.jsonl?${DATA_QUERY}` names a variable, or a key of the secret that `s3_secret` names.
"""

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tailtune.errors import UserError

VARIABLE = re.compile(r"\$\{(DATA_[A-Z0-9_]+)\}")
"""The prefix keeps a recipe from sending other variables, such as `AWS_SECRET_ACCESS_KEY`, to its address."""
MAX_CHARS = 4000
"""Of an address or a path: Linux takes no longer ones."""
HARMLESS = re.compile(
    r"(?:alt|config|dl|download|export|format|gid|limit|offset|output|page|raw|ref|revision|rows|split|type|v|version)"
    r"(?:=[\w.-]{0,20})?"
)
"""Parts of a query that are no secrets: common names, and short values."""
REMEDY = "name a variable instead, for example ${DATA_QUERY}, as docs/data.md shows"
_AUTHORITY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):[/\\]+([^/\\?#]*)")
_LOGIN = re.compile(r"^[^/\\:@]+:[^/\\@]*@")
"""`user:password@host/file`, without a scheme."""
_REPLACED = re.compile(r"\{\{|\$\$|\$\(|/kfp-workspace")
"""What KFP, Argo and Kubernetes replace in a step's arguments, parameters that are not JSON among them."""


def check_address(text: str) -> str:
    """Return an address or a path unchanged. Raises ValueError, without the secret, where it cannot be in a recipe."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"has {len(text):,} characters; give an address or a path of at most {MAX_CHARS:,}")
    if secret := _secret(_decoded(text)):
        raise ValueError(f"{without_secrets(text)[:80]} is given with {secret}, which a recipe may not hold; {REMEDY}")
    try:
        urlsplit(VARIABLE.sub("1", text) if "://" in text else "").port  # noqa: B018  raises ValueError
    except ValueError as error:
        raise ValueError(f"is no valid address ({error})") from None
    if VARIABLE.search(text) and not re.match(r"https?://", text):
        raise ValueError("contains a variable, which only addresses with https:// may; write it out")
    return check_plain(text)


def check_plain(text: str) -> str:
    """Return a text that is a parameter of its own. Raises ValueError for what the pipeline server would replace."""
    if found := _REPLACED.search(text):
        raise ValueError(f"contains '{found[0]}', which pipeline servers replace; use a name without it")
    return text


def literal(json_text: str) -> str:
    """Return a JSON text with escapes in place of all that pipeline servers would replace in a step's arguments."""
    text = json_text.replace("{{", r"\u007b\u007b").replace("$", r"\u0024")
    return text.replace("/kfp-workspace", r"\u002fkfp-workspace")


def without_secrets(text: str) -> str:
    """Return an address without what may be secret: login, and a query or fragment that is not known to be harmless."""
    text = text[: 2 * MAX_CHARS]
    decoded = _decoded(text)
    if not _secret(decoded):
        return text
    scheme, mark, rest = decoded.partition("://")
    if "@" in rest and not re.match(r"[^/\\?#:@]+(:\d+)?[/\\?#]", rest):  # a password may contain any character
        rest = rest.rpartition("@")[2]
    plain = scheme + mark + re.sub(r"[?#;].*", "", rest, flags=re.DOTALL)
    return re.sub(r"(:[/\\]+|^)[^/\\]*@", r"\1", plain)


def with_secrets(address: str) -> str:
    """Return an address with the values of its variables, to be opened and never to be shown. Raises UserError."""

    def value(match: re.Match[str]) -> str:
        file = Path(os.environ.get("TAILTUNE_S3_SECRET_DIR", "/nowhere"), match[1])
        text = os.environ.get(match[1]) or (file.read_text(encoding="utf-8").strip() if file.is_file() else "")
        if not text:
            remedy = f"export {match[1]}=…, or on a cluster add this key to the secret that s3_secret names"
            raise UserError(f"{address}: {match[1]} is not set", remedy)
        if not re.fullmatch(r"[!-~]+", text):
            raise UserError(f"{address}: {match[1]} contains a space or another character that addresses do not have",
                            "correct it")  # fmt: skip
        return text

    full = VARIABLE.sub(value, address)
    try:
        urlsplit(full).port  # noqa: B018  raises ValueError, as the client would, with the secret
    except ValueError:
        raise UserError(f"{address} is no valid address", "check it, and its variables") from None
    return full


def _decoded(text: str) -> str:
    """Return the text without percent-encoding, however often it was applied."""
    for _ in range(9):
        text = unquote(text)
    return text


def _secret(text: str) -> str:
    """Return what of a decoded address may be a secret; empty for nothing."""
    without = VARIABLE.sub("", text)
    for scheme, authority in _AUTHORITY.findall(without):
        login, at, host = authority.rpartition("@")
        if (at and login.strip(":")) or (scheme.lower() != "hf" and not re.search(r"(^|[^:\]]|\])(:\d*)?$", host)):
            return "a login"
        if re.search(r"(?<!\[)[^:\[]:[^:\d\]][^:\]]*$", host):  # `user:pass/word@host`: no such port
            return "a login"
    if "://" not in text:
        return "a login" if _LOGIN.match(without) else ""
    scheme, _, rest = text.strip().partition("://")
    is_http = re.search(r"https?:[/\\]", text, re.IGNORECASE) is not None
    for mark, part in re.findall(r"([?&#;])([^?&#;]*)", rest):
        strict = is_http and mark != ";"
        named = re.fullmatch(r"(?:[\w.-]+=)?(?:\$\{DATA_[A-Z0-9_]+\})+", part)
        known = part == "" or (HARMLESS.fullmatch(part) if scheme.lower() != "hf" else part.split("=")[0] in _HF)
        if (strict or "=" in part) and not named and not (known and mark != "#"):
            return "a query or fragment that may be a signature or a key"
    return ""


_HF = ("config", "split")
