"""Two tokenizations of one text: which tokens of the one are the text of which tokens of the other.

A span is the shortest text that both tokenizers end with a token. Before it, both models have read the
same text, so their predictions of what follows can be compared.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from launcher.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Indices = npt.NDArray[np.int64]
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_WHITE_SPACE = b" \t\r\n"


@dataclass(frozen=True)
class TokenTexts:
    """What text each token of a tokenizer is."""

    texts: Sequence[bytes]
    """By id, UTF-8. A token may hold a part of a character; b"": an id that is not used."""
    special: frozenset[int]
    """Ids of tokens that are no text, such as those that begin and end a turn."""
    fallback: frozenset[int]
    """Ids that stand for a byte where no other token has it."""


def token_texts(tokenizer: PreTrainedTokenizerBase) -> TokenTexts:
    """The texts of a tokenizer of transformers. Raises RecipeError if it is not known how its tokens
    are written."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = ""
    if backend is not None:
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder"), ensure_ascii=False)
    added = tokenizer.added_tokens_decoder
    ids = tokenizer.get_vocab().values()
    texts, fallback = [b""] * (max(ids) + 1), set[int]()
    by_level = "ByteLevel" in decoder
    if not by_level and _SPACE not in decoder:
        raise RecipeError("it is not known how its tokens are written as text")
    levels = _bytes_by_character()
    for token, id in tokenizer.get_vocab().items():
        if id in added:
            texts[id] = added[id].content.encode()
        elif by_level:
            known = all(character in levels for character in token)
            texts[id] = bytes(levels[c] for c in token) if known else token.encode()
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            texts[id] = bytes.fromhex(token[3:5])
            fallback.add(id)
        else:
            texts[id] = token.replace(_SPACE, " ").encode()
    special = {id for id, token in added.items() if token.special} | {*tokenizer.all_special_ids}
    return TokenTexts(texts, frozenset(special), frozenset(fallback))


