"""Rows into token ids: what each kind of data makes of a row. Used by the store and by streaming alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.data.chat import ChatTemplate, RowError, read_messages, read_tools
from launcher.data.prompts import read_prompt
from launcher.data.sources import Row
from launcher.data.tokenizer import Ids, hugging_face_tokenizer, load_tokenizer, tokenizer_identity
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.training.loss import IGNORED

_Tokens = tuple[Ids, Ids | None, int | None]
"""Ids, labels and category of a row: what Encoded holds."""
_BATCH_ROWS = 512
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """What became of a row."""

    row: Row
    ids: Ids | None = None
    """None: the row cannot be used, and `problem` says why. Empty: there was no text in it."""
    labels: Ids | None = None
    """labels[t] is the target that position t - 1 predicts, as transformers has it; None: the ids themselves."""
    category: int | None = None
    """kind classification."""
    problem: str = ""


@dataclass(frozen=True)
class Encoder:
    """How rows of one kind become ids. Small, and cheap to send to another process: the tokenizer is loaded where it is used."""

    kind: schema.DataKind
    tokenizer: str | None
    """A folder, a hub id or `bytes`; None: kind tokens, which needs none."""
    columns: dict[str, str | None]
    labels: tuple[str, ...] | None = None
    template: str | None = None
    """The text of a chat template in the place of the tokenizer's own."""

    @property
    def text_column(self) -> str:
        """Where the content of a text file goes."""
        return self.columns.get("text_column") or "text"

    def identity(self) -> list[Any]:
        """Changes whenever the ids of a row could. Loads no tokenizer."""
        name = None if self.tokenizer is None else tokenizer_identity(self.tokenizer)
        template = (
            None if self.template is None else hashlib.sha256(self.template.encode()).hexdigest()
        )
        return [self.kind, name, self.columns, self.labels, template]

    def fingerprint(self) -> dict[str, str | None]:
        """What a checkpoint keeps of it: checksums of the tokenizer's files and of the chat template given in its place."""
        _, tokenizer, _, _, template = self.identity()
        return {
            "tokenizer": "bytes" if self.tokenizer == "bytes" else tokenizer,
            "chat_template": template,
        }

    def encode_rows(
        self,
        rows: Iterable[Row],
        *,
        batch_rows: int = _BATCH_ROWS,
        batch_characters: int = _BATCH_CHARACTERS,
    ) -> Iterator[Encoded]:
        """One result a row, in their order. Rows are tokenized in batches, which is several times faster than one by one.

        Raises RecipeError for what is wrong with the tokenizer rather than with a row.
        """
        prepare, finish = _KINDS[self.kind]
        context = _Context(self)
        batch: list[tuple[Row, Any]] = []
        held = 0
        for row in rows:
            prepared: Any = None
            problem = row.problem
            if row.values is not None:
                try:
                    prepared = prepare(context, row.values)
                except RowError as error:
                    problem = str(error)
            batch.append((row, _Problem(problem) if prepared is None else prepared))
            held += _size(prepared)
            if len(batch) >= batch_rows or held >= batch_characters:
                yield from self._finished(context, batch, finish)
                batch, held = [], 0
        yield from self._finished(context, batch, finish)

    @staticmethod
    def _finished(
        context: _Context, batch: list[tuple[Row, Any]], finish: Any
    ) -> Iterator[Encoded]:
        good = iter(
            finish(
                context, [prepared for _, prepared in batch if not isinstance(prepared, _Problem)]
            )
        )
        for row, prepared in batch:
            if isinstance(prepared, _Problem):
                yield Encoded(row, problem=prepared.problem)
            else:
                yield Encoded(row, *next(good))


