"""Rows into token ids, for each kind of data. Used by token stores and by streaming."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from launcher.data.chat import ChatTemplate, RowError, read_messages, read_tools
from launcher.data.prompts import read_prompt
from launcher.data.sources import Row
from launcher.data.tokenizer import (
    Ids,
    Tokenizer,
    hugging_face_tokenizer,
    load_tokenizer,
    tokenizer_identity,
)
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.training.loss import IGNORED

_Tokens = tuple[Ids, Ids | None, int | None]
"""Ids, labels and category of a row, as in Encoded."""
_BATCH_ROWS = 512
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """The result for one row."""

    row: Row
    ids: Ids | None = None
    """None: the row cannot be used, see `problem`. Empty: it has no text."""
    labels: Ids | None = None
    """labels[t] is the target at position t - 1, as in transformers; None: the ids."""
    category: int | None = None
    """kind classification."""
    problem: str = ""


@dataclass(frozen=True)
class Encoder:
    """How rows of one kind become ids. Cheap to copy to another process, which then loads the
    tokenizer."""

    kind: schema.DataKind
    tokenizer: str | None
    """A folder, a hub id or `bytes`; None for kind tokens."""
    columns: dict[str, str | None]
    labels: tuple[str, ...] | None = None
    template: str | None = None
    """The text of a chat template that replaces the tokenizer's own."""

    @property
    def text_column(self) -> str:
        """The column that the content of a text file goes to."""
        return self.columns.get("text_column") or "text"

    def identity(self) -> list[Any]:
        """Changes whenever the ids of a row could. Loads no tokenizer."""
        name = None if self.tokenizer is None else tokenizer_identity(self.tokenizer)
        return [self.kind, name, self.columns, self.labels, self._template_digest]

    def fingerprint(self) -> dict[str, str | None]:
        """For checkpoints: checksums of the tokenizer's files and of data.chat_template."""
        name = self.tokenizer
        tokenizer = name if name is None or name == "bytes" else tokenizer_identity(name)
        return {"tokenizer": tokenizer, "chat_template": self._template_digest}

    @property
    def _template_digest(self) -> str | None:
        return None if self.template is None else hashlib.sha256(self.template.encode()).hexdigest()

    def encode_rows(
        self,
        rows: Iterable[Row],
        *,
        batch_rows: int = _BATCH_ROWS,
        batch_characters: int = _BATCH_CHARACTERS,
    ) -> Iterator[Encoded]:
        """One result per row, in order. Tokenizes in batches, which is several times faster.

        Raises RecipeError for a problem of the tokenizer rather than of a row.
        """
        kind = _KINDS[self.kind](self)
        batch: list[tuple[Row, Any, str]] = []
        held = 0
        for row in rows:
            read, problem = None, row.problem
            if row.values is not None:
                try:
                    read = kind.read(row.values)
                except RowError as error:
                    problem = str(error)
            batch.append((row, read, problem))
            held += _size(read)
            if len(batch) >= batch_rows or held >= batch_characters:
                yield from _encode_batch(kind, batch)
                batch, held = [], 0
        yield from _encode_batch(kind, batch)


def _encode_batch(kind: _Kind, batch: list[tuple[Row, Any, str]]) -> Iterator[Encoded]:
    good = [read for _, read, _ in batch if read is not None]
    encoded = iter(kind.encode(good) if good else ())
    for row, read, problem in batch:
        yield Encoded(row, problem=problem) if read is None else Encoded(row, *next(encoded))


def _size(read: Any) -> int:
    if isinstance(read, tuple):
        return sum(_size(part) for part in read)
    return len(read if isinstance(read, str) else getattr(read, "text", ""))


