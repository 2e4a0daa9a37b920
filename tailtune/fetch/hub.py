"""Query the Hugging Face hub, or the mirror that HF_ENDPOINT names, for commits and lists of files.

A query is short: it gets a timeout of its own and is abandoned much sooner than a transfer.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from tailtune.fetch.transfer import call_with_retries

HUB_TIMEOUT_SECONDS = 10.0
"""For one attempt, and for each of the hub's addresses."""
HUB_GIVE_UP_SECONDS = 30.0
"""No attempt of a query starts later than this."""
_Result = TypeVar("_Result")


def query_hub(function: Callable[..., _Result], *arguments: Any, **keywords: Any) -> _Result:
    """Return `function(*arguments, **keywords)`, a function of huggingface_hub, called again after temporary errors."""
    query = partial(function, *arguments, **keywords, timeout=HUB_TIMEOUT_SECONDS)
    return call_with_retries(query, give_up_seconds=HUB_GIVE_UP_SECONDS)


def hub_endpoint() -> str:
    """Return the hub's address, without a slash at the end."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
