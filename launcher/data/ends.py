"""The tokens that end documents and answers in the training data."""

from __future__ import annotations

from dataclasses import replace

from launcher.data.encoder import Encoder, make_encoder, prompt_format
from launcher.data.sources import Row, SourcePart
from launcher.data.tokenizer import hugging_face_tokenizer, load_tokenizer
from launcher.models.inputs import IGNORED
from launcher.recipe import schema

_PROBE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def taught_ends(data: schema.Data, *, tokenizer: str | None) -> list[int]:
    """Ids of the tokens at which a model that is trained on the data stops, without reading the
    data. Empty for kinds tokens and classification, and for data.builder. tokenizer: see
    `tokenizer_name`."""
    name = tokenizer
    if data.builder is not None or name is None:
        return []
    kinds = {source.kind for source in data.sources().values()}
    kinds = {"instruct" if kind == "preference" else kind for kind in kinds}
    ends = set()
    prompts = [one for one in data.sources().values() if one.kind in ("instruct", "preference")]
    as_text = any(prompt_format(source, name) == "text" for source in prompts)
    if "text" in kinds or as_text:
        ends.add(load_tokenizer(name).end)
    # Rows of kind instruct may be lists of messages
    if "chat" in kinds or (
        "instruct" in kinds and (data.chat_template or hugging_face_tokenizer(name).chat_template)
    ):
        ends.update(_end_of_turn(make_encoder("chat", data, tokenizer=name)))
    return sorted(ends)


def _end_of_turn(encoder: Encoder) -> list[int]:
    """The last token with loss of a short chat, apart from white space, if it is no text."""
    row = Row(SourcePart("probe", "jsonl"), 0, {"messages": _PROBE})
    (encoded,) = replace(encoder, columns={}).encode_rows([row])
    if encoded.labels is None:  # the template refuses it
        return []
    assert encoder.tokenizer is not None
    tokenizer = hugging_face_tokenizer(encoder.tokenizer)
    added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    for token in reversed(encoded.labels[encoded.labels != IGNORED].tolist()):
        if token in added:
            return [token]
        if tokenizer.decode([token]).strip():
            break
    return []
