"""The messages of a conversation, from the forms in which data sets hold them."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SHAREGPT = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
"""Roles that have another name in ShareGPT's `from`."""
_BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


class RowError(ValueError):
    """A problem of a row. The message does not say which row."""


def read_messages(value: Any, column: str) -> list[Message]:
    """Messages for a template, from OpenAI's `messages` (role, content) or ShareGPT's
    `conversations` (from, value). Raises RowError.

    Text parts are joined. Keys without a value, which the structs of a parquet file have, are
    dropped; other keys stay.
    """
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return [_message(turn, f"message {number}") for number, turn in enumerate(value, start=1)]
    got = "an empty list" if value == [] else type(value).__name__
    form = "a list of messages, each with role and content (or from and value)"
    raise RowError(f"column {column!r} must hold {form}; got {got}")


def _message(turn: Message, what: str) -> Message:
    message = {key: content for key, content in turn.items() if content is not None}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        content = message.pop("value", None)
        message = {"role": _SHAREGPT.get(speaker, speaker), "content": content, **message}
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        got = "no role" if role is None else f"unknown role {role!r}"
        raise RowError(f"{what}: {got}; must be one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        texts: list[Any] = [
            part.get("text") if isinstance(part, dict) else part for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            kinds = [part.get("type") for part in content if isinstance(part, dict)]
            raise RowError(f"{what}: only text can be trained on; got parts of the types {kinds}")
        content = "".join(texts)
    if content is None and any(message.get(key) for key in _BESIDE_CONTENT):
        content = ""
    if not isinstance(content, str):
        got = "nothing" if content is None else type(content).__name__
        raise RowError(f"{what}: content must be text, or a list of text parts; got {got}")
    return {**message, "content": content}


def read_tools(value: Any) -> list[Any] | None:
    """A row's `tools`: a list, or a list as JSON. Raises RowError."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"column 'tools' is not JSON: {error}") from None
    if value and not isinstance(value, list):
        raise RowError(f"column 'tools' must hold a list; got {type(value).__name__}")
    return value or None
