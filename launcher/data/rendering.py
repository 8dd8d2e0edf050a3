"""Conversations of rows, rendered by a chat template."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable

from launcher.data.chat_template import ChatTemplate, Rendered
from launcher.data.messages import (
    Message,
    RefusedError,
    RowError,
    arguments_of,
    encodable,
    parse_arguments,
    print_arguments,
    read_text,
    read_tools,
    refuse_empty_answers,
    to_json,
    write_arguments,
)
from launcher.data.template_marks import uses_tools
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.recipe.layouts import typed
from launcher.sources.rows import Values


@functools.lru_cache(maxsize=4)
def load_template(
    tokenizer: str | None, template: str | None, day: str | None, values: str
) -> ChatTemplate:
    """template: None: the tokenizer's own. day: YYYY-MM-DD, for templates that print one. values:
    JSON of data.chat_template_kwargs. Raises RecipeError if no template can be used."""
    assert tokenizer is not None
    loaded = hugging_face_tokenizer(tokenizer)
    return ChatTemplate(loaded, tokenizer, template, day=day, values=json.loads(values))


def render(
    template: ChatTemplate,
    row: Values,
    tools_column: str | None,
    messages: list[Message],
    *,
    loss_from: int,
    loss_on: str | None,
) -> Rendered:
    """The messages with the tools in a column of the row.

    loss_from is the index of the first message that may carry loss; loss_on is data.loss_on, or
    None for the default. Raises RowError.
    """
    tools = _tools(row, tools_column)
    if tools and not uses_tools(template.source(tools)):
        raise RowError(_unused_tools(tools_column, "the chat template does not read them"))
    if loss_on == "last":
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        loss_from = max([loss_from, *turns])
    refuse_empty_answers(messages, loss_from)
    apply: Callable[..., Rendered] = template.render_all
    if loss_on != "all":
        apply = functools.partial(template.render, loss_from=loss_from)
    return _render(template, apply, messages, tools)


def render_prompt(template: ChatTemplate, messages: list[Message]) -> Rendered:
    """A conversation that the assistant continues, with its messages as in `render`. Raises
    RowError."""
    return _render(template, template.render_prompt, messages, None)


def _render(
    template: ChatTemplate,
    apply: Callable[..., Rendered],
    messages: list[Message],
    tools: list[object] | None,
) -> Rendered:
    """The rendering of the first form of the messages that the template does not refuse. Raises
    RowError, the problem of the first form if it refuses them all."""
    problem: RefusedError | None = None
    for form in _forms(messages):
        try:
            rendered = _in_json(template, apply, form, tools)
        except RefusedError as error:
            problem = problem or error
        else:
            encodable(rendered.text, "the conversation")
            return rendered
    assert problem is not None
    raise problem


def _forms(messages: list[Message]) -> list[list[Message]]:
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
    return forms


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


_WORDS = re.compile(r"\b(True|False|None)\b")
_JSON = {"True": "true", "False": "false", "None": "null"}
_AS_PYTHON = "the chat template prints arguments of a call as Python does, not as JSON"


def _in_json(
    template: ChatTemplate,
    apply: Callable[..., Rendered],
    messages: list[Message],
    tools: list[object] | None,
) -> Rendered:
    """The rendering, with arguments of calls as JSON also where the template prints each one by
    itself, as Python does. Raises RefusedError if it prints them as a whole, and RowError if it does
    not print their JSON, either."""
    rendered, calls = apply(messages, tools), arguments_of(messages)
    whole = [arguments for arguments in calls if repr(arguments) != to_json(arguments)]
    keywords = [(f"({key}=", f", {key}=") for arguments in whole for key in arguments]
    if all(first in rendered.text or later in rendered.text for first, later in keywords):
        return rendered  # the template writes calls in Python (LFM2.5), or there are none
    if any(repr(arguments) in rendered.text for arguments in whole):
        what = "set data.chat_template to a template that writes them with tojson"
        raise RefusedError(f"{_AS_PYTHON}; {what}")
    values = [value for arguments in whole for value in arguments.values()]
    nested = [repr(value) for value in values if isinstance(value, dict | list) and value]
    leaves = _leaves(values)
    words = {str(value) for value in leaves if value is None or isinstance(value, bool)}
    shown = words.intersection(_WORDS.findall(rendered.text))
    if not shown and not any(text in rendered.text for text in nested):
        return rendered
    changed = print_arguments(messages)
    json_of = {repr(value): to_json(value) for value in values if isinstance(value, dict | list)}

    def as_json(text: str) -> str:
        for python in sorted(json_of, key=len, reverse=True):
            text = text.replace(python, json_of[python])
        return _WORDS.sub(lambda word: _JSON[word[0]], text)

    plain = template.apply(messages, tools)
    try:
        printed = template.apply(changed, tools)
    except RefusedError:  # it takes values apart
        same = False
    else:
        same = as_json(plain) == as_json(printed)
        words_of_calls = len(_WORDS.findall(plain)) - len(_WORDS.findall(printed))
        if not words_of_calls and not any(text in plain for text in nested):
            return rendered  # the words are in other texts
    if not same:
        got = ", ".join(sorted(shown)) or "lists or objects"
        what = (
            "leave them out, or set data.chat_template to a template that writes them with tojson"
        )
        raise RowError(f"{_AS_PYTHON} ({got}); {what}")
    template.note("printed", f"{_AS_PYTHON}: each one is written as JSON")
    return apply(changed, tools)


def _leaves(value: object) -> list[object]:
    """What is in lists and objects, at any depth."""
    if not isinstance(value, dict | list):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    return [leaf for each in inner for leaf in _leaves(each)]


def render_text(
    row: Values,
    tools_column: str | None,
    prompt: str,
    response: str,
    *,
    system_column: str | None,
    default: str | None,
) -> tuple[str, str]:
    """Prompt and response as they are, the prompt after the system prompt of the row's column, or
    else after the default one. Raises RowError."""
    if _tools(row, tools_column):
        raise RowError(_unused_tools(tools_column, "text is trained on without a chat template"))
    system = default
    if system_column is not None:
        system = read_text(row.get(system_column), system_column) or default
    prompt = f"{system}\n\n{prompt}" if system else prompt
    encodable(prompt + response, "prompt or response")
    return prompt, response


def _tools(row: Values, column: str | None) -> list[object] | None:
    return None if column is None else read_tools(row.get(column), column)


def _unused_tools(column: str | None, why: str) -> str:
    hint = f"set data.chat_template to one that reads them, or {typed('data.ignore_columns', [column])}"
    return f"the model would not see the row's tools: {why}; {hint}"
