"""Rows into token ids, for each kind of data."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from launcher.data.chat import (
    Message,
    RowError,
    encodable,
    instruction,
    read_history,
    read_messages,
    with_system,
)
from launcher.data.chat_template import ChatTemplate, Rendered
from launcher.data.columns import Weights, read_column, read_integers, read_margin, read_weights
from launcher.data.pairs import different, with_shared_prompt
from launcher.data.rendering import load_template, render, render_text
from launcher.data.sources import Row, SourcePart, Values, in_batches, read_all
from launcher.data.template_marks import today, uses_date
from launcher.data.tokenizer import (
    Ids,
    Tokenizer,
    load_tokenizer,
    prints_date,
    tokenizer_identity,
)
from launcher.errors import RecipeError
from launcher.models.inputs import IGNORED
from launcher.recipe import schema

_Tokens = tuple[Any, ...]
"""Ids, labels, category and perhaps cut_tokens and weights of a row, as in Encoded."""
_COLUMNS: dict[schema.DataKind, tuple[str, ...]] = {
    "text": ("text_column",),
    "tokens": (),
    "chat": ("messages_column",),
    "instruct": ("prompt_column", "response_column"),
    "classification": ("text_column", "label_column"),
    "preference": ("prompt_column", "chosen_column", "rejected_column"),
}
_WITH_TEMPLATE = ("chat", "instruct", "preference")
"""Kinds whose rows may be rendered with a chat template."""
_SETTINGS = {
    "weights_column": ("tokens", "chat"),
    "margin_column": ("preference",),
    "system_column": _WITH_TEMPLATE,
    "system": _WITH_TEMPLATE,
    "loss_on": ("chat", "instruct"),
    "chat_template_kwargs": _WITH_TEMPLATE,
}
"""Further keys of data that change the tokens or their weights, and the kinds that read them."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The result for one row."""

    row: Row
    ids: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Empty: the row has no text, or cannot be used."""
    labels: Ids | None = None
    """labels[t] is the target at position t - 1; None: the ids."""
    category: int | None = None
    """The class of the row, for kind classification; for kind preference, the tokens of the chosen
    answer with its prompt, which the ids begin with."""
    cut_tokens: int = 0
    """Tokens that a text for classification was longer than data.sequence_length."""
    weights: Weights | None = None
    """The weight of each token as a target; None: each counts 1. For kind preference the margin."""
    problem: str = ""
    """Why the row cannot be used."""

    @property
    def targets(self) -> Ids:
        """Each token as a target."""
        return self.ids if self.labels is None else self.labels

    @property
    def skipped(self) -> dict[str, str]:
        """For the list of skipped rows."""
        return {"where": self.row.where, "problem": self.problem}


@dataclass(frozen=True)
class Encoder:
    """How rows of one kind become ids."""

    kind: schema.DataKind
    tokenizer: str | None
    """A folder, a hub id or `bytes`; None for kind tokens."""
    columns: dict[str, str | None]
    labels: tuple[str, ...] | None = None
    template: str | None = None
    """The text of a chat template that replaces the tokenizer's own."""
    longest: int | None = None
    """Most tokens of a text for classification, with the tokenizer's special tokens."""
    day: str | None = None
    """YYYY-MM-DD, for a chat template that prints today's date; None if none does."""
    settings: dict[str, Any] = field(default_factory=dict, repr=False)
    """Those of _SETTINGS that have another value than their default."""

    @property
    def text_column(self) -> str:
        """The column that the content of a text file goes to."""
        return self.columns.get("text_column") or "text"

    @property
    def system_column(self) -> str:
        """The column with the system prompt."""
        return self.settings.get("system_column") or "system"

    @property
    def reads_arrays(self) -> bool:
        """Whether lists of numbers are read as arrays (`read_rows`)."""
        return self.kind == "tokens"

    def read(self, parts: Iterable[SourcePart]) -> Iterator[Row]:
        """The rows of all parts."""
        return read_all(parts, column=self.text_column, arrays=self.reads_arrays)

    def identity(self) -> list[object]:
        """Changes whenever the ids of a row could. Loads no tokenizer."""
        tokenizer, template, *day = self.fingerprint().values()
        settings = [self.settings] if self.settings else []
        common = [self.kind, tokenizer, self.columns, self.labels, template, self.longest]
        return [*common, *day, *settings]

    def fingerprint(self) -> dict[str, str | None]:
        """Checksums of the tokenizer's files and of data.chat_template; and the date, if a template
        prints it."""
        template = self.template
        day = {} if self.day is None else {"date": self.day}
        return {
            "tokenizer": None if self.tokenizer is None else tokenizer_identity(self.tokenizer),
            "chat_template": template and hashlib.sha256(template.encode()).hexdigest(),
            **day,
        }

    def encode_rows(self, rows: Iterable[Row], *, batch_rows: int = 64) -> Iterator[Encoded]:
        """One result per row, in order. Tokenizing in batches is several times faster.

        Raises RecipeError for a problem of the tokenizer.
        """
        read_row, encode = _KINDS[self.kind]
        for batch in in_batches(rows, most=batch_rows, size=lambda row: row.size):
            problems, usable = [row.problem for row in batch], []
            for index, row in enumerate(batch):
                if row.values is not None:
                    try:
                        usable.append(read_row(self, row.values))
                    except RowError as error:
                        problems[index] = str(error)
            encoded = iter(encode(self, usable) if usable else ())
            for row, problem in zip(batch, problems, strict=True):
                yield Encoded(row, problem=problem) if problem else Encoded(row, *next(encoded))


