"""The tokens that end documents and answers in the training data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.data.encoder import Encoder, make_encoder, prompt_format
from launcher.data.messages import Message
from launcher.data.sources import Row, SourcePart
from launcher.data.tokenizer import hugging_face_tokenizer, load_tokenizer
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from launcher.recipe.layouts import KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALLS = [
    {"id": f"call0000{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for number in range(2)
]
_ASKED: Message = {"role": "user", "content": "Hello"}
_ANSWER: Message = {"role": "assistant", "content": "Hi"}
_CALL: Message = {"role": "assistant", "content": "", "tool_calls": _CALLS[:1]}
_RESULT: Message = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "a"}
_PROBES: tuple[list[Message], ...] = (
    [_ASKED, _ANSWER],
    [_ASKED, _ANSWER, _ASKED, _ANSWER],
    [_ASKED, _CALL],
    [_ASKED, {**_CALL, "tool_calls": _CALLS}],
    [_ASKED, _CALL, _RESULT, _ANSWER],
)
"""Chats with all ways in which a turn can end: a last answer, one before a question, a call,
several calls, and a call before its result."""


def taught_ends(data: schema.Data, *, tokenizer: str | None) -> list[int]:
    """Ids of the tokens at which a model that is trained on the data stops, without reading the
    data. Empty for kinds tokens and classification, and for data.builder. tokenizer: see
    `tokenizer_name`."""
    name = tokenizer
    if data.builder is not None or name is None:
        return []
    sources = data.sources().values()
    prompts = [source for source in sources if KINDS[source.kind].answers]
    ends = set()
    as_text = any(prompt_format(source, name) == "text" for source in prompts)
    if as_text or any(source.kind == "text" for source in sources):
        ends.add(load_tokenizer(name).end)
    # A prompt and its answers may be lists of messages
    if any(KINDS[source.kind].conversation for source in sources) or (
        prompts and (data.chat_template or hugging_face_tokenizer(name).chat_template)
    ):
        ends.update(_ends_of_turns(make_encoder("chat", data, tokenizer=name)))
    return sorted(ends)


def _ends_of_turns(encoder: Encoder) -> set[int]:
    """The last token of each turn with loss in the probes, apart from white space, if it is no
    text. A template may refuse some of the probes, such as tool calls."""
    assert encoder.tokenizer is not None
    tokenizer = hugging_face_tokenizer(encoder.tokenizer)
    added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    settings = {**encoder.settings}
    if settings.get("loss_on") == "all":  # its last token is that of the conversation
        settings.pop("loss_on")
    rows = [
        Row(SourcePart("probe", "jsonl"), 0, {"messages": messages, "tools": tools})
        for messages in _PROBES
        for tools in (None, _TOOLS)
    ]
    probing = replace(encoder, columns={}, settings=settings)
    ends, inner = set[int](), set[int]()
    for encoded in probing.encode_rows(rows):
        if encoded.labels is None:  # the template refuses it
            continue
        for body, closing in _turns(encoded.labels.tolist(), tokenizer, added):
            ends.update(closing[-1:])
            inner.update(body)
    return ends - inner  # such as the end of one of several calls


def _turns(
    labels: list[int], tokenizer: PreTrainedTokenizerBase, added: set[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Each part with loss, without white space at its end: its tokens up to those that end it, and
    these."""
    for learned, run in itertools.groupby(labels, key=lambda label: label != IGNORED):
        body, closing = [*run], list[int]()
        while learned and body and (body[-1] in added or not tokenizer.decode(body[-1:]).strip()):
            token = body.pop()
            closing = [token, *closing] if token in added else closing
        if learned:
            yield body, closing
