"""The messages of a conversation, from the forms in which data sets hold them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from launcher.data.columns import read_list, read_text, read_weights
from launcher.data.coordinates import Objects, read_objects
from launcher.data.placing import is_part_of, lacks_file, place, place_of_row, placeholder_of
from launcher.errors import RowError
from launcher.sources.layouts import (
    ATTACHMENTS,
    BESIDE_TEXT,
    Match,
    typed,
)
from launcher.sources.rows import Values

if TYPE_CHECKING:
    from launcher.data.attachments import Source
    from launcher.data.encoder import Encoder
    from launcher.data.modality import Modality

Message = dict[str, Any]
"""Role, content, and whatever else the data set gives it."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_OTHER_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "model", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
"""Other names of roles, of ShareGPT and other data sets."""
_CALLS = ("function_call", "tool_call")
"""Roles of messages that hold the calls of an assistant, as JSON."""
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys of a call that may hold its arguments."""
_ROLE_KEYS = ("role", "from", "speaker")
_CONTENT_KEYS = ("content", "value", "parts", "text")
_LOSS_KEYS = (
    *("weight", "loss", "loss_weight", "loss_mask", "loss_scale", "output_with_loss"),
    *("train", "training", "trainable", "train_on_turn"),
)
"""Keys of a message that say whether it carries loss: 0 or false is no loss."""
_SILENT_KEYS = ("masked",)
"""Keys that say the opposite."""
_OTHER_MASKS = ("mask", "train_detail", "training_detail")
"""Keys whose meaning is not known: a mask may name what is learned or what is not, and a detail
parts of the content."""
_NUMBERS = re.compile(
    r"(.*_)?(id|ids|idx|index|turn|round|step|number|count|counter|tokens|length|len|time|timestamp"
    r"|date|created|created_at|updated_at|score|rank|rating|votes?|temperature|top_p|top_k|seed"
    r"|identifier|toxic|toxicity|redacted|is_error|prefix|partial|latency|cost|confidence"
    r"|probability|logprob|duration|cutoff|depth|level|year)|(num|n|len)_.*",
    re.IGNORECASE,
)
"""Names of keys whose numbers say nothing about loss."""
REASONING = ("reasoning_content", "reasoning", "thinking")
_BESIDE_CONTENT = ("tool_calls", "function_call", *REASONING)


@dataclass(frozen=True)
class Form:
    """The messages of a conversation in a form in which templates take calls of tools."""

    messages: list[Message]
    arguments: list[dict[str, Any]]
    """Of the calls, as far as Python prints them otherwise than JSON."""


@dataclass(frozen=True)
class Chat:
    """A conversation for a chat template, which renders the first form that it does not refuse."""

    forms: list[Form]
    tools: list[object] | None
    loss: Literal["answers", "all", "none"]
    """What carries loss: answers of the assistant; all tokens; or none, of a conversation that the
    assistant continues."""
    learned: Sequence[int] = ()
    """The indices of the answers that carry loss."""
    weights: Mapping[int, float] | None = None
    """By index, those of the answers that carry loss (data.message_weights); None: each has 1."""
    part_weights: Mapping[str, float] | None = None
    """Of the parts of answers: reasoning, calls and answer, where not 1 (data.loss_weights); None: each
    has 1."""
    tools_column: str | None = None
    attached: Sequence[tuple[Modality, list[Source]]] = ()
    """The attachments of each kind that rows may have, in the order of their places."""
    weight: float | None = None
    """Of each token with loss (data.weights_column), times that of its message; None: 1."""
    objects: Objects | None = None
    """What the marks of objects in the texts stand for; None: the row has none."""


def read_chat(encoder: Encoder, found: Match, row: Values) -> Chat:
    """The conversation of a row of kind chat. Raises RowError."""
    column = found.columns["messages"]
    # Texts of a column of that name need not be turns
    turns = column.lower() != "texts" or encoder.columns.get("messages") == column
    messages = read_conversation(encoder, found, row, turns=turns)
    weights = encoder.columns.get("weights")
    weight = None if weights is None else float(read_weights(row, weights)[0])
    return chat_of_row(encoder, found, row, messages, weight=weight)


def read_conversation(encoder: Encoder, found: Match, row: Values, *, turns: bool) -> list[Message]:
    """The messages of a row, after its system prompt. turns: see `read_messages`. Raises
    RowError."""
    column = found.columns["messages"]
    if (value := row.get(column)) is None:
        raise RowError(f"column {column!r} is empty (null); it must hold messages")
    kinds, ignored = encoder.kinds, encoder.ignored
    messages = read_messages(
        value,
        column,
        turns=turns,
        attachments=kinds,
        ignored=ignored,
        weighted=bool(encoder.settings.get("message_weights")),
    )
    return with_system(encoder, found, row, messages)


def chat_of_row(
    encoder: Encoder,
    found: Match,
    row: Values,
    messages: list[Message],
    *,
    loss_from: int = 0,
    weight: float | None = None,
) -> Chat:
    """The messages with the attachments and tools of their row. loss_from: the index of the first
    message that may carry loss. Raises RowError."""
    attached = []
    for modality in encoder.modalities:
        messages, sources = place_of_row(messages, row, found, modality, encoder.ignored)
        attached.append((modality, sources))
    column = found.get("tools")
    tools = None if column is None else read_tools(row.get(column), column)
    objects = found.get("objects")
    loss_on = encoder.settings.get("loss_on")
    chat = chat_of(messages, tools, loss_from=loss_from, loss_on=loss_on)
    if encoder.settings.get("message_weights"):
        weights = {at: float(messages[at].get("loss", 1.0)) for at in chat.learned}
        chat = replace(chat, weights=weights)
    return replace(
        chat,
        part_weights=encoder.settings.get("loss_weights"),
        tools_column=column,
        attached=attached,
        weight=weight,
        objects=None if objects is None else read_objects(row.get(objects), objects),
    )


def chat_of(
    messages: list[Message],
    tools: list[object] | None = None,
    *,
    loss_from: int = 0,
    loss_on: str | None = None,
) -> Chat:
    """The conversation, with loss as data.loss_on says; None: the default. Raises RowError if a
    message is wrong, or if there is nothing to learn."""
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if loss_on == "last":
        loss_from = max([loss_from, *answers])
    refuse_empty_answers(messages, loss_from)
    forms = _forms(messages)
    silent = [at for at, message in enumerate(messages) if not message.get("loss", True)]
    if loss_on == "all":
        if silent:
            what = f"message {silent[0] + 1} is to carry no loss, but data.loss_on is all"
            raise RowError(what)
        return Chat(forms, tools, loss="all")
    wanted = [at for at in answers if at >= loss_from]
    learned = [at for at in wanted if at not in silent]
    if not learned:
        if wanted:
            raise RowError("no assistant turn carries loss, so nothing to learn from")
        raise RowError("no assistant turn, so nothing to learn from")
    return Chat(forms, tools, loss="answers", learned=learned)


def prompt_of(messages: list[Message], modalities: Sequence[Modality] = ()) -> Chat:
    """A conversation that the assistant continues. The text of a placeholder is no attachment. Raises
    RowError."""
    attached = []
    for modality in modalities:
        messages, sources = place(messages, None, modality, placeholders=False)
        attached.append((modality, sources))
    return Chat(_forms(messages), None, loss="none", attached=attached)


def read_messages(
    value: object,
    column: str,
    *,
    turns: bool = False,
    attachments: Sequence[str] = (),
    ignored: Collection[str] = (),
    weighted: bool = False,
) -> list[Message]:
    """Messages for a template: of `messages` (role, content), ShareGPT's `conversations` (from,
    value), or Gemini's `contents` (role, parts), also as JSON. Raises RowError.

    Text parts are joined, and parts of type reasoning become `reasoning_content`. Calls that are
    messages of their own, and those in parts, become `tool_calls`. Keys without a value are dropped;
    other keys stay. `loss` is false in the messages that have a `weight` of 0 (OpenAI) or `loss:
    false` (ShareGPT); with `weighted` it is another weight where there is one (data.message_weights). It is in
    no other message. turns: a list of texts are a user's and an assistant's in
    turn. attachments: their kinds; such parts stay parts, among the texts (`place`). ignored: keys of
    messages that are not used on purpose (data.ignore_columns).
    """
    value = parsed_messages(value)
    if turns and isinstance(value, list) and value and all(isinstance(t, str) for t in value):
        roles = ("user", "assistant")
        value = [{"role": roles[at % 2], "content": text} for at, text in enumerate(value)]
    if isinstance(value, list):
        value = [message for turn in value for message in _question_and_answer(turn)]
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        messages: list[Message] = []
        for number, turn in enumerate(value, start=1):
            turn = {key: content for key, content in turn.items() if key not in ignored}
            for message in _messages_of(turn, f"message {number}", attachments, weighted):
                _append(messages, message)
        return messages
    got = "an empty list" if value == [] else type(value).__name__
    form = "a list of messages, each with role and content (or from and value)"
    raise RowError(f"column {column!r} must hold {form}; got {got}")


def _question_and_answer(turn: object) -> list[object]:
    """The messages of a turn that holds several: {"human": ..., "assistant": ...} (ms-swift), perhaps
    with its "source" (the_cauldron), or {"system": ..., "input": ..., "output": ...} (xtuner); else
    the turn."""
    if not isinstance(turn, dict) or not {*_ROLE_KEYS}.isdisjoint(turn):
        return [turn]
    said = {_OTHER_ROLES.get(key, key): text for key, text in turn.items() if key != "source"}
    if said.keys() == {"user", "assistant"}:
        return [{"role": role, "content": said[role]} for role in ("user", "assistant")]
    if not {"input", "output"} <= said.keys() <= {"system", "input", "output", "output_with_loss"}:
        return [turn]
    answer = {"role": "assistant", "content": said["output"]}
    answer["output_with_loss"] = said.get("output_with_loss")
    asked = {"system": said.get("system"), "user": said["input"]}
    return [*({"role": role, "content": text} for role, text in asked.items() if text), answer]


def parsed_messages(value: object) -> object:
    """A list of messages, if the value is such a list as JSON, a single message, or an object with
    the key `messages`; else the value."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return parsed if _looks_like_messages(parsed) else value
    if isinstance(value, dict):
        if isinstance(value.get("messages"), list):
            return value["messages"]
        return [value] if _looks_like_messages([value]) else value
    return value


