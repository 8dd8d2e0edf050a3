"""The prompt of a pair of answers (data.kind: preference)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from launcher.data.chat import RowError
from launcher.data.sources import Values


def with_shared_prompt(row: Values, prompt: str | None, chosen: str, rejected: str) -> Values:
    """The row with a prompt, and with answers that do not repeat it. The names are its columns'.

    Without a prompt it is what both answers begin with: messages, or text up to the last white
    space. Messages of both answers that begin with those of the user are a prompt, too, if the
    prompt's column holds text, which they repeat (as in UltraFeedback); and so are those that they
    repeat from the prompt's column. Raises RowError.
    """
    first, second = row.get(chosen), row.get(rejected)
    if first is not None and first == second:
        raise RowError(f"columns {chosen!r} and {rejected!r} hold the same answer")
    if {type(first), type(second)} == {str, list}:
        what = "must both hold text, or both a list of messages"
        raise RowError(f"columns {chosen!r} and {rejected!r} {what}")
    name = prompt or "prompt"
    before = row.get(name)
    given = before is not None or (prompt is None and "instruction" in row)
    shared = 0
    if isinstance(first, list) and isinstance(second, list):
        if not given or (not isinstance(before, list) and not _begins_with_answer(first)):
            shared = _equal_at_start(first, second)
        elif isinstance(before, list) and before == first[: len(before)] == second[: len(before)]:
            shared = len(before)
    elif isinstance(first, str) and isinstance(second, str) and not given:
        found = re.search(r"\s\S*\Z", first[: _equal_at_start(first, second)])
        shared = 0 if found is None else found.start()
    if shared:
        assert first is not None
        assert second is not None
        return {**row, name: first[:shared], chosen: first[shared:], rejected: second[shared:]}
    if not given and first is not None and second is not None:
        what = "begin with nothing in common that could be one"
        raise RowError(f"no column {name!r}, and {chosen!r} and {rejected!r} {what}")
    return row


def different(answers: list[Any], chosen: str, rejected: str) -> list[Any]:
    """The two answers, rendered. Raises RowError if they are equal. The names are their columns'."""
    if answers[0] == answers[1]:
        what = "are the same answer after the chat template"
        raise RowError(f"columns {chosen!r} and {rejected!r} {what}")
    return answers


def _equal_at_start(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = list(zip(first, second, strict=False))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _begins_with_answer(messages: list[object]) -> bool:
    message = messages[0] if messages else None
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return role in ("assistant", "gpt", "model", None)
