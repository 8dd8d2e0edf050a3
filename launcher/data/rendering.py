"""Conversations of rows, rendered by a chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

from launcher.data.chat import (
    Message,
    RefusedError,
    RowError,
    encodable,
    parse_arguments,
    read_text,
    read_tools,
)
from launcher.data.chat_template import ChatTemplate, Rendered
from launcher.data.sources import Values
from launcher.data.template_marks import uses_tools
from launcher.data.tokenizer import hugging_face_tokenizer


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
    messages: list[Message],
    *,
    loss_from: int,
    loss_on: str | None,
) -> Rendered:
    """The messages with the row's tools. loss_from is the index of the first message that may carry
    loss; loss_on is data.loss_on, or None for the default. Raises RowError."""
    tools, parsed = read_tools(row.get("tools")), parse_arguments(messages)
    if tools and not uses_tools(template.source(tools)):
        raise RowError(_unused_tools("the chat template does not read them"))
    if loss_on == "last":
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        loss_from = max([loss_from, *turns])
    apply: Callable[..., Rendered] = template.render_all
    if loss_on != "all":
        apply = functools.partial(template.render, loss_from=loss_from)
    rendered = _first(apply, _forms(parsed, messages), tools)
    encodable(rendered.text, "the conversation")
    return rendered


def _forms(parsed: list[Message], messages: list[Message]) -> list[list[Message]]:
    """The forms in which templates take tool calls. Some (DeepSeek's) take the arguments only as
    text, or see the calls only in messages without content."""
    forms: list[list[Message]] = []
    for form in (parsed, messages):
        bare = [
            {**message, "content": None}
            if message.get("tool_calls") and not message["content"]
            else message
            for message in form
        ]
        forms += [each for each in (form, bare) if each not in forms]
    return forms


def _first(
    apply: Callable[..., Rendered], forms: list[list[Message]], tools: list[object] | None
) -> Rendered:
    """The rendering of the first form that the template does not refuse, or else the problem of
    the first one."""
    problem: RefusedError | None = None
    for form in forms:
        try:
            return apply(form, tools)
        except RefusedError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def render_text(
    row: Values, prompt: str, response: str, *, column: str, default: str | None
) -> tuple[str, str]:
    """Prompt and response as they are, the prompt after the system prompt of the row's column, or
    else after the default one. Raises RowError."""
    if read_tools(row.get("tools")):
        raise RowError(_unused_tools("text is trained on without a chat template"))
    system = read_text(row.get(column), column) or default
    prompt = f"{system}\n\n{prompt}" if system else prompt
    encodable(prompt + response, "prompt or response")
    return prompt, response


def _unused_tools(why: str) -> str:
    hint = "set data.chat_template to one that reads them, or remove tools from the row"
    return f"the model would not see the row's tools: {why}; {hint}"
