"""Decoded sequences and statistics of a data set, for `launcher inspect`."""

from __future__ import annotations

import bisect
import itertools
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from launcher.data.dataset import SequenceDataset
from launcher.data.encoder import make_encoder
from launcher.data.packing import Sequences, pack
from launcher.data.sources import find_parts, read_all
from launcher.data.streaming import assign_shards
from launcher.data.token_store import TokenStore
from launcher.data.tokenization import make_block
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.training.loss import IGNORED

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sort."""

    text: str
    """Control characters except newlines and tabs are shown as symbols (␛ for an escape)."""
    loss: bool
    """The tokens are targets."""
    special: bool


@dataclass(frozen=True)
class Piece:
    """One document's part of a sequence."""

    spans: list[Span]
    tokens: int
    before: int
    """Tokens of the document before these, in other sequences."""
    after: int
    """Tokens of the document after these, in other sequences or cut off."""


@dataclass(frozen=True)
class Decoder:
    """Ids to text."""

    text: Callable[[Sequence[int]], str]
    special: frozenset[int]


def load_decoder(tokenizer: str | None) -> Decoder:
    """tokenizer: `bytes`, a folder or a hub id; None shows ids as numbers."""
    if tokenizer is None:
        return Decoder(lambda ids: "".join(f"{token} " for token in ids), frozenset())
    loaded = hugging_face_tokenizer(tokenizer)

    def text(ids: Sequence[int]) -> str:
        parts = []
        for known, group in itertools.groupby(ids, key=lambda token: token < len(loaded)):
            if known:
                options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
                parts.append(str(loaded.decode(list(group), **options)))
            else:  # token rows may hold any id
                parts += [f"<{token}>" for token in group]
        return "".join(parts)

    return Decoder(text, frozenset(loaded.all_special_ids))


def pieces(
    store: TokenStore,
    sequences: Sequences,
    index: int,
    row: dict[str, Integers],
    decoder: Decoder,
    *,
    most: int,
) -> list[Piece]:
    """The documents of sequence `index`.

    row: the sequence, from the data set; without position_ids (classification) no token is a
    target. most: tokens to decode; the rest is not in the spans.
    """
    found: list[Piece] = []
    at = 0
    for piece in range(sequences.bounds[index], sequences.bounds[index + 1]):
        start, length = int(sequences.starts[piece]), int(sequences.lengths[piece])
        document = int(np.searchsorted(store.offsets, start, side="right"))
        before = start - int(store.offsets[document - 1])
        after = int(store.offsets[document]) - start - length
        first, targets = False, np.full(length, IGNORED)
        if "position_ids" in row:
            targets = row["targets"][at : at + length]
            # The first token is a target of the sequence before
            first = before > 0 and (store.labels is None or bool(store.labels[start] != IGNORED))
        ids = row["input_ids"][at : at + max(0, min(length, most - at))].tolist()
        spans = _spans(ids, [first, *(targets[:-1] != IGNORED).tolist()], decoder)
        found.append(Piece(spans, length, before, after))
        at += length
    return found


def _spans(ids: list[int], loss: list[bool], decoder: Decoder) -> list[Span]:
    spans, start, before = [], 0, ""
    while start < len(ids):
        special, end = ids[start] in decoder.special, start + 1
        while end < len(ids) and not special and loss[end] == loss[start]:
            if ids[end] in decoder.special:
                break
            end += 1
        # The text of a token may depend on those before it, so all of them are decoded
        whole = decoder.text(ids[:end])
        if end < len(ids):
            whole = whole.rstrip("\ufffd")  # the first half of a character; the next span has it
        spans.append(Span("".join(map(_symbol, whole[len(before) :])), loss[start], special))
        start, before = end, whole
    return spans


def _symbol(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) != "Cc":
        return character
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"<{code:02x}>"


def first_documents(
    data: schema.Data, files: tuple[str, ...], *, tokenizer: str | None, seed: int, most: int
) -> SequenceDataset:
    """The first documents of a stream, packed as they are without streaming."""
    encoder = make_encoder(data.kind, data, tokenizer=tokenizer)
    parts = find_parts(files, kind=data.kind)
    shard = assign_shards(parts, shards=1, seed=seed, shuffle=data.shuffle)[0]
    rows = itertools.islice(read_all(shard, column=encoder.text_column), most)
    block = make_block(list(encoder.encode_rows(rows)), data.on_error)
    if not block.lengths.size:
        raise RecipeError(f"data: {', '.join(files)}: no documents in the first {most:,} rows")
    store = TokenStore(
        ids=block.ids,
        labels=block.labels,
        offsets=np.append(0, np.cumsum(block.lengths, dtype=np.int64)),
        skipped=block.skipped,
    )
    length = data.sequence_length
    sequences = pack(store.offsets, data.kind, packing=data.packing, sequence_length=length)
    return SequenceDataset(store, sequences, length, data.packing)


@dataclass(frozen=True)
class Statistics:
    """Of a data set."""

    lengths: Integers
    """Tokens of each document, before packing."""
    sequences: int
    tokens: int
    """In the sequences."""
    loss_tokens: int
    """In the sequences, with a target."""


def statistics(store: TokenStore, sequences: Sequences) -> Statistics:
    """Counts over the whole data set."""
    # The targets of a piece are the tokens after each of its own, within the document
    first = sequences.starts + 1
    ends = store.offsets[np.searchsorted(store.offsets, sequences.starts, side="right")]
    last = np.minimum(first + sequences.lengths, ends)
    if store.labels is None:
        targets = last - first
    else:  # 32 bits may overflow, and the differences are right all the same
        trained = np.cumsum(store.labels != IGNORED, dtype=np.uint32)
        targets = trained[last - 1] - trained[first - 1]
    return Statistics(
        lengths=np.diff(store.offsets),
        sequences=len(sequences),
        tokens=int(sequences.lengths.sum()),
        loss_tokens=int(targets.sum()),
    )


def bins(lengths: Integers, *, mark: int) -> tuple[list[int], list[int]]:
    """(edges, counts) of a histogram: bin i has the lengths from edges[i] to edges[i + 1] - 1.

    Edges are powers of two, with three more between them if the lengths are similar. No bin has
    lengths on both sides of `mark`.
    """
    low, high = int(lengths.min()), int(lengths.max())
    fine = 4 if high < 4 * low else 1
    octaves = range(low.bit_length() - 1, high.bit_length() + 1)
    edges = sorted(
        {2**octave * step // fine for octave in octaves for step in range(fine, 2 * fine)}
    )
    edges = edges[bisect.bisect(edges, low) - 1 : bisect.bisect(edges, high) + 1]
    if mark < low:
        edges[0] = max(edges[0], min(mark + 1, low))
    elif mark < high:
        near = 0.1 * (mark + 1)
        inner = [edge for edge in edges[1:-1] if abs(edge - mark - 1) > near]
        edges = sorted({edges[0], mark + 1, edges[-1], *inner})
    counts, _ = np.histogram(lengths, bins=np.array(edges))
    return edges, counts.tolist()
