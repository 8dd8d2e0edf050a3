"""Attachments in rows: the forms in which data sets hold them, and their places in a conversation.

An attachment is a part of a message, `{"type": "image"}`, for which the chat template writes a
placeholder.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from launcher.data.attachments import Source
from launcher.data.columns import encodable
from launcher.errors import RowError
from launcher.sources.layouts import Match, typed, unused_column_of, with_article
from launcher.sources.location import is_in_store
from launcher.sources.rows import Values

if TYPE_CHECKING:
    from launcher.data.messages import Message
    from launcher.data.modality import Modality

_BASE64 = ("base64", "data")
"""Keys whose values are base64."""


def placeholder_of(kind: str) -> str:
    """Stands in a text for an attachment of the row's column (LLaVA, ShareGPT, LLaMA-Factory)."""
    return f"<{kind}>"


def part_keys(kind: str) -> tuple[str, ...]:
    """Keys of a part, or of an object inside it, that may hold its attachment."""
    own = (kind, f"{kind}_url")
    return ("bytes", *own, "url", "path", "value", "source", "base64", "data")


def is_part_of(part: object, kind: str) -> bool:
    """Whether a part of a message's content is an attachment of this kind."""
    types = (kind, f"{kind}_url", f"input_{kind}")
    return isinstance(part, dict) and part.get("type") in types


def lacks_file(part: object, kind: str) -> bool:
    """Whether a part that is an attachment waits for one of another place of the row."""
    return isinstance(part, dict) and all(part.get(key) is None for key in part_keys(kind))


def source_of(value: object, modality: Modality) -> Source:
    """An attachment from the forms in which data sets hold it: a path, which may be relative to the
    `folder` of the modality, the bytes of a file, base64, `{"bytes": ..., "path": ...}` (datasets),
    `{"url": ...}` (OpenAI), or an object that the modality knows. Raises RowError."""
    one = with_article(modality.kind)
    if isinstance(value, Mapping):
        for key in part_keys(modality.kind):
            inner = value.get(key)
            if isinstance(inner, str) and inner and key in _BASE64:
                return modality.source(_from_base64(inner.rpartition("base64,")[2], one))
            if inner is not None:
                return source_of(inner, modality)
        raise RowError(f"{one} has none of the keys {', '.join(part_keys(modality.kind))}")
    if isinstance(value, bytes | bytearray) and value:
        return modality.source(bytes(value))
    if isinstance(value, str) and value:
        return _source_of_text(value, modality)
    if (content := modality.file_of(value)) is not None:
        return modality.source(content)
    got = "nothing" if value in ("", b"", None) else type(value).__name__
    raise RowError(f"{one} must be a path, the bytes of a file, or base64; got {got}")


def _source_of_text(value: str, modality: Modality) -> Source:
    one = with_article(modality.kind)
    encodable(value, f"the path of {one}")
    if value.startswith("data:"):
        return modality.source(_from_base64(value.partition(",")[2], one))
    scheme = re.match(r"([a-z][a-z0-9+.-]+)://", value, re.IGNORECASE)
    if re.match("file:/", value, re.IGNORECASE):
        url = urlsplit(value)
        if url.netloc not in ("", "localhost"):
            what = f"names the host {url.netloc}; a path stands after three slashes"
            raise RowError(f"{value[:200]}: {what}: file:///folder/{modality.example}")
        return modality.source(unquote(url.path).encode(), is_file=True)
    if scheme is not None:
        what = f"{modality.nouns} are not downloaded; download them first, and give their paths"
        raise RowError(f"{value[:200]}: {what}")
    # Base64 without a name: no path is as long, or begins like this
    encoded = value.startswith(modality.beginnings) and len(value) >= 64
    if (encoded or len(value) > 4096) and re.fullmatch(r"[A-Za-z0-9+/\s]+=*\s*", value):
        return modality.source(_from_base64(value, one))
    folder = modality.folder or ""
    if is_in_store(folder) and not Path(value).is_absolute():
        what = f"is in a store, where {modality.nouns} are not read by their paths; put their bytes"
        raise RowError(f"{value[:200]}: {what} into the rows, or set {modality.nouns}.folder")
    path = Path(folder, value).absolute()
    return modality.source(str(path).encode(), is_file=True)


def _from_base64(value: str, one: str) -> bytes:
    try:
        return base64.b64decode(re.sub(r"\s", "", value), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"{one} is no base64: {error}") from None