def make_encoder(kind: schema.DataKind, data: schema.Data, *, tokenizer: str | None) -> Encoder:
    """The encoder of `kind`, without the settings that it does not use: they must not change the
    store.

    tokenizer is data.tokenizer, or the model's. Raises RecipeError if the chat template cannot be
    read.
    """
    file, template = data.chat_template, None
    if kind in _WITH_TEMPLATE and file is not None:
        if os.path.exists(file) and not os.path.isfile(file):  # a pipe would block
            raise RecipeError(f"data.chat_template: {file}: is not a regular file")
        try:
            template = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = "not UTF-8 text" if isinstance(error, ValueError) else error.strerror
            raise RecipeError(f"data.chat_template: {file}: cannot be read: {problem}") from None
    assert tokenizer is not None or kind == "tokens", "the model's own tokenizer is the default"
    day = None
    if kind in _WITH_TEMPLATE and tokenizer is not None:
        dated = prints_date(tokenizer) if template is None else uses_date(template)
        day = (data.date or today()) if dated else None
    settings = {
        name: getattr(data, name)
        for name, kinds in _SETTINGS.items()
        if kind in kinds and getattr(data, name) != getattr(schema.Data, name)
    }
    return Encoder(
        kind=kind,
        tokenizer=None if kind == "tokens" else tokenizer,
        columns={name: getattr(data, name) for name in _COLUMNS[kind]},
        labels=data.labels if kind == "classification" else None,
        template=template,
        longest=data.sequence_length if kind == "classification" else None,
        day=day,
        settings=settings,
    )


# For each kind: reading the columns of a row, which raises RowError, and encoding a batch


def _read_text(encoder: Encoder, row: Values) -> str:
    column, text = read_column(encoder.columns, row, "text_column", str, "text", own=encoder.kind)
    return encodable(text, f"column {column!r}")


def _encode_texts(encoder: Encoder, texts: list[str]) -> Iterator[_Tokens]:
    tokenizer = load_tokenizer(encoder.tokenizer)
    for text, ids in zip(texts, tokenizer.ids(texts), strict=True):
        yield _document(tokenizer, ids) if text else ids, None, None


def _read_tokens(encoder: Encoder, row: Values) -> _Tokens:
    ids = read_integers(row, "input_ids")
    if (least := int(ids.min(initial=0))) < 0:
        raise RowError(f"input_ids must not be negative; got {least}")
    labels = None if row.get("labels") is None else read_integers(row, "labels")
    if labels is not None and len(labels) != len(ids):
        need = "there must be one for each token (-100: no loss)"
        raise RowError(f"{len(ids)} input_ids, but {len(labels)} labels; {need}")
    wrong = [] if labels is None else labels[(labels < 0) & (labels != IGNORED)]
    if len(wrong):
        raise RowError(f"labels must be token ids, or -100 for no loss; got {int(wrong[0])}")
    column = encoder.settings.get("weights_column")
    if column is None or not ids.size:
        return ids, labels, None
    weights = np.broadcast_to(read_weights(row, column, len(ids)), ids.shape)
    counted = np.where(weights > 0, ids if labels is None else labels, np.int32(IGNORED))
    return ids, counted, None, 0, weights