def _looks_like_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and any(key in turn for key in _ROLE_KEYS) for turn in value)
    )


_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant): ?")


def dialogue(text: str) -> list[Message] | None:
    """The turns of a dialogue as text, `\\n\\nHuman: ...\\n\\nAssistant: ...` (Anthropic's HH);
    None: it is none. An empty last turn, which is to be answered, is dropped."""
    parts = _SPEAKER.split(text)
    if parts[0].strip() or parts[1:2] != ["Human"]:
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    turns = [{"role": roles[speaker], "content": said.strip()} for speaker, said in pairs]
    return turns[:-1] if not turns[-1]["content"] else turns


def _append(messages: list[Message], message: Message) -> None:
    """Appends a message. Calls of an assistant's message without another text belong to the
    assistant's message before, if that is one."""
    before = messages[-1] if messages else None
    if (
        before is not None
        and before["role"] == message["role"] == "assistant"
        and message.keys() <= {"role", "content", "tool_calls"}
        and message.get("tool_calls")
        and not message["content"]
    ):
        before["tool_calls"] = [*before.get("tool_calls", ()), *message["tool_calls"]]
    else:
        messages.append(message)


def _messages_of(
    turn: Message, what: str, attachments: Sequence[str], weighted: bool
) -> list[Message]:
    """The message of a turn; before it, those of results of tools in its parts."""
    message = {key: content for key, content in turn.items() if content is not None}
    role_key = next((key for key in _ROLE_KEYS if key in message), "role")
    role = message.pop(role_key, None)
    content_key = next((key for key in _CONTENT_KEYS if key in message), "content")
    content = message.pop(content_key, None)
    if isinstance(role, str):
        known = role.strip().lower()
        role = known if known in (*_ROLES, *_CALLS) else _OTHER_ROLES.get(known, role)
    message = {"role": role, "content": content, **message}
    if role in _CALLS:
        message |= {"role": "assistant", "content": "", "tool_calls": _written_calls(content, what)}
    if not isinstance(message.get("function_call", {}), dict):
        raise RowError(f"{what}: function_call must be an object with name and arguments")
    if function := message.get("function_call"):
        message["function_call"] = _with_arguments(function, what)
    if message["role"] not in _ROLES:
        got = "no role" if role is None else f"unknown role {role!r}"
        others = ", ".join([*_ROLES, *_OTHER_ROLES, *_CALLS])
        raise RowError(f"{what}: {got}; must be one of {others}")
    for kind in attachments:
        message = _with_own_attachments(message, what, kind)
    if seen := [key for key in BESIDE_TEXT if message.get(key)]:
        raise RowError(f"{what}: {_only(attachments)}; got {', '.join(seen)}")
    results: list[Message] = []
    if isinstance(message["content"], list):
        message, results = _with_parts(message, what, attachments)
    # Templates that only ask whether there is the key would write a call instead of the content
    if calls := _tool_calls(message.pop("tool_calls", None), what):
        message["tool_calls"] = calls
    content = message["content"]
    if content is None and any(message.get(key) for key in _BESIDE_CONTENT):
        content = ""
    if not isinstance(content, str) and not (attachments and isinstance(content, list)):
        got = "nothing" if content is None else type(content).__name__
        raise RowError(f"{what}: content must be text, or a list of text parts; got {got}")
    weight = _loss_weight(message, what, weighted)
    loss = {} if weight == 1 else {"loss": weight if weight else False}
    if results and not content:
        return results
    return [*results, {**message, "content": content, **loss}]


