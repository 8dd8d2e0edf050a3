"""Decoded sequences and statistics of a data set, for `launcher inspect`."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from launcher.data.dataset import SequenceDataset
from launcher.data.encoder import make_encoder
from launcher.data.packing import Sequences, pack
from launcher.data.shards import assign_shards
from launcher.data.sources import find_parts, read_all
from launcher.data.token_store import TokenStore
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
    size = len(loaded)

    def text(ids: Sequence[int]) -> str:
        unknown = next((index for index, token in enumerate(ids) if token >= size), None)
        if unknown is not None:  # token rows may hold any id
            return text(ids[:unknown]) + f"<{ids[unknown]}>" + text(ids[unknown + 1 :])
        decoded = loaded.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(decoded)

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
        spans.append(Span(_visible(whole[len(before) :]), loss[start], special))
        start, before = end, whole
    return spans


def _visible(text: str) -> str:
    return "".join(map(_symbol, text))


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
    ids, labels, skipped = [], [], []
    for encoded in encoder.encode_rows(rows):
        if encoded.ids is None:
            if data.on_error == "fail":
                raise RecipeError(f"{encoded.row.where}: {encoded.problem}")
            skipped.append({"where": encoded.row.where, "problem": encoded.problem})
        elif encoded.ids.size:
            ids.append(encoded.ids)
            labels.append(encoded.ids if encoded.labels is None else encoded.labels)
    if not ids:
        raise RecipeError(f"data: {', '.join(files)}: no documents in the first {most:,} rows")
    store = TokenStore(
        ids=np.concatenate(ids),
        labels=np.concatenate(labels),
        offsets=np.cumsum([0, *map(len, ids)]),
        files=len(files),
        largest_id=max(int(row.max()) for row in ids),
        kind=data.kind,
        skipped=skipped,
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
    return Statistics(
        lengths=np.diff(store.offsets),
        sequences=len(sequences),
        tokens=int(sequences.lengths.sum()),
        loss_tokens=_loss_tokens(store, sequences),
    )


def _loss_tokens(store: TokenStore, sequences: Sequences) -> int:
    order = np.argsort(sequences.starts)
    starts = sequences.starts[order]
    ends = store.offsets[np.searchsorted(store.offsets, starts, side="right")]
    # The range of the targets of each piece
    first, last = starts + 1, np.minimum(starts + sequences.lengths[order] + 1, ends)
    if store.labels is None:
        return int(np.maximum(last - first, 0).sum())
    total = 0
    for part in range(0, len(first), 100_000):  # limits the memory
        begin, end = first[part : part + 100_000], last[part : part + 100_000]
        low = int(begin[0])
        trained = np.concatenate([[0], np.cumsum(store.labels[low : int(end.max())] != IGNORED)])
        total += int((trained[np.maximum(end, begin) - low] - trained[begin - low]).sum())
    return total


def bins(lengths: Integers, *, mark: int, most: int = 14) -> tuple[list[int], list[int]]:
    """(edges, counts) of a histogram: bin i has the lengths from edges[i] to edges[i + 1] - 1.

    Edges are powers of two, or equal steps if the lengths are similar. `mark + 1` is an edge if it
    is in the range, so no bin has lengths on both sides of `mark`.
    """
    low, high = int(lengths.min()), int(lengths.max())
    if high >= 8 * low:
        edges = [2**power for power in range(low.bit_length() - 1, high.bit_length() + 1)]
    else:
        width = -(-(high + 1 - low) // most)
        steps = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
        step = next(step for step in steps if step >= width)
        edges = list(range(low // step * step, high // step * step + step + 1, step))
    if mark < low:
        edges[0] = max(edges[0], min(mark + 1, low))
    elif mark < high:
        near = 0.1 * (mark + 1)
        inner = [edge for edge in edges[1:-1] if abs(edge - mark - 1) > near]
        edges = sorted({edges[0], mark + 1, edges[-1], *inner})
    counts, _ = np.histogram(lengths, bins=np.array(edges))
    return edges, counts.tolist()
