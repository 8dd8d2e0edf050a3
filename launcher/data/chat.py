"""The messages of a conversation, from the forms in which data sets hold them."""

from __future__ import annotations

import json
import re
from typing import Any

Message = dict[str, Any]
"""Role, content, and whatever else the data set gives it."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SHAREGPT = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
"""Roles that have another name in ShareGPT's `from`."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_PLACEHOLDER = "Qz7aZq"
"""Begins texts that no row holds."""
_BESIDE_CONTENT = ("tool_calls", "function_call", *_REASONING)


class RowError(ValueError):
    """A problem of a row. The message does not say which row."""


class RefusedError(RowError):
    """The chat template refuses a conversation."""


class LeftOutError(RefusedError):
    """The chat template leaves out a tool call or an answer."""


class NotAsServedError(RowError):
    """A turn that the template shows otherwise than the model must produce it."""


def read_messages(value: object, column: str) -> list[Message]:
    """Messages for a template, from OpenAI's `messages` (role, content) or ShareGPT's
    `conversations` (from, value). Raises RowError.

    Text parts are joined. Keys without a value are dropped; other keys stay. `loss` is false in the
    messages that have a `weight` of 0 (OpenAI) or `loss: false` (ShareGPT), and in no other.
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
        role = _SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else speaker
        message = {"role": role, "content": content, **message}
    role, content = message.get("role"), message.get("content")
    if not isinstance(message.get("function_call", {}), dict):
        raise RowError(f"{what}: function_call must be an object with name and arguments")
    if role not in _ROLES:
        got = "no role" if role is None else f"unknown role {role!r}"
        raise RowError(f"{what}: {got}; must be one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            kinds = [part.get("type") for part in content if isinstance(part, dict)]
            raise RowError(f"{what}: only text can be trained on; got parts of the types {kinds}")
        content = "".join(texts)
    # Templates that only ask whether there is the key would write a call instead of the content
    if calls := _tool_calls(message.pop("tool_calls", None), what):
        message["tool_calls"] = calls
    if content is None and any(message.get(key) for key in _BESIDE_CONTENT):
        content = ""
    if not isinstance(content, str):
        got = "nothing" if content is None else type(content).__name__
        raise RowError(f"{what}: content must be text, or a list of text parts; got {got}")
    if role == "assistant":
        content = _with_opening_mark(content)
    weights = [message.pop(key, 1) for key in ("weight", "loss")]
    if any(weight not in (0, 1) for weight in weights):
        raise RowError(f"{what}: weight and loss must be 0 or 1 (false or true); got {weights}")
    silent = {} if all(weights) else {"loss": False}
    return {**message, "content": content, **silent}


def _with_opening_mark(content: str) -> str:
    """The content with the `<think>` that is missing where a generation prompt ended in it."""
    thought, mark, _ = content.partition("</think>")
    quoted = thought.endswith(("`", "'", '"'))
    if not mark or quoted or "<think>" in thought:
        return content
    return "<think>" + "\n" * thought.endswith("\n") + content


def _tool_calls(value: object, what: str) -> list[object] | None:
    """A list of calls, or a list as JSON; None: there are none. Raises RowError."""
    calls = read_list(value, f"{what}: tool_calls")
    functions = [
        call.get("function", call) if isinstance(call, dict) else 0 for call in calls or []
    ]
    if not all(isinstance(function, dict) for function in functions):
        raise RowError(f"{what}: tool_calls must be a list of objects, each with a function")
    return calls


def read_tools(value: object) -> list[object] | None:
    """A row's `tools`: a list, or a list as JSON. Raises RowError."""
    try:
        return read_list(value, "column 'tools'")
    except RowError as error:
        raise RowError(f"{error}; rename the column if it has no descriptions of tools") from None


def read_list(value: object, where: str) -> list[object] | None:
    """A list, or a list as JSON; None or an empty text: there is none. Raises RowError."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{where} is not JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, list):
        raise RowError(f"{where} must hold a list; got {type(value).__name__}")
    return value


def with_system(
    messages: list[Message], value: object, column: str, default: str | None
) -> list[Message]:
    """The messages after the system prompt of a row's column, or else after the default one if they
    have none. Raises RowError."""
    own = read_text(value, column)
    if not messages or not (own or default):
        return messages
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": own or default}, *messages]
    if own and first["content"] != own:
        raise RowError(f"column {column!r} and message 1 hold different system prompts; remove one")
    return messages


def read_text(value: object, column: str) -> str:
    """The text of an optional column, which may be null. Raises RowError."""
    if not isinstance(value, str | None):
        raise RowError(f"column {column!r} must hold text; got {type(value).__name__}")
    return value or ""


def read_history(value: object) -> list[tuple[str, str]]:
    """Alpaca's `history`: the earlier questions and answers, a list or a list as JSON."""
    rounds = []
    for pair in read_list(value, "column 'history'") or []:
        match pair:
            case [str(question), str(answer)]:
                rounds.append((question, answer))
            case _:
                form = "a list of pairs of texts, [question, answer]"
                raise RowError(f"column 'history' must hold {form}")
    return rounds


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
        parsed_arguments = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what}: the arguments of a tool call are not JSON: {error}") from None
    if not isinstance(parsed_arguments, dict):
        raise RowError(f"{what}: the arguments of a tool call must be an object; got {arguments}")
    return {**parsed, "arguments": parsed_arguments}


