"""What rows hold beside their messages (system prompt, earlier rounds), and tool calls as JSON."""

from __future__ import annotations

import json
from typing import Any

from launcher.data.chat import Message, RowError, read_list


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """The messages after the system prompt of a row's column `system`. Raises RowError."""
    system = read_text(system, "system")
    if not system or not messages:
        return messages
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if first["content"] != system:
        raise RowError("column 'system' and message 1 hold different system prompts; remove one")
    return messages


def read_text(value: Any, column: str) -> str:
    """The text of an optional column, which may be null. Raises RowError."""
    if not isinstance(value, str | None):
        raise RowError(f"column {column!r} must hold text; got {type(value).__name__}")
    return value or ""


def read_history(value: Any) -> list[tuple[str, str]]:
    """Alpaca's `history`: the earlier questions and answers, a list or a list as JSON."""
    rounds: Any = read_list(value, "history") or []
    if not all(
        isinstance(one, list) and len(one) == 2 and all(isinstance(text, str) for text in one)
        for one in rounds
    ):
        raise RowError("column 'history' must hold a list of pairs of texts, [question, answer]")
    return [(question, answer) for question, answer in rounds]


def parse_arguments(messages: list[Message]) -> list[Message]:
    """The messages with the arguments of tool calls as objects, where they are JSON (OpenAI):
    templates write objects as JSON, so JSON would be encoded twice. Raises RowError."""
    return [_parsed(message, f"message {number}") for number, message in enumerate(messages, 1)]


def _parsed(value: Any, what: str) -> Any:
    """A message, call or function with parsed `arguments`."""
    if not isinstance(value, dict):
        return value
    parsed = dict(value)
    for key in ("function_call", "function"):
        if key in value:
            parsed[key] = _parsed(value[key], what)
    if isinstance(calls := value.get("tool_calls"), list):
        parsed["tool_calls"] = [_parsed(call, what) for call in calls]
    if "role" in value or not isinstance(arguments := value.get("arguments"), str):
        return parsed
    try:
        found = json.loads(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise RowError(f"{what}: the arguments of a tool call are not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RowError(f"{what}: the arguments of a tool call must be an object; got {arguments}")
    return {**parsed, "arguments": found}
