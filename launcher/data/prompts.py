"""Rows of prompt and response, as they are written in the wild."""

from __future__ import annotations

from typing import Any

from launcher.data.chat import Message, RowError, read_messages

_RESPONSES = ("response", "completion", "output")


def read_prompt(
    row: dict[str, Any], *, prompt_column: str | None, response_column: str | None, as_chat: bool
) -> tuple[str, str] | tuple[list[Message], int]:
    """A prompt and its response: two texts, one to follow the other as they are; or messages, and the number of the first
    that is the response's, where either is a list of messages.

    A row of `instruction` (and `input`) in the place of a prompt is laid out under headings.
    as_chat: messages in any case: the prompt is the user's turn, the response the assistant's.
    Raises RowError.
    """
    column = response_column or next((name for name in _RESPONSES if name in row), _RESPONSES[0])
    response = _value(row, column, "data.response_column", _RESPONSES)
    if not response:
        raise RowError(f"column {column!r} is empty, so there is nothing to learn from")
    prompt: Any
    if prompt_column is None and "prompt" not in row and "instruction" in row:
        instruction, material = _text(row, "instruction"), _text(row, "input")
        joined = "\n\n".join(part for part in (instruction, material) if part)
        prompt = (
            joined if as_chat or isinstance(response, list) else headings(instruction, material)
        )
    else:
        prompt = _value(
            row,
            prompt_column or "prompt",
            "data.prompt_column",
            ("prompt", "instruction and input"),
        )
    if isinstance(prompt, str) and isinstance(response, str) and not as_chat:
        return prompt, response
    asked = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else read_messages(prompt, prompt_column or "prompt")
    )
    said = (
        [{"role": "assistant", "content": response}]
        if isinstance(response, str)
        else read_messages(response, column)
    )
    return asked + said, len(asked)


def headings(instruction: str, material: str) -> str:
    """The instruction and what it is about, where there is such, each under a heading, and the heading of the response."""
    parts = [f"### Instruction:\n{instruction}"] + ([f"### Input:\n{material}"] if material else [])
    return "\n\n".join([*parts, "### Response:\n"])


def _text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None and column == "input":
        return ""
    if not isinstance(value, str):
        raise RowError(f"column {column!r} must hold text; got {type(value).__name__}")
    return value


def _value(row: dict[str, Any], column: str, key: str, convention: tuple[str, ...]) -> Any:
    value = row.get(column)
    if isinstance(value, (str, list)):
        return value
    got = "no such column" if column not in row else f"got {type(value).__name__}"
    raise RowError(
        f"column {column!r} must hold text or a list of messages; {got}; columns: {', '.join(row)} "
        f"({key} names it; null: {', '.join(convention)})"
    )