def _read_chat(encoder: Encoder, row: Values) -> Rendered:
    names = ("messages", "conversations")
    column, value = read_column(
        encoder.columns, row, "messages_column", object, "messages", names, own=encoder.kind
    )
    messages = _with_system(encoder, row, read_messages(value, column))
    rendered, weights = _render(encoder, row, messages), encoder.settings.get("weights_column")
    if weights is None:
        return rendered
    return replace(rendered, weight=float(read_weights(row, weights)[0]))


def _with_system(encoder: Encoder, row: Values, messages: list[Message]) -> list[Message]:
    column = encoder.system_column
    return with_system(messages, row.get(column), column, encoder.settings.get("system"))


def _template(encoder: Encoder) -> ChatTemplate:
    values = json.dumps(encoder.settings.get("chat_template_kwargs", {}))
    return load_template(encoder.tokenizer, encoder.template, encoder.day, values)


def _render(encoder: Encoder, row: Values, messages: list[Message], loss_from: int = 0) -> Rendered:
    loss_on = encoder.settings.get("loss_on")
    return render(_template(encoder), row, messages, loss_from=loss_from, loss_on=loss_on)


def _encode_chats(encoder: Encoder, batch: list[Rendered]) -> list[_Tokens]:
    encoded = zip(batch, _template(encoder).tokens(batch), strict=True)
    return [
        (ids, labels, None)
        if row.weight is None
        else (ids, labels, None, 0, np.full(len(ids), row.weight, np.float32))
        for row, (ids, labels) in encoded
    ]


def _read_instruct(
    encoder: Encoder,
    row: Values,
    key_of_answer: str = "response_column",
    names: tuple[str, ...] = ("response", "completion", "output"),
) -> Rendered | tuple[str, str]:
    """Prompt and response, to be joined as they are; or a conversation, if either is a list of
    messages, or if the recipe has a chat template."""
    kinds, what, as_chat = (str, list), "text or a list of messages", encoder.template is not None
    column, response = read_column(
        encoder.columns, row, key_of_answer, kinds, what, names, own=encoder.kind
    )
    if not response:
        raise RowError(f"column {column!r} is empty, so there is nothing to learn from")
    key, names = "prompt", ("prompt", "instruction and input")
    rounds: list[tuple[str, str]] = []
    if encoder.columns["prompt_column"] is None and "prompt" not in row and "instruction" in row:
        rounds, headings = read_history(row.get("history")), not (as_chat or type(response) is list)
        prompt: str | list[object] = instruction(row, rounds if headings else [], headings=headings)
    else:
        key, prompt = read_column(
            encoder.columns, row, "prompt_column", kinds, what, names, own=encoder.kind
        )
    if isinstance(prompt, str) and isinstance(response, str) and not as_chat:
        column, default = encoder.system_column, encoder.settings.get("system")
        return render_text(row, prompt, response, column=column, default=default)
    earlier = [
        turn
        for asked, answered in rounds
        for turn in (*_turns("user", asked, key), *_turns("assistant", answered, column))
    ]
    question = _with_system(encoder, row, [*earlier, *_turns("user", prompt, key)])
    answer = _turns("assistant", response, column)
    return _render(encoder, row, question + answer, loss_from=len(question))


