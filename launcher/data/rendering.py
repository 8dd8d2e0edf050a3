"""Conversations of rows, rendered by a chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

from launcher.data.chat import Message, RefusedError, encodable, parse_arguments, read_tools
from launcher.data.chat_template import ChatTemplate, Rendered
from launcher.data.sources import Values
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
    if loss_on == "last":
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        loss_from = max([loss_from, *turns])
    apply: Callable[..., Rendered] = template.render_all
    if loss_on != "all":
        apply = functools.partial(template.render, loss_from=loss_from)
    try:
        rendered = apply(parsed, tools)
    except RefusedError:
        if parsed == messages:
            raise
        # Some templates (DeepSeek-R1's) take the arguments of tool calls only as text
        rendered = apply(messages, tools)
    encodable(rendered.text, "the conversation")
    return rendered
