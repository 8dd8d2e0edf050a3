"""The tokens that end documents and answers in the training data."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.data.encoder import Encoder, make_encoder, prompt_format
from launcher.data.messages import Message
from launcher.data.template_source import variables
from launcher.data.tokenizer import hugging_face_tokenizer, load_tokenizer
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from launcher.sources.layouts import KINDS
from launcher.sources.rows import Row, SourcePart

logger = logging.getLogger(__name__)

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


def stop_token_ids(data: schema.Data, *, tokenizer: str | None) -> list[int]:
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


KNOWN_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|eom_id|>"),
        *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOT>"),
        *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>"),
    )
)
"""Tokens at which llama.cpp stops by their texts (llama-vocab.cpp). It also stops at the eos_token of
tokenizer_config.json, and reads no generation_config.json."""


def own_end(
    ids: Sequence[int], *, tokenizer: str, template: str | None, known: Collection[int]
) -> str | None:
    """The token that must be the eos_token of an export, or programs that read only the tokenizer's
    files would not stop: the only end of answers that is neither the eos_token nor a known one. None:
    there is none, or the chat template writes the eos_token. ids: see `stop_token_ids`. template: of the
    run; None: the tokenizer's own. known: ids at which the model stopped before."""
    loaded = hugging_face_tokenizer(tokenizer)
    ends: list[str] = loaded.convert_ids_to_tokens([*ids])
    taught = [end for id, end in zip(ids, ends, strict=True) if id not in known]
    own = [end for end in taught if end != loaded.eos_token and end not in KNOWN_ENDS]
    if not own:
        return None
    source = template or loaded.chat_template
    written = not isinstance(source, str) or "eos_token" in (variables(source) or ())
    needed = loaded.eos_token in ends and loaded.eos_token not in KNOWN_ENDS
    if own[1:] or written or needed or loaded.eos_token is None:
        logger.warning(
            f"programs that read no generation_config.json, such as llama.cpp, do not stop at "
            f"{' and '.join(own)}: name it as a stop word there"
        )
        return None
    return own[0]


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