def _turns(role: str, value: str | list[object], column: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return read_messages(value, column)


def _encode_instruct(encoder: Encoder, batch: list[Any]) -> Iterator[_Tokens]:
    """Prompt and response are tokenized as one text: some tokenizers write the beginning of a text
    differently from its middle. Tokens that hold a part of the response carry loss."""
    tokenizer = load_tokenizer(encoder.tokenizer)
    for kind, rows in itertools.groupby(batch, type):
        if kind is Rendered:
            yield from _encode_chats(encoder, list(rows))
            continue
        for ids, first in tokenizer.joined(list(rows)):
            document = _document(tokenizer, ids)
            labels = document.copy()
            begun = bool(tokenizer.begin) and ids[:1].tolist() != tokenizer.begin
            if encoder.settings.get("loss_on") != "all":
                labels[: first + begun] = IGNORED
            yield document, labels, None


def _read_preference(encoder: Encoder, row: Values) -> list[Any]:
    prompt, chosen, rejected = encoder.columns.values()
    assert chosen is not None
    assert rejected is not None
    row = with_shared_prompt(row, prompt, chosen, rejected)
    answers = [_read_instruct(encoder, row, f"{key}_column", ()) for key in ("chosen", "rejected")]
    margin = read_margin(row, encoder.settings.get("margin_column"))
    return [*different(answers, chosen, rejected), margin]


def _encode_preference(encoder: Encoder, batch: list[list[Any]]) -> Iterator[_Tokens]:
    """The chosen answer after its prompt, and then the rejected one after the same prompt."""
    answers = iter(_encode_instruct(encoder, [text for *both, _ in batch for text in both]))
    for (ids, labels, *_), (other, targets, *_), row in zip(answers, answers, batch, strict=True):
        both, margin = np.concatenate([ids, other]), row[-1]
        margins = None if margin is None else np.full(len(both), margin, np.float32)
        yield both, np.concatenate([labels, targets]), len(ids), 0, margins


def _read_classification(encoder: Encoder, row: Values) -> tuple[str, int]:
    text = _read_text(encoder, row)
    if not text:
        raise RowError(f"column {encoder.text_column!r} is empty")
    names = encoder.labels
    column, value = read_column(
        encoder.columns, row, "label_column", object, "the label", own=encoder.kind
    )
    if names is not None and value in names:
        return text, names.index(value)
    if isinstance(value, str) and value.strip().isdecimal():  # a .csv holds only text
        value = int(value)
    most = 2**31 if names is None else len(names)
    if type(value) is not int or not 0 <= value < most:
        form = "a whole number from 0; data.labels gives names"
        if names is not None:
            form = f"a whole number from 0 to {most - 1}, or a name: {', '.join(names)}"
        raise RowError(f"column {column!r}: {value!r} is no class; it must be {form}")
    return text, value


def _encode_classification(encoder: Encoder, batch: list[tuple[str, int]]) -> list[_Tokens]:
    texts, categories = zip(*batch, strict=True)
    tokenizer, most = load_tokenizer(encoder.tokenizer), encoder.longest
    assert most is not None
    whole = tokenizer.ids(texts, special=True)
    # Cut by the tokenizer, which keeps the special tokens that close the text
    encoded = [
        ids if len(ids) <= most else tokenizer.ids([text], special=True, longest=most)[0]
        for text, ids in zip(texts, whole, strict=True)
    ]
    lost = [max(0, len(ids) - most) for ids in whole]
    rows = zip(encoded, categories, lost, strict=True)
    return [(ids, None, category, cut) for ids, category, cut in rows]


_Read = Callable[[Encoder, Values], Any]
_Encode = Callable[[Encoder, list[Any]], Iterable[_Tokens]]
_KINDS: dict[schema.DataKind, tuple[_Read, _Encode]] = {
    "text": (_read_text, _encode_texts),
    "tokens": (_read_tokens, lambda encoder, batch: batch),
    "chat": (_read_chat, _encode_chats),
    "instruct": (_read_instruct, _encode_instruct),
    "classification": (_read_classification, _encode_classification),
    "preference": (_read_preference, _encode_preference),
}


def _document(tokenizer: Tokenizer, ids: Ids) -> Ids:
    """The ids with the tokens that begin and end a document, unless the text has them."""
    begin = [] if ids[:1].tolist() == tokenizer.begin else tokenizer.begin
    end = [] if ids[-1:].tolist() == [tokenizer.end] else [tokenizer.end]
    return np.concatenate([np.array(begin, np.int32), ids, np.array(end, np.int32)])