def encodable(text: str, where: str) -> str:
    """The text. Raises RowError if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        what = "holds half a surrogate pair (\\ud800 to \\udfff), which is no character"
        raise RowError(f"{where} {what}") from None
    return text


def instruction(row: dict[str, Any], rounds: list[tuple[str, str]], *, headings: bool) -> str:
    """Instruction and input as one prompt. headings: in Alpaca's form, after earlier rounds."""
    parts = {"Instruction": row["instruction"], "Input": row.get("input") or ""}
    for name, text in parts.items():
        if not isinstance(text, str):
            got = type(text).__name__
            raise RowError(f"column {name.lower()!r} must hold text; got {got}")
    if not headings:
        return "\n\n".join(text for text in parts.values() if text)
    shown = [name for name, text in parts.items() if text or name == "Instruction"]
    before = [f"### Instruction:\n{asked}\n\n### Response:\n{told}" for asked, told in rounds]
    own = [f"### {name}:\n{parts[name]}" for name in shown]
    return "\n\n".join([*before, *own, "### Response:\n"])


def thought_of(message: Message) -> tuple[str, str]:
    """The reasoning of a message, and its content without it. Empty: there is none."""
    content = message["content"] or ""
    thought = _THOUGHT.match(content)
    if thought:
        return thought[1].strip("\n"), content[thought.end() :]
    reasoning = (message[key] for key in _REASONING if message.get(key))
    return str(next(reasoning, "")).strip("\n"), content


def may_lose(message: Message) -> bool:
    """Whether templates leave out texts of such a message: reasoning, or content beside calls."""
    thought, said = thought_of(message)
    calls = message.get("tool_calls") or message.get("function_call")
    return bool(thought.strip() or (calls and said.strip()))


def with_placeholders(messages: list[Message]) -> list[Message]:
    """The messages with a placeholder for each reasoning and content of the assistant."""
    probes = []
    for number, message in enumerate(messages):
        probe = dict(message)
        if message["role"] == "assistant":
            _, said = thought_of(message)
            thought_there, said_there = _placeholders(number)
            probe |= {key: thought_there for key in _REASONING if message.get(key)}
            if said.strip():
                probe["content"] = said_there
            if _THOUGHT.match(message["content"] or ""):
                answer = f"\n\n{said_there}" if said.strip() else ""
                probe["content"] = f"<think>\n{thought_there}\n</think>{answer}"
        probes.append(probe)
    return probes


def _placeholders(number: int) -> tuple[str, str]:
    return f"{_PLACEHOLDER}{number}t", f"{_PLACEHOLDER}{number}c"


def check_calls(message: Message, written: str, what: str) -> None:
    """Raises LeftOutError if tool calls are missing in what the template writes for a message."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    names = [call.get("name") for call in [*calls, message.get("function_call") or {}]]
    for name in filter(None, names):
        if written.count(str(name)) < names.count(name):
            hint = "set data.chat_template to a template that renders it"
            raise LeftOutError(f"{what}: the chat template leaves out a tool call ({name}); {hint}")


def check_texts(message: Message, number: int, written: str, what: str) -> None:
    """Raises NotAsServedError if the template leaves out reasoning, or text beside tool calls, and
    LeftOutError if it leaves out an answer. `written` is what it writes for the message of this
    index in `with_placeholders`."""
    thought, said = thought_of(message)
    thought_there, said_there = _placeholders(number)
    if thought.strip() and thought_there not in written:
        raise NotAsServedError(
            f"{what}: the chat template leaves out its reasoning, so the model would learn to "
            "answer without it; end the row with this turn, or set data.chat_template to a "
            "template that renders it"
        )
    if said.strip() and said_there not in written and not may_lose(message):
        hint = "set data.chat_template to a template that renders it"
        raise LeftOutError(f"{what}: the chat template leaves out its content; {hint}")
    if said.strip() and said_there not in written:
        raise NotAsServedError(
            f"{what}: the chat template leaves out the text beside its tool calls, so the model "
            "would learn to call without it; end the row with this turn, remove the text, or set "
            "data.chat_template to a template that renders it"
        )
