"""Query the Hugging Face hub, or the mirror that HF_ENDPOINT names, for commits and lists of files.

A query is short: it gets a timeout of its own and is abandoned much sooner than a transfer.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import huggingface_hub as hub
from huggingface_hub import errors as hub_errors

from tailtune.errors import UserError, one_line
from tailtune.fetch.transfer import call_with_retries, check_endpoint

HUB_TIMEOUT_SECONDS = 10.0
"""For one attempt, and for each of the hub's addresses."""
HUB_GIVE_UP_SECONDS = 30.0
"""No attempt of a query starts later than this."""
COMMIT = re.compile(r"[0-9a-f]{40}")
STRANGE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""No file of a hub has such a character in its name."""
_Result = TypeVar("_Result")


def query_hub(function: Callable[..., _Result], *arguments: Any, **keywords: Any) -> _Result:
    """Return `function(*arguments, **keywords)`, a function of huggingface_hub, called again after temporary errors.

    Raises UserError when the answer is not a hub's, and what the client raises for a refusal.
    """
    check_endpoint("HF_ENDPOINT", hub_endpoint())
    hub_token()
    query = partial(function, *arguments, **keywords, timeout=HUB_TIMEOUT_SECONDS)
    try:
        answer = call_with_retries(query, give_up_seconds=HUB_GIVE_UP_SECONDS)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, hub_errors.FileMetadataError) as error:
        if isinstance(error, UserError | hub_errors.HFValidationError):
            raise
        raise _no_hub(one_line(error)) from None
    if not COMMIT.fullmatch(str(getattr(answer, "sha", None) or getattr(answer, "commit_hash", None))):
        raise _no_hub("it names no commit")
    if not all(map(_is_file, getattr(answer, "siblings", None) or [])):
        raise _no_hub("it lists a file without a sound name and size")
    return answer


def _is_file(file: Any) -> bool:
    sound = isinstance(file.rfilename, str) and not STRANGE.search(file.rfilename)
    return sound and (file.size is None or (isinstance(file.size, int) and file.size >= 0))


def _no_hub(why: str) -> UserError:
    remedy = "check HF_ENDPOINT and the proxy, and whether the network asks for a login first"
    return UserError(f"{hub_endpoint()} does not answer as a hub: {why}", remedy)


def hub_token() -> str | None:
    """Return the token for the hub, if there is one. Raises UserError."""
    try:
        token = hub.get_token()
    except UnicodeDecodeError:
        token = "\0"
    if token and not re.fullmatch(r"[!-~]+", token):
        problem = "the hub's token contains a space or another character that tokens do not have"
        raise UserError(problem, "correct HF_TOKEN, or the file that HF_TOKEN_PATH names")
    return token


def hub_endpoint() -> str:
    """Return the hub's address, without a slash at the end."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