def make_encoder(kind: schema.DataKind, data: schema.Data, *, tokenizer: str | None) -> Encoder:
    """The encoder of a recipe's data section; with what `kind` does not use left out, so that it makes no other store.

    tokenizer: a folder, a hub id or `bytes`.
    Raises RecipeError where the chat template cannot be read.
    """
    used = {
        "text": ("text_column",),
        "tokens": (),
        "chat": ("messages_column",),
        "instruct": ("prompt_column", "response_column"),
        "classification": ("text_column", "label_column"),
    }[kind]
    template = None
    if kind in ("chat", "instruct") and data.chat_template is not None:
        try:
            template = Path(data.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise RecipeError(
                f"data.chat_template: {data.chat_template}: cannot be read: {error.strerror}"
            ) from None
        except UnicodeDecodeError as error:
            raise RecipeError(
                f"data.chat_template: {data.chat_template}: not UTF-8 text (byte {error.start})"
            ) from None
    assert tokenizer is not None or kind == "tokens", "the pipeline names the model's own tokenizer"
    return Encoder(
        kind=kind,
        tokenizer=None if kind == "tokens" else tokenizer,
        columns={name: getattr(data, name) for name in used},
        labels=data.labels if kind == "classification" else None,
        template=template,
    )


@dataclass(frozen=True, slots=True)
class _Problem:
    problem: str


class _Context:
    """An encoder at work: its tokenizer, loaded when it is first needed."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._chat: ChatTemplate | None = None

    @property
    def tokenizer(self) -> Any:
        assert self.encoder.tokenizer is not None
        return load_tokenizer(self.encoder.tokenizer)

    @property
    def chat(self) -> ChatTemplate:
        if self._chat is None:
            name = self.encoder.tokenizer
            assert name is not None
            loaded = hugging_face_tokenizer(name) if name == "bytes" else self.tokenizer.tokenizer
            self._chat = ChatTemplate(loaded, name, self.encoder.template)
        return self._chat


def _size(prepared: Any) -> int:
    if isinstance(prepared, str):
        return len(prepared)
    if isinstance(prepared, tuple):
        return sum(_size(part) for part in prepared)
    return len(getattr(prepared, "text", ""))


def _encodable(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


_HALF = "half a surrogate pair (\\ud800 to \\udfff), which is no character"


def _column_text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        got = "no such column" if column not in row else f"got {type(value).__name__}"
        raise RowError(
            f"column {column!r} must hold text; {got}; columns: {', '.join(row)} (data.text_column names it)"
        )
    if not _encodable(value):
        raise RowError(f"column {column!r} holds {_HALF}")
    return value


def _document(context: _Context, row: dict[str, Any]) -> str:
    return _column_text(row, context.encoder.text_column)


def _documents(context: _Context, texts: list[str]) -> Iterator[_Tokens]:
    if not texts:
        return
    tokenizer = context.tokenizer
    begin, end = (
        np.array(tokenizer.begin, dtype=np.int32),
        np.array([tokenizer.end], dtype=np.int32),
    )
    for text, ids in zip(texts, tokenizer.ids(texts), strict=True):
        yield (np.concatenate([begin, ids, end]) if text else ids), None, None


def _tokens(context: _Context, row: dict[str, Any]) -> _Tokens:
    ids = _integers(row, "input_ids")
    if ids.size and int(ids.min()) < 0:
        raise RowError(f"input_ids must not be negative; got {int(ids.min())}")
    if row.get("labels") is None:
        return ids, None, None
    labels = _integers(row, "labels")
    if len(labels) != len(ids):
        raise RowError(
            f"{len(ids)} input_ids, but {len(labels)} labels; there must be one a token (-100: no loss)"
        )
    wrong = labels[(labels < 0) & (labels != IGNORED)]
    if wrong.size:
        raise RowError(
            f"labels must be token ids, or -100 where no loss is due; got {int(wrong[0])}"
        )
    return ids, labels, None


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


def _as_they_are(context: _Context, rows: list[_Tokens]) -> list[_Tokens]:
    return rows


def _conversation(context: _Context, row: dict[str, Any]) -> Any:
    column = context.encoder.columns["messages_column"] or next(
        (name for name in ("messages", "conversations") if name in row), "messages"
    )
    if column not in row:
        raise RowError(
            f"no column {column!r}; columns: {', '.join(row)} (data.messages_column names it; null: messages, or conversations)"
        )
    return _rendered(context, read_messages(row[column], column), read_tools(row.get("tools")))


def _rendered(
    context: _Context, messages: list[Any], tools: list[Any] | None, loss_from: int = 0
) -> Any:
    rendered = context.chat.render(messages, tools, loss_from=loss_from)
    if not _encodable(rendered.text):
        raise RowError(f"the conversation holds {_HALF}")
    return rendered


def _conversations(context: _Context, rendered: list[Any]) -> Iterator[_Tokens]:
    for ids, labels in context.chat.tokens(rendered) if rendered else ():
        yield ids, labels, None


def _prompt(context: _Context, row: dict[str, Any]) -> Any:
    encoder = context.encoder
    columns = {
        "prompt_column": encoder.columns["prompt_column"],
        "response_column": encoder.columns["response_column"],
    }
    first, second = read_prompt(row, **columns, as_chat=encoder.template is not None)
    if isinstance(first, list):
        assert isinstance(second, int)
        return _rendered(context, first, read_tools(row.get("tools")), loss_from=second)
    assert isinstance(second, str)
    if not _encodable(first + second):
        raise RowError(f"prompt or response holds {_HALF}")
    return first, second


def _prompts(context: _Context, prepared: list[Any]) -> Iterator[_Tokens]:
    """Prompt and response are tokenized each by itself: at inference the prompt is all there is to be tokenized."""
    chats = _conversations(context, [one for one in prepared if not isinstance(one, tuple)])
    pairs = [one for one in prepared if isinstance(one, tuple)]
    texts: Iterator[tuple[Ids, Ids]] = iter(())
    if pairs:
        tokenizer = context.tokenizer
        begin, end = (
            np.array(tokenizer.begin, dtype=np.int32),
            np.array([tokenizer.end], dtype=np.int32),
        )
        texts = zip(
            tokenizer.ids([prompt for prompt, _ in pairs]),
            tokenizer.ids([response for _, response in pairs]),
            strict=True,
        )
    for one in prepared:
        if not isinstance(one, tuple):
            yield next(chats)
            continue
        prompt, response = next(texts)
        ids = np.concatenate([begin, prompt, response, end])
        labels = ids.copy()
        labels[: len(begin) + len(prompt)] = IGNORED
        yield ids, labels, None


def _labelled_text(context: _Context, row: dict[str, Any]) -> tuple[str, int]:
    encoder = context.encoder
    text = _column_text(row, encoder.text_column)
    if not text:
        raise RowError(f"column {encoder.text_column!r} is empty")
    return text, _category(row, encoder.columns["label_column"] or "label", encoder.labels)


def _category(row: dict[str, Any], column: str, names: tuple[str, ...] | None) -> int:
    value = row.get(column)
    if value is None:
        got = "no such column" if column not in row else "it holds nothing"
        raise RowError(
            f"column {column!r} must hold the label; {got}; columns: {', '.join(row)} (data.label_column names it)"
        )
    if names is not None and value in names:
        return names.index(value)
    number = (
        int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    )  # a .csv holds text alone
    if type(number) is not int:
        known = ", ".join(names) if names is not None else "none; data.labels gives names"
        raise RowError(
            f"column {column!r}: {value!r} is no class; it must be a whole number from 0, or one of the names ({known})"
        )
    if not 0 <= number < (2**31 if names is None else len(names)):
        limit = "0 or more" if names is None else f"0 to {len(names) - 1}"
        raise RowError(f"column {column!r}: label {number} is out of range; there are {limit}")
    return number


def _labelled_texts(context: _Context, rows: list[tuple[str, int]]) -> Iterator[_Tokens]:
    found = context.tokenizer.as_inference([text for text, _ in rows]) if rows else []
    for (_, category), ids in zip(rows, found, strict=True):
        yield ids, None, category


_KINDS: dict[str, tuple[Any, Any]] = {
    "text": (_document, _documents),
    "tokens": (_tokens, _as_they_are),
    "chat": (_conversation, _conversations),
    "instruct": (_prompt, _prompts),
    "classification": (_labelled_text, _labelled_texts),
}
"""What is read from a row's columns (RowError where that fails), and how a batch of that becomes ids."""
