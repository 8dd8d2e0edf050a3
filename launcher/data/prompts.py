"""Rows with a prompt and a response, in the common layouts."""

from __future__ import annotations

from typing import Any

from launcher.data.chat import Message, RowError, read_messages

_RESPONSES = ("response", "completion", "output")


def read_prompt(
    row: dict[str, Any], *, prompt_column: str | None, response_column: str | None, as_chat: bool
) -> tuple[str, str] | tuple[list[Message], int]:
    """Prompt and response as two texts, to be joined as they are; or, if either is a list of
    messages, all messages and the index of the first one of the response. Raises RowError.

    A row with `instruction` (and `input`) instead of a prompt is laid out under headings.
    as_chat: always messages: the prompt is the user's turn, the response the assistant's.
    """
    column = response_column or next((name for name in _RESPONSES if name in row), _RESPONSES[0])
    response = _value(row, column, "data.response_column", _RESPONSES)
    if not response:
        raise RowError(f"column {column!r} is empty, so there is nothing to learn from")
    key, prompt = prompt_column or "prompt", ""
    if prompt_column is None and "prompt" not in row and "instruction" in row:
        instruction, material = _text(row, "instruction"), _text(row, "input")
        if as_chat or isinstance(response, list):
            prompt = "\n\n".join(part for part in (instruction, material) if part)
        else:
            prompt = headings(instruction, material)
    else:
        prompt = _value(row, key, "data.prompt_column", ("prompt", "instruction and input"))
    if isinstance(prompt, str) and isinstance(response, str) and not as_chat:
        return prompt, response
    question, answer = _turn(prompt, "user", key), _turn(response, "assistant", column)
    return question + answer, len(question)


def headings(instruction: str, material: str) -> str:
    """The instruction and, if there is any, its material, each under a heading."""
    parts = [f"### Instruction:\n{instruction}"]
    if material:
        parts.append(f"### Input:\n{material}")
    return "\n\n".join([*parts, "### Response:\n"])


def _turn(value: Any, role: str, column: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return read_messages(value, column)


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
        f"column {column!r} must hold text or a list of messages; {got}; columns: "
        f"{', '.join(row)} ({key} names it; null: {', '.join(convention)})"
    )
