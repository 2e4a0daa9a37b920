"""Questions to the hub."""

import os
from collections.abc import Callable
from functools import partial as bind
from typing import Any, TypeVar

from tailtune.fetch import transfer

HUB_TIMEOUT_SECONDS = 10.0
HUB_GIVE_UP_SECONDS = 30.0
"""A question to the hub is not asked again later than this. One attempt takes HUB_TIMEOUT_SECONDS per address."""
_T = TypeVar("_T")


def ask_hub(call: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
    question = bind(call, *arguments, **named, timeout=HUB_TIMEOUT_SECONDS)
    return transfer.retry(question, give_up_seconds=HUB_GIVE_UP_SECONDS)


def hub_endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
