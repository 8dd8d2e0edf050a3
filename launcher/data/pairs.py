"""The prompt of a pair of answers (data.kind: preference)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from launcher.data.messages import Message, dialogue, parsed_messages
from launcher.errors import RowError
from launcher.sources.layouts import Match
from launcher.sources.rows import Values


def pair_of_answers(row: Values, found: Match, *, as_turns: bool) -> tuple[Values, Match]:
    """The row with a prompt, and with answers that do not repeat it, and where they are.

    Answers may be texts, single messages, conversations, also as JSON, and if texts become turns,
    dialogues as text. Without a chosen answer it is the last one of the conversation. Raises
    RowError.
    """
    columns, values = dict(found.columns), dict(row)
    if "response" in columns:
        columns["chosen"] = columns["response"]
    elif "chosen" not in columns:
        values, columns = _with_last_answer(values, columns)
    chosen, rejected = columns["chosen"], columns["rejected"]
    for column in (chosen, rejected):
        values[column] = parsed_messages(values.get(column))
    texts = [values[column] for column in (chosen, rejected)]
    if as_turns and all(isinstance(text, str) for text in texts):
        turns = [_answered_dialogue(text) for text in texts]
        if None not in turns:
            values |= dict(zip((chosen, rejected), turns, strict=True))
    prompt = columns.get("prompt") or columns.get("messages")
    if "messages" in columns:
        values[columns["messages"]] = before = parsed_messages(values.get(columns["messages"]))
        if isinstance(before, list) and before and _is_answer(before[-1]):
            prompt = None  # the conversation is an answer, too, as in UltraFeedback
    given = "instruction" in columns
    values = with_shared_prompt(values, prompt, chosen, rejected, given=given)
    if not given:
        columns = {role: name for role, name in columns.items() if role != "messages"}
        columns["prompt"] = prompt or "prompt"
    return values, Match(found.layout, columns)


def _with_last_answer(row: Values, columns: dict[str, str]) -> tuple[Values, dict[str, str]]:
    """A conversation and a rejected answer, as two conversations."""
    messages = parsed_messages(row.get(columns["messages"]))
    if not isinstance(messages, list) or not messages or not _is_answer(messages[-1]):
        raise RowError(f"column {columns['messages']!r} must end with the chosen answer")
    rejected = parsed_messages(row.get(columns["rejected"]))
    if isinstance(rejected, str):
        rejected = [*messages[:-1], {"role": "assistant", "content": rejected}]
    row = {**row, columns["messages"]: messages, columns["rejected"]: rejected}
    others = {role: name for role, name in columns.items() if role != "messages"}
    return row, {**others, "chosen": columns["messages"]}


def _answered_dialogue(text: str) -> list[Message] | None:
    turns = dialogue(text)
    return turns if turns and turns[-1]["role"] == "assistant" else None


def with_shared_prompt(
    row: Values, prompt: str | None, chosen: str, rejected: str, *, given: bool = False
) -> Values:
    """The row with a prompt, and with answers that do not repeat it. The names are its columns'; a
    prompt that is found goes to the column `prompt`, if that is null. given: the prompt is an
    instruction in other columns.

    Without a prompt it is what both answers begin with: messages, or text up to the last white
    space (`_end_of_prompt`). Messages of both answers that begin with those of the user are a prompt,
    too, if the prompt's column holds text, which they repeat (as in UltraFeedback); and so are those
    that they repeat from the prompt's column. Raises RowError.
    """
    first, second = row.get(chosen), row.get(rejected)
    if first is not None and first == second:
        raise RowError(f"columns {chosen!r} and {rejected!r} hold the same answer")
    if {type(first), type(second)} == {str, list}:
        what = "must both hold text, or both a list of messages"
        raise RowError(f"columns {chosen!r} and {rejected!r} {what}")
    name = prompt or "prompt"
    before = parsed_messages(row.get(name)) if prompt is not None else None
    given = given or before is not None
    shared = 0
    if isinstance(first, list) and isinstance(second, list):
        if not given or (not isinstance(before, list) and not _begins_with_answer(first)):
            shared = _equal_at_start(first, second)
        elif isinstance(before, list) and before == first[: len(before)] == second[: len(before)]:
            shared = len(before)
    elif isinstance(first, str) and isinstance(second, str) and not given:
        shared = _end_of_prompt(first[: _equal_at_start(first, second)])
    if shared:
        assert first is not None
        assert second is not None
        return {**row, name: first[:shared], chosen: first[shared:], rejected: second[shared:]}
    if not given and first is not None and second is not None:
        what = "begin with nothing in common that could be one"
        raise RowError(f"no column {name!r}, and {chosen!r} and {rejected!r} {what}")
    return row


def _end_of_prompt(text: str) -> int:
    """Where the prompt ends in what two answers begin with, not inside of a word: before the last
    white space, or without any (Chinese) after the last sign that is not of a word."""
    space = re.search(r"\s\S*\Z", text)
    if space is not None:
        return space.start()
    ends = (at for at, sign in enumerate(text, start=1) if not _in_a_word(sign))
    return max(ends, default=0)


def _in_a_word(sign: str) -> bool:
    """Whether a character is of a word that ends at white space: a digit, or a letter with case."""
    return sign.isdigit() or sign.lower() != sign.upper()


def different(answers: list[Any], chosen: str, rejected: str) -> list[Any]:
    """The two answers, rendered. Raises RowError if they are equal. The names are their columns'."""
    if answers[0] == answers[1]:
        what = "are the same answer after the chat template"
        raise RowError(f"columns {chosen!r} and {rejected!r} {what}")
    return answers


def _equal_at_start(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = list(zip(first, second, strict=False))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _role(message: object) -> object:
    return message.get("role", message.get("from")) if isinstance(message, dict) else None


def _is_answer(message: object) -> bool:
    return _role(message) in ("assistant", "gpt", "model", "bot", "chatgpt")


def _begins_with_answer(messages: list[object]) -> bool:
    return not messages or _role(messages[0]) is None or _is_answer(messages[0])
