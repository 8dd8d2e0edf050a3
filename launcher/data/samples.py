"""Sequences for people: decoded, with what carries loss; and what a data set comes to, in numbers."""

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
from launcher.data.sources import find_parts
from launcher.data.streaming import deal
from launcher.data.token_store import TokenStore
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.training.loss import IGNORED

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """Tokens in a row that are alike."""

    text: str
    """Control characters are shown by their pictures (␛ for an escape); only newlines and tabs are there as such."""
    loss: bool
    """Whether the model is trained to say this: it is the target of the token before."""
    special: bool


@dataclass(frozen=True)
class Piece:
    """What a sequence holds of one document."""

    spans: list[Span]
    tokens: int
    before: int
    """Tokens of the document that stand in sequences before."""
    after: int
    """Tokens of the document that come after these, in another sequence or, where documents are cut, nowhere."""


@dataclass(frozen=True)
class Decoder:
    """Ids into text."""

    text: Callable[[Sequence[int]], str]
    special: frozenset[int]


def load_decoder(tokenizer: str | None) -> Decoder:
    """Of `bytes`, a folder or a hub id; None: the ids themselves, as numbers."""
    if tokenizer is None:
        return Decoder(lambda ids: "".join(f"{token} " for token in ids), frozenset())
    loaded = hugging_face_tokenizer(tokenizer)
    size = len(loaded)

    def text(ids: Sequence[int]) -> str:
        unknown = next((index for index, token in enumerate(ids) if token >= size), None)
        if unknown is not None:  # rows of kind tokens hold what they hold
            return text(ids[:unknown]) + f"<{ids[unknown]}>" + text(ids[unknown + 1 :])
        return str(
            loaded.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

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
    """What sequence `index` holds, document by document.

    row: the sequence, as the data set gives it; without position_ids (classification) no token carries a loss.
    most: tokens to decode; what comes after them is left out of the spans.
    """
    found: list[Piece] = []
    at = 0
    for piece in range(sequences.bounds[index], sequences.bounds[index + 1]):
        start, length = int(sequences.starts[piece]), int(sequences.lengths[piece])
        document = int(np.searchsorted(store.offsets, start, side="right"))
        before, after = (
            start - int(store.offsets[document - 1]),
            int(store.offsets[document]) - start - length,
        )
        targets = (
            row["targets"][at : at + length] if "position_ids" in row else np.full(length, IGNORED)
        )
        # The first token here is the target of the last one in the sequence before
        first = (
            before > 0
            and "position_ids" in row
            and bool(store.labels is None or store.labels[start] != IGNORED)
        )
        shown = max(0, min(length, most - at))
        spans = _spans(
            row["input_ids"][at : at + shown].tolist(),
            [first, *(targets[:-1] != IGNORED).tolist()],
            decoder,
        )
        found.append(Piece(spans, length, before, after))
        at += length
    return found


def _spans(ids: list[int], carries: list[bool], decoder: Decoder) -> list[Span]:
    spans, start, before = [], 0, ""
    while start < len(ids):
        special, end = ids[start] in decoder.special, start + 1
        while (
            end < len(ids)
            and not special
            and ids[end] not in decoder.special
            and carries[end] == carries[start]
        ):
            end += 1
        # Of the whole text so far the new part: a tokenizer may join what it decodes at once
        whole = decoder.text(ids[:end])
        if end < len(ids):
            whole = whole.rstrip("\ufffd")  # half a character: the other half is in the next span
        spans.append(Span(_visible(whole[len(before) :]), carries[start], special))
        start, before = end, whole
    return spans


def _visible(text: str) -> str:
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) != "Cc"
        else _picture(character)
        for character in text
    )


def _picture(control: str) -> str:
    code = ord(control)
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"<{code:02x}>"


def first_documents(
    data: schema.Data, files: tuple[str, ...], *, tokenizer: str | None, seed: int, most: int
) -> SequenceDataset:
    """Of a stream: some documents, read here and now, and packed as they were without streaming."""
    encoder = make_encoder(data.kind, data, tokenizer=tokenizer)
    units = deal(find_parts(files, kind=data.kind), shards=1, seed=seed, shuffle=data.shuffle)[0]
    rows = itertools.islice(
        itertools.chain.from_iterable(unit.rows(encoder.text_column) for unit in units), most
    )
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
    sequences = pack(
        store.offsets, data.kind, packing=data.packing, sequence_length=data.sequence_length
    )
    return SequenceDataset(store, sequences, data.sequence_length, data.packing)


@dataclass(frozen=True)
class Statistics:
    """A data set in numbers."""

    lengths: Integers
    """Tokens of each document, before anything is cut."""
    sequences: int
    tokens: int
    """In sequences."""
    loss_tokens: int
    """Of those, the ones with a target."""


def statistics(store: TokenStore, sequences: Sequences) -> Statistics:
    """Counts over the whole set, without decoding anything."""
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
    first, last = (
        starts + 1,
        np.minimum(starts + sequences.lengths[order] + 1, ends),
    )  # of the targets
    if store.labels is None:
        return int(np.maximum(last - first, 0).sum())
    total = 0
    for part in range(0, len(first), 100_000):  # of the labels only so much at once
        begin, end = first[part : part + 100_000], last[part : part + 100_000]
        low = int(begin[0])
        trained = np.concatenate([[0], np.cumsum(store.labels[low : int(end.max())] != IGNORED)])
        total += int((trained[np.maximum(end, begin) - low] - trained[begin - low]).sum())
    return total


def bins(lengths: Integers, *, mark: int, most: int = 14) -> tuple[list[int], list[int]]:
    """(edges, counts) of a histogram: bin i has the lengths from edges[i] to edges[i + 1] - 1.

    Edges are powers of two, or even steps where lengths are alike; `mark + 1` is among them where it lies inside, so that
    no bin has both what is longer than `mark` and what is not.
    """
    low, high = int(lengths.min()), int(lengths.max())
    if high >= 8 * low:
        edges = [2**power for power in range(low.bit_length() - 1, high.bit_length() + 1)]
    else:
        width = -(-(high + 1 - low) // most)
        step = next(
            step
            for power in range(12)
            for step in (10**power, 2 * 10**power, 5 * 10**power)
            if step >= width
        )
        edges = list(range(low // step * step, high // step * step + step + 1, step))
    if mark < low:
        edges[0] = max(edges[0], min(mark + 1, low))
    elif mark < high:
        near = 0.1 * (mark + 1)
        edges = sorted(
            {
                edges[0],
                mark + 1,
                edges[-1],
                *(edge for edge in edges[1:-1] if abs(edge - mark - 1) > near),
            }
        )
    counts, _ = np.histogram(lengths, bins=np.array(edges))
    return edges, counts.tolist()