def _loss_weight(message: Message, what: str, weighted: bool) -> float:
    """Takes the keys out of a message that say whether it carries loss; its weight in the loss: 0 or
    1, or any other if it may be `weighted`. Raises RowError, also for numbers of which that is not
    known."""
    given = {key: message.pop(key) for key in (*_LOSS_KEYS, *_SILENT_KEYS) if key in message}
    wrong = [
        f"{key}: {value!r}"
        for key, value in given.items()
        if value not in (0, 1) and not (weighted and key not in _SILENT_KEYS and _is_weight(value))
    ]
    if wrong:
        form = "whether it carries loss must be 0 or 1 (false or true)"
        if weighted:
            form = "its weight in the loss must be 0, or from 1e-20 to 1e20"
        elif all(map(_is_weight, given.values())):
            form += ", unless data.message_weights is true"
        raise RowError(f"{what}: {form}; got {', '.join(wrong)}")
    unknown = [
        key
        for key, value in message.items()
        if key in _OTHER_MASKS
        or (isinstance(value, bool | int | float) and not _NUMBERS.fullmatch(key))
    ]
    if unknown:
        values = ", ".join(f"{key}: {message[key]!r}" for key in unknown)
        raise RowError(
            f"{what}: {values}: does it say what carries loss? write loss: false in a message without "
            f"loss; {typed('data.ignore_columns', unknown)} trains without "
            f"{'it' if len(unknown) == 1 else 'them'}"
        )
    weights = {float(1 - value if key in _SILENT_KEYS else value) for key, value in given.items()}
    if len(weights) > 1:
        values = ", ".join(f"{key}: {value!r}" for key, value in given.items())
        differ = "one says that it carries loss, another that it carries none"
        if weights != {0, 1}:
            differ = "these weights differ"
        raise RowError(
            f"{what}: {values}: {differ}; "
            f"{typed('data.ignore_columns', [[*given][-1]])} trains without the last one"
        )
    return next(iter(weights), 1.0)


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and (value == 0 or 1e-20 <= value <= 1e20)