def _bytes_by_character() -> dict[str, int]:
    """The byte that a character stands for in tokens of a byte-level tokenizer: printable characters
    of Latin-1 stand for themselves, and the others are moved behind them (GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    moved = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved


def equal_tokens(own: TokenTexts, other: TokenTexts, *, ends: Mapping[int, int]) -> Indices:
    """By the ids of the other tokenizer: the id of the own token with the same text, or -1. No two ids
    have the same one.

    ends: the own token for each of the other's that ends an answer. Further special tokens have none.
    """
    ids = {text: id for id, text in _by_text(own).items()}
    found = np.full(len(other.texts), -1, dtype=np.int64)
    for id, text in _by_text(other).items():
        found[id] = ids.get(text, -1)
    for id, own_end in ends.items():
        found[id] = own_end
    return found


def _by_text(of: TokenTexts) -> dict[int, bytes]:
    """The text of each token that is text, each text once."""
    ids: dict[bytes, int] = {}
    for id, text in enumerate(of.texts):
        if text and id not in of.special and (text not in ids or ids[text] in of.fallback):
            ids[text] = id
    return {id: text for text, id in ids.items()}


def equal_ends(
    own: Collection[int], other: Collection[int], texts: tuple[TokenTexts, TokenTexts]
) -> dict[int, int]:
    """The own token for each of the other's that end answers: that with the same text, or the only one
    that is left."""
    by_text = {texts[0].texts[id]: id for id in own}
    found = {id: by_text[text] for id in other if (text := texts[1].texts[id]) in by_text}
    left = [id for id in own if id not in found.values()]
    others = [id for id in other if id not in found]
    if len(left) == len(others) == 1:
        found[others[0]] = left[0]
    return found


class Spans(NamedTuple):
    """The bounds of spans as numbers of tokens, (spans, 2): the first token and the end."""

    own: Indices
    other: Indices


class _Part(NamedTuple):
    """A part with loss: its text, and the token that ends it."""

    first: int
    """Number of its first token that is text."""
    texts: list[bytes]
    closing: int | None
    """Number of the special token that follows the text; None: there is none."""


def _part(ids: Sequence[int], first: int, of: TokenTexts) -> _Part:
    """The part with these tokens, whose first one has this number. Special tokens before the text, and
    what follows it up to the end, such as a line break after the end of a turn, are left out."""
    begin, end = 0, len(ids)
    while begin < end and ids[begin] in of.special:
        begin += 1
    last = end
    while last > begin and (ids[last - 1] in of.special or not of.texts[ids[last - 1]].strip()):
        last -= 1
    closing = next((at for at in range(last, end) if ids[at] in of.special), None)
    texts = [of.texts[id] for id in ids[begin : end if closing is None else closing]]
    return _Part(first + begin, texts, None if closing is None else first + closing)


def spans_of_parts(
    own: Sequence[tuple[int, Sequence[int]]],
    other: Sequence[tuple[int, Sequence[int]]],
    texts: tuple[TokenTexts, TokenTexts],
) -> Spans:
    """The spans of the parts with loss of a row, in order. A part is the number of its first token, and
    its ids. Without spans if the numbers of parts differ. texts: of the own and the other tokenizer.

    White space at the beginning of a part may differ. If a text differs later, the spans end there. The
    tokens that end a part are a span where its texts are equal.
    """
    found: list[Spans] = []
    if len(own) == len(other):
        for (first, ids), (other_first, other_ids) in zip(own, other, strict=True):
            mine = _part(ids, first, texts[0])
            theirs = _part(other_ids, other_first, texts[1])
            spans, equal = spans_of_texts(mine.texts, theirs.texts)
            found.append(Spans(spans.own + mine.first, spans.other + theirs.first))
            if equal and mine.closing is not None and theirs.closing is not None:
                ends = (np.array([[at, at + 1]]) for at in (mine.closing, theirs.closing))
                found.append(Spans(*ends))
    if not found:
        return Spans(*(np.zeros((0, 2), dtype=np.int64) for _ in range(2)))
    return Spans(*(np.concatenate(bounds) for bounds in zip(*found, strict=True)))


def spans_of_texts(own: Sequence[bytes], other: Sequence[bytes]) -> tuple[Spans, bool]:
    """The spans of two tokenizations, by the texts of their tokens; and whether these are equal, but for
    white space at the beginning and the end."""
    wholes = [b"".join(tokens) for tokens in (own, other)]
    stripped = [whole.lstrip(_WHITE_SPACE) for whole in wholes]
    length = min(map(len, stripped))
    mine, theirs = (np.frombuffer(rest, dtype=np.uint8)[:length] for rest in stripped)
    common = int(np.append(np.flatnonzero(mine != theirs), length)[0])
    ends = [
        np.cumsum([0, *map(len, tokens)], dtype=np.int64) - (len(whole) - len(rest))
        for tokens, whole, rest in zip((own, other), wholes, stripped, strict=True)
    ]
    # Of several tokens that end at the same place, as where the later ones are no text, the first
    shared, *numbers = np.intersect1d(ends[0], ends[1], return_indices=True)
    inside = (shared > 0) & (shared <= common)
    bounds = (np.append(0, number[inside]) for number in numbers)
    spans = Spans(*(np.stack([bound[:-1], bound[1:]], axis=1) for bound in bounds))
    equal = stripped[0].rstrip(_WHITE_SPACE) == stripped[1].rstrip(_WHITE_SPACE)
    return spans, equal


def trained_parts(
    ids: Sequence[int], labels: Sequence[int], ignored: int
) -> list[tuple[int, list[int]]]:
    """The parts with loss of a row: the number of the first token, and the ids. labels: of
    the tokens; `ignored`: without loss."""
    found = list[tuple[int, list[int]]]()
    for trained, part in itertools.groupby(
        range(len(ids)), key=lambda number: labels[number] != ignored
    ):
        if trained:
            numbers = [*part]
            found.append((numbers[0], [*ids[numbers[0] : numbers[-1] + 1]]))
    return found
