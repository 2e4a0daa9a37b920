"""Conversations: `messages` (`role`, `content`) or `conversations` (`from`, `value`, as ShareGPT has them).

Both become lists of messages with the roles system, user and assistant. Imports no pyarrow.
"""

from collections.abc import Mapping
from typing import Any

from tailtune.parquet.lines import BadRow

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
"""Role in the data → role in the Parquet file."""
UNSUPPORTED = ("tool_calls", "function_call")
"""Keys of messages that mean more than their text."""


def read_conversation(value: Any) -> list[dict[str, str]]:
    """Return the messages of a conversation. Raises BadRow.

    After an optional system message, user and assistant take turns, and the assistant has the last word.
    """
    if not isinstance(value, list):
        raise BadRow("not a list of messages")
    messages = [_read_message(message, number) for number, message in enumerate(value, 1)]
    has_system = bool(messages) and messages[0]["role"] == "system"
    for number, message in enumerate(messages[has_system:]):
        expected = ("user", "assistant")[number % 2]
        if message["role"] != expected:
            raise BadRow(f"message {number + 1 + has_system} is from {message['role']}, expected {expected}")
    if len(messages) == has_system:
        raise BadRow("no question and no answer")
    if messages[-1]["role"] != "assistant":
        raise BadRow(f"the last message ({len(messages)}) is from {messages[-1]['role']}, expected assistant")
    return messages


def _read_message(message: Any, number: int) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise BadRow(f"message {number} is not an object")
    named = [names for names in (("role", "content"), ("from", "value")) if message.get(names[0]) is not None]
    if not named:
        raise BadRow(f"message {number} has neither role and content nor from and value")
    role, content = (message.get(name) for name in named[0])
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"message {number} has role '{role}', expected {', '.join(ROLES)}")
    if key := next((key for key in UNSUPPORTED if message.get(key)), None):
        raise BadRow(f"message {number} has {key}, which cannot be trained on")
    if message.get("weight") == 0:  # in OpenAI's form: do not train on this answer
        raise BadRow(f"message {number} has weight {message['weight']}, but every answer is trained on")
    if not isinstance(content, str):
        raise BadRow(f"message {number} ({role}) has no text as {named[0][1]}")
    if not content or content.isspace():
        raise BadRow(f"message {number} ({role}) is empty")
    return {"role": ROLES[role], "content": str(content)}