def _only(attachments: Sequence[str]) -> str:
    """What a run trains on, for the message about parts that are something else."""
    *first, last = ["text", *(ATTACHMENTS[kind] for kind in attachments)]
    seen = f"{', '.join(first)} and {last}" if first else last
    more = [ATTACHMENTS[kind] for kind in ATTACHMENTS if kind not in attachments]
    sections = "".join(f", or with the section {n} ({n}.train=none) {n}, too" for n in more)
    return f"only {seen} can be trained on{sections}"


def _with_own_attachments(message: Message, what: str, kind: str) -> Message:
    """The message with the attachments of its keys KIND and KINDs in the places that its content has
    for them, or as its first parts if it has none. Raises RowError if their numbers differ."""
    nouns = ATTACHMENTS[kind]
    own = [message.pop(key) for key in (nouns, kind) if message.get(key)]
    if not own:
        return message
    values = [value for held in own for value in (held if isinstance(held, list) else [held])]
    content, mark = message["content"], placeholder_of(kind)
    parts: list[object] = []
    places = []
    for part in content if isinstance(content, list) else [content or ""]:
        of_kind = is_part_of(part, kind)
        if of_kind and lacks_file(part, kind):
            places.append(len(parts))
            parts.append(part)
            continue
        text = part if isinstance(part, str) else None if of_kind else _text_of(part)
        if text is None or mark not in text:
            parts.append(part)
            continue
        for number, piece in enumerate(text.split(mark)):
            if number:
                places.append(len(parts))
                parts.append(None)
            parts.append(piece)
    if places and len(places) != len(values):
        raise RowError(f"{what}: has {len(values)} {nouns}, and its text shows {len(places)}")
    if not places:
        return {**message, "content": [*({"type": kind, kind: v} for v in values), *parts]}
    for at, value in zip(places, values, strict=True):
        parts[at] = {"type": kind, kind: value}
    return {**message, "content": parts}