def make_encoder(kind: schema.DataKind, data: schema.Data, *, tokenizer: str | None) -> Encoder:
    """The encoder for a recipe's data section. Settings that `kind` does not use are left out, so
    they do not change the store. Raises RecipeError if the chat template cannot be read.

    tokenizer: a folder, a hub id or `bytes`.
    """
    used = {
        "text": ("text_column",),
        "tokens": (),
        "chat": ("messages_column",),
        "instruct": ("prompt_column", "response_column"),
        "classification": ("text_column", "label_column"),
    }[kind]
    file, template = data.chat_template, None
    if kind in ("chat", "instruct") and file is not None:
        try:
            template = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise RecipeError(
                f"data.chat_template: {file}: cannot be read: {error.strerror}"
            ) from None
        except UnicodeDecodeError as error:
            raise RecipeError(
                f"data.chat_template: {file}: not UTF-8 text (byte {error.start})"
            ) from None
    assert tokenizer is not None or kind == "tokens", "the model's own tokenizer is the default"
    return Encoder(
        kind=kind,
        tokenizer=None if kind == "tokens" else tokenizer,
        columns={name: getattr(data, name) for name in used},
        labels=data.labels if kind == "classification" else None,
        template=template,
    )


# Kinds of data


class _Kind:
    """Reads the columns of a row (RowError if that fails), and encodes a batch of what it read."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def read(self, row: dict[str, Any]) -> Any:
        raise NotImplementedError

    def encode(self, batch: list[Any]) -> Iterable[_Tokens]:
        raise NotImplementedError

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.encoder.tokenizer is not None
        return load_tokenizer(self.encoder.tokenizer)

    def framed(self, *parts: Ids) -> Ids:
        """A document of these ids."""
        begin, end = self.tokenizer.begin, [self.tokenizer.end]
        arrays = [np.array(begin, dtype=np.int32), *parts, np.array(end, dtype=np.int32)]
        return np.concatenate(arrays)


class _Text(_Kind):
    def read(self, row: dict[str, Any]) -> str:
        column = self.encoder.text_column
        value = row.get(column)
        if not isinstance(value, str):
            got = "no such column" if column not in row else f"got {type(value).__name__}"
            raise RowError(
                f"column {column!r} must hold text; {got}; columns: {', '.join(row)} "
                "(data.text_column names it)"
            )
        return _encodable(value, f"column {column!r}")

    def encode(self, batch: list[str]) -> Iterator[_Tokens]:
        for text, ids in zip(batch, self.tokenizer.ids(batch), strict=True):
            yield self.framed(ids) if text else ids, None, None


class _TokenRows(_Kind):
    def read(self, row: dict[str, Any]) -> _Tokens:
        ids = _integers(row, "input_ids")
        if ids.size and int(ids.min()) < 0:
            raise RowError(f"input_ids must not be negative; got {int(ids.min())}")
        if row.get("labels") is None:
            return ids, None, None
        labels = _integers(row, "labels")
        if len(labels) != len(ids):
            raise RowError(
                f"{len(ids)} input_ids, but {len(labels)} labels; there must be one a token (-100: "
                "no loss)"
            )
        wrong = labels[(labels < 0) & (labels != IGNORED)]
        if wrong.size:
            raise RowError(
                f"labels must be token ids, or -100 where no loss is due; got {int(wrong[0])}"
            )
        return ids, labels, None

    def encode(self, batch: list[_Tokens]) -> list[_Tokens]:
        return batch


class _Chat(_Kind):
    def read(self, row: dict[str, Any]) -> Any:
        names = [name for name in ("messages", "conversations") if name in row]
        column = self.encoder.columns["messages_column"] or (names or ["messages"])[0]
        if column not in row:
            raise RowError(
                f"no column {column!r}; columns: {', '.join(row)} (data.messages_column names it; "
                "null: messages, or conversations)"
            )
        return self.render(row, read_messages(row[column], column))

    def encode(self, batch: list[Any]) -> Iterator[_Tokens]:
        for ids, labels in self.template.tokens(batch):
            yield ids, labels, None

    @cached_property
    def template(self) -> ChatTemplate:
        name = self.encoder.tokenizer
        assert name is not None
        loaded = getattr(self.tokenizer, "tokenizer", None) or hugging_face_tokenizer(name)
        return ChatTemplate(loaded, name, self.encoder.template)

    def render(self, row: dict[str, Any], messages: list[Any], loss_from: int = 0) -> Any:
        tools = read_tools(row.get("tools"))
        rendered = self.template.render(messages, tools, loss_from=loss_from)
        _encodable(rendered.text, "the conversation")
        return rendered


class _Instruct(_Chat):
    """A row is a pair of texts or a conversation. The texts are tokenized separately: at inference
    the prompt is tokenized alone."""

    def read(self, row: dict[str, Any]) -> Any:
        as_chat = self.encoder.template is not None
        first, second = read_prompt(row, **self.encoder.columns, as_chat=as_chat)
        if isinstance(first, list):
            assert isinstance(second, int)
            return self.render(row, first, loss_from=second)
        assert isinstance(second, str)
        _encodable(first + second, "prompt or response")
        return first, second

    def encode(self, batch: list[Any]) -> Iterator[_Tokens]:
        conversations = [one for one in batch if not isinstance(one, tuple)]
        chats = super().encode(conversations) if conversations else iter(())
        pairs = [one for one in batch if isinstance(one, tuple)]
        ids = self.tokenizer.ids if pairs else list
        texts = zip(ids([one for one, _ in pairs]), ids([one for _, one in pairs]), strict=True)
        for one in batch:
            if not isinstance(one, tuple):
                yield next(chats)
                continue
            prompt, response = next(texts)
            document = self.framed(prompt, response)
            labels = document.copy()
            labels[: len(self.tokenizer.begin) + len(prompt)] = IGNORED
            yield document, labels, None


class _Classification(_Text):
    def read(self, row: dict[str, Any]) -> Any:
        text = super().read(row)
        if not text:
            raise RowError(f"column {self.encoder.text_column!r} is empty")
        return text, self.category(row, self.encoder.columns["label_column"] or "label")

    def category(self, row: dict[str, Any], column: str) -> int:
        names, value = self.encoder.labels, row.get(column)
        if value is None:
            got = "no such column" if column not in row else "it holds nothing"
            raise RowError(
                f"column {column!r} must hold the label; {got}; columns: {', '.join(row)} "
                "(data.label_column names it)"
            )
        if names is not None and value in names:
            return names.index(value)
        digits = isinstance(value, str) and value.strip().isdecimal()  # a .csv holds only text
        number = int(value) if digits else value
        if type(number) is not int:
            known = ", ".join(names) if names is not None else "none; data.labels gives names"
            raise RowError(
                f"column {column!r}: {value!r} is no class; it must be a whole number from 0, or "
                f"one of the names ({known})"
            )
        if not 0 <= number < (2**31 if names is None else len(names)):
            limit = "0 or more" if names is None else f"0 to {len(names) - 1}"
            raise RowError(f"column {column!r}: label {number} is out of range; there are {limit}")
        return number

    def encode(self, batch: list[Any]) -> Iterator[_Tokens]:
        found = self.tokenizer.as_inference([text for text, _ in batch])
        for (_, category), ids in zip(batch, found, strict=True):
            yield ids, None, category


_KINDS: dict[str, Callable[[Encoder], _Kind]] = {
    "text": _Text,
    "tokens": _TokenRows,
    "chat": _Chat,
    "instruct": _Instruct,
    "classification": _Classification,
}


def _encodable(text: str, where: str) -> str:
    """The text. Raises RowError if it is not valid Unicode."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise RowError(
            f"{where} holds half a surrogate pair (\\ud800 to \\udfff), which is no character"
        ) from None
    return text


def _integers(row: dict[str, Any], column: str) -> Ids:
    values = row.get(column)
    if values is None:
        raise RowError(f"no column {column!r}; columns: {', '.join(row)}")
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise RowError(f"{column} must be a list of whole numbers")
    try:
        return np.array(values, dtype=np.int32)
    except OverflowError:
        raise RowError(f"{column} has an id beyond 32 bits") from None