def place(
    messages: Sequence[Message], column: object, modality: Modality, *, placeholders: bool = True
) -> tuple[list[Message], list[Source]]:
    """The messages with a part `{"type": KIND}` for each attachment of a kind, and these in their
    order. Its other parts are texts, and attachments of other kinds that are placed.

    column: the value of the row's column of them, a list, as JSON too, or a single one; None: it
    has none. Its attachments take the place of parts without one of their own and, in texts, of the
    placeholder, in this order. If there are no such places, they come first in the first message of a
    user, as in TRL. placeholders: whether the text of one is the place of an attachment. Raises
    RowError if the numbers do not agree, or if an assistant answers with an attachment.
    """
    kind, nouns, one = modality.kind, modality.nouns, with_article(modality.kind)
    mark, given = placeholder_of(kind), _listed(column)
    waiting = list(given)
    sources: list[Source] = []

    def next_of_column(what: str) -> None:
        if not waiting:
            held = f"the row's column of {nouns} has {len(given)}"
            if not given:
                held = f"the row's column of {nouns} is empty or missing"
            raise RowError(f"{what}, and {held}")
        sources.append(source_of(waiting.pop(0), modality))

    def placed(part: object) -> Iterator[dict[str, Any]]:
        if is_part_of(part, kind):
            assert isinstance(part, Mapping)
            if read := [key for key in modality.refused_keys if part.get(key) is not None]:
                what = f"{one} has the key {' and '.join(read)}, which is not read"
                raise RowError(f"{what}; {modality.refused_keys[read[0]]}. Remove the key")
            if lacks_file(part, kind):
                keys = [str(key) for key, value in part.items() if value is not None]
                next_of_column(f"a part with the keys {', '.join(keys)} has no {kind} of its own")
            else:
                sources.append(source_of(part, modality))
            yield {"type": kind}
            return
        if isinstance(part, Mapping) and part.get("text") is None:
            yield dict(part)
            return
        text = part if isinstance(part, str) else part["text"]  # type: ignore[index]
        for number, piece in enumerate(text.split(mark) if placeholders else [text]):
            if number:
                next_of_column(f"{mark} in a text is the place of {one}")
                yield {"type": kind}
            if piece:
                yield {"type": "text", "text": piece}

    for number, message in enumerate(messages, start=1):
        answers = placeholders and message["role"] == "assistant"
        if answers and mark in str(message["content"] or ""):
            what = f"its text holds {mark}, the place of {one}"
            raise RowError(f"message {number}: the assistant cannot answer with {one}: {what}")
    made = [_with_content(message, placed) for message in messages]
    if given and len(waiting) == len(given):
        first = next((at for at, message in enumerate(made) if message["role"] == "user"), None)
        if first is None:
            raise RowError(f"the row has {nouns}, and no message of a user to show them in")
        if sources:
            what = f"the row has a column of {nouns}, and its messages have other {nouns}"
            raise RowError(f"{what}; give them in one of the two places")
        sources += [source_of(value, modality) for value in given]
        rest = made[first]["content"]
        parts: list[dict[str, Any]] = [{"type": kind} for _ in given]
        if not isinstance(rest, list):
            rest = [{"type": "text", "text": rest}] if rest else []
        made[first] = {**made[first], "content": parts + rest}
    elif waiting:
        shown = len(given) - len(waiting)
        raise RowError(
            f"the row's column of {nouns} has {len(given)}, and the messages show {shown} of them; "
            f"write {mark} where each belongs"
        )
    for number, message in enumerate(made, start=1):
        content = message["content"]
        parts = content if isinstance(content, list) else []
        if message["role"] == "assistant" and any(is_part_of(part, kind) for part in parts):
            raise RowError(f"message {number}: the assistant cannot answer with {one}")
    return made, sources


def place_of_row(
    messages: list[Message],
    row: Values,
    found: Match,
    modality: Modality,
    ignored: Collection[str],
) -> tuple[list[Message], list[Source]]:
    """`place` with the row's column of attachments. Raises RowError, also if only a column that is not
    used holds attachments. ignored: data.ignore_columns."""
    nouns, sources = modality.nouns, list["Source"]()
    column = found.get(nouns)
    given = None if column is None else row.get(column)
    unused = unused_column_of(modality.kind, row, found, ignored)
    try:
        messages, sources = place(messages, given, modality)
    except RowError:
        if unused is None or given:
            raise
    if unused is not None and not sources:
        raise RowError(
            f"column {unused!r} holds {nouns} by its name, and the run does not see them; "
            f"{typed(f'data.columns.{nouns}', unused)} reads it, "
            f"{typed('data.ignore_columns', [*ignored, unused])} trains without it"
        )
    return messages, sources


def _listed(column: object) -> list[object]:
    """The attachments of a column."""
    if isinstance(column, str) and column.lstrip().startswith("["):  # as in a .csv
        with contextlib.suppress(ValueError):  # of a path
            column = json.loads(column)
    if column is None:
        return []
    return list(column) if isinstance(column, list | tuple) else [column]


def _with_content(
    message: Message, placed: Callable[[object], Iterator[dict[str, Any]]]
) -> Message:
    """The message with its content in parts if it has attachments, and else as text."""
    content = message["content"]
    if content is None:
        return message
    parts = [
        made
        for part in ([content] if isinstance(content, str) else content)
        for made in placed(part)
    ]
    if all(part["type"] == "text" for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    return {**message, "content": parts}