def _with_parts(
    message: Message, what: str, attachments: Sequence[str]
) -> tuple[Message, list[Message]]:
    """A message whose content is a list of parts, with its text, reasoning and calls; and the
    messages of the results of tools in it. attachments: their kinds; a content with such parts
    stays a list."""
    texts: list[str | dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[object] = []
    results: list[Message] = []
    others = []
    for part in message["content"]:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = _text_of(part)
        if kind in ("reasoning", "thinking") and text is not None:
            thoughts.append(text)
        elif kind == "tool_use" and isinstance(part.get("name"), str):
            calls.append(
                {
                    "type": "function",
                    "function": {"name": part["name"], "arguments": part.get("input") or {}},
                }
            )
        elif kind == "tool_result":
            inner = part.get("content") or ""
            inner = _joined(inner) if isinstance(inner, list) else inner
            if not isinstance(inner, str):
                raise RowError(f"{what}: the result of a tool must be text")
            results.append({"role": "tool", "content": inner})
        elif any(is_part_of(part, each) for each in attachments):
            texts.append(part)
        elif kind in (None, "text", "input_text", "output_text") and text is not None:
            texts.append(text)
        else:
            others.append(kind or f"with the keys {', '.join(part)}")
    if others:
        raise RowError(f"{what}: {_only(attachments)}; got parts of the types {others}")
    content = texts if any(isinstance(part, dict) for part in texts) else "".join(map(str, texts))
    made = {**message, "content": content}
    if thoughts and not any(made.get(key) for key in REASONING):
        made["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made, results


def plain_content(content: object) -> str:
    """The content of a message as text, with the placeholders of its attachments."""
    return " ".join(
        part if isinstance(part, str) else str(part.get("text", _mark_of(part)))
        for part in ([content] if isinstance(content, str) else content)  # type: ignore[attr-defined]
    )


def _mark_of(part: object) -> str:
    return next((placeholder_of(kind) for kind in ATTACHMENTS if is_part_of(part, kind)), "")


def _text_of(part: object) -> str | None:
    if not isinstance(part, dict):
        return None
    keys = ("text", "value", "content", "reasoning", "thinking")
    found = (part[key] for key in keys if isinstance(part.get(key), str))
    return next(found, None)


def _joined(parts: list[object]) -> str | None:
    texts = [part if isinstance(part, str) else _text_of(part) for part in parts]
    known = [text for text in texts if text is not None]
    return "".join(known) if len(known) == len(texts) else None


def _written_calls(value: object, what: str) -> list[object]:
    """The calls of a message whose role says that it holds some: an object, or a list of them, also
    as JSON. Raises RowError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{what}: its tool call is not JSON: {error}") from None
    return read_calls(value, what)


def read_calls(value: object, what: str) -> list[object]:
    """Calls in the form of a message's `tool_calls`, of one or several objects with name and
    arguments. Raises RowError."""
    calls = value if isinstance(value, list) else [value]
    made: list[object] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{what}: a tool call must be an object with name and arguments")
        arguments = _with_arguments(function, what)["arguments"]
        named = {"name": function["name"], "arguments": arguments}
        made.append({"type": "function", "function": named})
    return made


def _with_arguments(function: Message, what: str) -> Message:
    """A called function with its arguments under the name that templates read. Raises RowError."""
    given = {key: function[key] for key in _ARGUMENTS if function.get(key) is not None}
    if len(given) > 1:
        raise RowError(f"{what}: a tool call has {' and '.join(given)}; keep one of them")
    others = {key: value for key, value in function.items() if key not in _ARGUMENTS}
    return {**others, "arguments": next(iter(given.values()), {})}


def _tool_calls(value: object, what: str) -> list[object] | None:
    """A list of calls, or a list as JSON; None: there are none. Raises RowError."""
    calls = read_list(value, f"{what}: tool_calls")
    made: list[object] = []
    for call in calls or []:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            raise RowError(f"{what}: tool_calls must be a list of objects, each with a function")
        function = _with_arguments(function, what)
        made.append({**call, "function": function} if "function" in call else function)
    return made or None


def read_tools(value: object, column: str = "tools") -> list[object] | None:
    """The tools in a column of a row: a list, or a list as JSON. A bare function becomes
    {"type": "function", "function": {...}}, which templates expect. Raises RowError."""
    try:
        tools = read_list(value, f"column {column!r}")
    except RowError as error:
        what = f"{typed('data.ignore_columns', [column])} if it has no descriptions of tools"
        raise RowError(f"{error}; {what}") from None
    return None if tools is None else [_described(tool) for tool in tools]


def unused_tools(column: str | None, why: str) -> str:
    """The problem of a row whose tools the model would not see."""
    hint = f"set data.chat_template to one that reads them, or {typed('data.ignore_columns', [column])}"
    return f"the model would not see the row's tools: {why}; {hint}"


def _described(tool: object) -> object:
    bare = isinstance(tool, dict) and "name" in tool and "function" not in tool
    if isinstance(tool, dict) and bare and tool.get("type", "function") == "function":
        function = {key: value for key, value in tool.items() if key != "type"}
        return {"type": "function", "function": function}
    return tool


def with_system(
    encoder: Encoder, found: Match, row: Values, messages: list[Message]
) -> list[Message]:
    """The messages after the system prompt of the row's column, or else after the default one if they
    have none. Raises RowError."""
    column, default = found.get("system") or "system", encoder.settings.get("system")
    value = row.get(column) if "system" in found.columns else None
    if isinstance(value, dict):  # Gemini's systemInstruction
        value = value.get("parts", value.get("content"))
    if isinstance(value, list) and value:
        value = _joined(value) or value
    own = read_text(value, column)
    if not messages or not (own or default):
        return messages
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": own or default}, *messages]
    if own and first["content"] != own:
        raise RowError(f"column {column!r} and message 1 hold different system prompts; remove one")
    return messages


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


def _forms(messages: list[Message]) -> list[Form]:
    """The forms in which templates take tool calls. Some (DeepSeek's) take the arguments only as
    text, or see the calls only in messages without content. Mistral's want ids of nine letters."""
    parsed, forms = parse_arguments(messages), list[list[Message]]()
    for form in (parsed, write_arguments(messages)):
        bare = [
            {**message, "content": None}
            if message.get("tool_calls") and not message["content"]
            else message
            for message in form
        ]
        forms += [each for each in (form, bare) if each not in forms]
    if any(message.get("tool_calls") for message in parsed):
        forms.append(_with_ids(parsed))
    return [
        Form(form, [one for one in arguments_of(form) if repr(one) != to_json(one)])
        for form in forms
    ]


def _with_ids(messages: list[Message]) -> list[Message]:
    """The messages with other ids of tool calls, of nine letters and digits. Results without an id
    belong to the calls in their order."""
    made, open_calls, changed = dict[str, str](), list[str](), list[Message]()
    for number, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            numbered = []
            for at, call in enumerate(calls):
                text = json.dumps([number, at, call], sort_keys=True, default=str)
                own = hashlib.sha256(text.encode()).hexdigest()[:9]
                made[str(call.get("id"))] = own
                open_calls.append(own)
                numbered.append({**call, "id": own})
            message = {**message, "tool_calls": numbered}
        elif message["role"] == "tool" and open_calls:
            given = message.get("tool_call_id")
            known = made.get(str(given)) if given else None
            own = known if known in open_calls else open_calls[0]
            open_calls.remove(own)
            message = {**message, "tool_call_id": own}
        changed.append(message)
    return changed


def parse_arguments(messages: list[Message]) -> list[Message]:
    """The messages with the arguments of tool calls as objects, also those that are JSON (OpenAI):
    templates write objects as JSON, so JSON would be encoded twice. Raises RowError."""
    return [
        _with_changed_arguments(message, partial(_parsed, what=f"message {number}"))
        for number, message in enumerate(messages, 1)
    ]


def write_arguments(messages: list[Message]) -> list[Message]:
    """The messages with the arguments of tool calls as JSON."""
    return [
        _with_changed_arguments(
            message,
            lambda value: value if value and isinstance(value, str) else to_json(value or {}),
        )
        for message in messages
    ]


def to_json(value: object) -> str:
    """The value as templates write it with `tojson`."""
    return json.dumps(value, ensure_ascii=False)


def arguments_of(messages: list[Message]) -> list[dict[str, Any]]:
    """The arguments of all tool calls that are objects."""
    found: list[dict[str, Any]] = []

    def look(value: object) -> object:
        if isinstance(value, dict):
            found.append(value)
        return value

    for message in messages:
        _with_changed_arguments(message, look)
    return found


def print_arguments(messages: list[Message]) -> list[Message]:
    """The messages with each argument of tool calls that is no text or number as JSON, for templates
    that print them one by one."""

    def printed(value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {
            key: to_json(each) if each is None or isinstance(each, bool | dict | list) else each
            for key, each in value.items()
        }

    return [_with_changed_arguments(message, printed) for message in messages]


def _with_changed_arguments(value: Any, change: Callable[[object], object]) -> Any:
    """A message, call or function with changed `arguments`."""
    if not isinstance(value, dict):
        return value
    changed = dict(value)
    for key in ("function_call", "function"):
        if key in value:
            changed[key] = _with_changed_arguments(value[key], change)
    if isinstance(calls := value.get("tool_calls"), list):
        changed["tool_calls"] = [_with_changed_arguments(call, change) for call in calls]
    if "role" not in value and "arguments" in value:
        changed["arguments"] = change(value["arguments"])
    return changed


def _parsed(value: object, what: str) -> object:
    given = value
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RowError(f"{what}: the arguments of a tool call are not JSON: {error}") from None
    value = {} if value is None or value == [] else value
    if not isinstance(value, dict):
        raise RowError(f"{what}: the arguments of a tool call must be an object; got {given}")
    return value


def refuse_empty_answers(messages: list[Message], loss_from: int) -> None:
    """Raises RowError if a turn of the assistant that may carry loss, from that index on, is empty:
    it would teach to say nothing."""
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for number, at in enumerate(turns, start=1):
        message = messages[at]
        content = message["content"]
        said = content.strip() if isinstance(content, str) else content
        if at < loss_from or not message.get("loss", True) or said:
            continue
        if not any(message.get(key) for key in _BESIDE_CONTENT):
            raise RowError(
                f"turn {number} of the assistant is empty, so there is nothing to learn from; "
                "loss: false in the message keeps it without loss"
            )


def instruction(parts: dict[str, object], rounds: list[tuple[str, str]], *, headings: bool) -> str:
    """Instruction and input as one prompt. parts: their values, or null, by the names of their
    columns, the instruction first. headings: in Alpaca's form, after earlier rounds."""
    texts: list[str] = []
    for column, text in parts.items():
        if not isinstance(text, str) and (text is not None or not texts):
            raise RowError(f"column {column!r} must hold text; got {type(text).__name__}")
        texts.append(text or "")
    if not headings:
        return "\n\n".join(text for text in texts if text)
    named = list(zip(("Instruction", "Input"), texts, strict=False))
    shown = [(name, text) for name, text in named if text or name == "Instruction"]
    before = [f"### Instruction:\n{asked}\n\n### Response:\n{told}" for asked, told in rounds]
    own = [f"### {name}:\n{text}" for name, text in shown]
    return "\n\n".join([*before, *own, "### Response:\n"])
