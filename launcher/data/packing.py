"""Documents into sequences of pieces.

A piece is a run of tokens of one document. A document that is too long is split into several
pieces, and loses context, but no target; or it is cut to one piece.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from launcher.console import advanced
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from launcher.sources.layouts import KINDS

if TYPE_CHECKING:
    from launcher.data.token_store import TokenStore

Integers = npt.NDArray[np.int64]
_COUNTED_TOKENS = 1 << 22
"""Tokens of labels that are read at once."""
_COUNTED_SEQUENCES = 1 << 20
"""Sequences of a stream that are looked at at once."""


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """What packing says of the documents."""

    documents: int
    """Documents that were packed, with those that are dropped."""
    split_documents: int = 0
    cut_documents: int = 0
    cut_tokens: int = 0
    dropped_documents: int = 0
    """Documents without a target, or whose targets are all cut off."""
    long_documents: int = 0
    """Documents that are longer than a sequence, or pairs with such an answer, dropped for that."""
    targets: int = 0
    """Tokens with loss in all pieces; 0 for classification."""


@dataclass(frozen=True)
class Sequences(_Counts):
    """Which pieces of the store make up each sequence."""

    starts: Integers
    """First token of each piece in the store, (pieces,)."""
    lengths: Integers
    """Tokens of each piece, (pieces,)."""
    bounds: Integers
    """First piece of each sequence, and the end: (sequences + 1,)."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum())

    def pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """First token in the store and tokens of each piece of a sequence."""
        between = slice(*self.bounds[index : index + 2])
        yield from zip(self.starts[between].tolist(), self.lengths[between].tolist(), strict=True)


@dataclass(frozen=True)
class Stream(_Counts):
    """The sequences of documents in a row, split every `length` tokens. It holds no pieces: the
    documents of a sequence are searched in `offsets`."""

    offsets: Integers
    """Where each document begins in the row, and the end: (documents + 1,)."""
    length: int
    """Tokens of a sequence. The last one may have fewer."""
    begins: Integers | None = None
    """First token of each document in the store, (documents,); None: the offsets."""
    numbers: Integers | None = None
    """Which sequences have a target, in order; None: all."""

    def __len__(self) -> int:
        if self.numbers is not None:
            return len(self.numbers)
        return -(-int(self.offsets[-1]) // self.length)

    def _range(self, index: int) -> tuple[int, int]:
        """First token in the row, and end, of a sequence."""
        first = (index if self.numbers is None else int(self.numbers[index])) * self.length
        return first, min(first + self.length, int(self.offsets[-1]))

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        if not len(self):
            return 0
        first, end = self._range(len(self) - 1)
        return (len(self) - 1) * self.length + end - first

    def pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """First token in the store and tokens of each piece of a sequence."""
        at, end = self._range(index)
        document = int(np.searchsorted(self.offsets, at, side="right")) - 1
        while at < end:
            begin, stop = (int(bound) for bound in self.offsets[document : document + 2])
            moved = 0 if self.begins is None else int(self.begins[document]) - begin
            stop = min(stop, end)
            if stop > at:
                yield at + moved, stop - at
            at, document = stop, document + 1

    @cached_property
    def _pieces(self) -> Sequences:
        """The pieces in memory, for what needs all of them."""
        pieces = stream(self.offsets, self.length)
        if self.begins is not None:
            pieces = _moved(pieces, self.offsets, self.begins)
        if self.numbers is None:
            return pieces
        kept = np.zeros(len(pieces), dtype=bool)
        kept[self.numbers] = True
        return _chosen(pieces, kept)

    @property
    def starts(self) -> Integers:
        """See `Sequences`."""
        return self._pieces.starts

    @property
    def lengths(self) -> Integers:
        """See `Sequences`."""
        return self._pieces.lengths

    @property
    def bounds(self) -> Integers:
        """See `Sequences`."""
        return self._pieces.bounds


Packed = Sequences | Stream


class Sizes(Sequence[int]):
    """Tokens of each sequence, counted when they are asked for."""

    def __init__(self, sequences: Packed) -> None:
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: Any) -> Any:
        return sum(length for _, length in self._sequences.pieces(range(len(self))[index]))


def pack(
    offsets: Integers,
    kind: str,
    *,
    packing: bool,
    sequence_length: int,
    labels: npt.NDArray[np.int32] | None = None,
    documents: Integers | None = None,
    drops_overlong: bool = False,
    attachments: npt.NDArray[Any] | None = None,
) -> Packed:
    """Packs documents of a data.kind: those with the numbers `documents`, in order; None: all.

    Documents that are too long are dropped, or else split for kinds text and tokens, and cut for
    other kinds: the end of an answer is no useful target without its beginning.

    labels: of the tokens; None: the ids. Parts without a target are dropped. attachments: those of
    the store, each of which stays whole.
    """
    if drops_overlong:
        numbers = np.arange(len(offsets) - 1) if documents is None else documents
        fits = np.diff(offsets)[numbers] <= sequence_length
        if not fits.all():
            count = int(np.count_nonzero(~fits))
            if count == len(fits):
                empty = np.zeros(0, dtype=np.int64)
                bounds = np.zeros(1, dtype=np.int64)
                return Sequences(empty, empty, bounds, documents=count, long_documents=count)
            kept = pack(
                offsets,
                kind,
                packing=packing,
                sequence_length=sequence_length,
                labels=labels,
                documents=numbers[fits],
                attachments=attachments,
            )
            return replace(kept, documents=len(fits), long_documents=count)
    packed = offsets
    if documents is not None:  # as if they followed each other
        packed = np.cumsum(np.append(0, np.diff(offsets)[documents]))
    streamed, cut = kind == "text" and packing, KINDS[kind].is_cut
    begins = None if documents is None else offsets[documents]
    if streamed and labels is None and attachments is None:
        return stream_of_text(packed, sequence_length, begins)
    pieces = (
        stream(packed, sequence_length) if streamed else separate(packed, sequence_length, cut=cut)
    )
    if begins is not None:
        pieces = _moved(pieces, packed, begins)
    if KINDS[kind].learned == "class":
        return pieces
    if attachments is not None:
        pieces = _before_cut_attachments(pieces, attachments["first"], attachments["end"])
    pieces = with_targets(pieces, offsets, labels)
    return best_fit(pieces, sequence_length) if packing and not streamed else pieces


def _moved(pieces: Sequences, offsets: Integers, begins: Integers) -> Sequences:
    """The pieces of documents in a row, with `offsets`, where they are in the store."""
    of = np.searchsorted(offsets, pieces.starts, side="right") - 1
    return replace(pieces, starts=pieces.starts + (begins - offsets[:-1])[of])


def _chosen(sequences: Sequences, kept: npt.NDArray[np.bool_]) -> Sequences:
    """The sequences that are kept, (sequences,)."""
    if kept.all():
        return sequences
    pieces = np.diff(sequences.bounds)
    chosen = np.repeat(kept, pieces)
    return replace(
        sequences,
        starts=sequences.starts[chosen],
        lengths=sequences.lengths[chosen],
        bounds=np.cumsum(np.append(0, pieces[kept])),
    )


def _before_cut_attachments(pieces: Sequences, first: Integers, end: Integers) -> Sequences:
    """The pieces, each cut before an attachment of which it would have a part only. first, end: of
    the attachments."""
    if not len(first):
        return pieces
    ends = pieces.starts + pieces.lengths
    last = np.searchsorted(first, ends) - 1  # the last one that begins before the end of a piece
    cut = (last >= 0) & (first[last] >= pieces.starts) & (end[last] > ends)
    lengths = np.where(cut, first[last] - pieces.starts, pieces.lengths)
    more = int((pieces.lengths - lengths).sum())
    return replace(pieces, lengths=lengths, cut_tokens=pieces.cut_tokens + more)


def text_lengths(store: TokenStore, unit: str) -> Integers:
    """Tokens of each document; of pairs, of the longer answer with its prompt; of queries, of their
    longest text. unit: `Data.batch_unit`."""
    lengths: Integers = np.diff(store.offsets)
    if unit == "queries":
        ends = np.flatnonzero(np.asarray(store.labels_or_ids) != IGNORED) + 1
        texts = np.diff(ends, prepend=0)
        begins = np.searchsorted(ends, store.offsets[:-1], side="right")
        # A row that cannot be used has no text
        longest: Integers = np.zeros(len(lengths), dtype=np.int64)
        longest[lengths > 0] = np.maximum.reduceat(texts, begins[lengths > 0]) if len(texts) else 0
        return longest
    if unit != "pairs":
        return lengths
    assert store.first_lengths is not None
    longer: Integers = np.maximum(store.first_lengths, lengths - store.first_lengths)
    return longer


def separate_pairs(
    offsets: Integers,
    first: npt.NDArray[np.int32],
    labels: npt.NDArray[np.int32],
    *,
    sequence_length: int,
    documents: Integers | None = None,
) -> Sequences:
    """A pair of answers in each sequence. Pairs with an answer that, with its prompt, is longer than
    `sequence_length`, or that has no target, are dropped. `first` are the tokens of the first answers,
    and `documents` the numbers of the pairs to use; None: all."""
    ends, middles, lengths = offsets[1:], offsets[:-1] + first, np.diff(offsets)
    begins = np.stack([offsets[:-1], middles], axis=1).flatten()
    targets = count_labels(labels, begins + 1, np.stack([middles, ends], axis=1).flatten())
    fits = np.maximum(first, lengths - first) <= sequence_length
    trained = targets.reshape(-1, 2).min(1) > 0
    wanted = np.ones(len(lengths), dtype=bool)
    if documents is not None:
        wanted[:] = False
        wanted[documents] = True
    kept = fits & trained & wanted
    return Sequences(
        offsets[:-1][kept],
        lengths[kept],
        np.arange(np.count_nonzero(kept) + 1),
        documents=int(np.count_nonzero(wanted)),
        dropped_documents=int(np.count_nonzero(fits & ~trained & wanted)),
        long_documents=int(np.count_nonzero(~fits & wanted)),
        targets=int(targets.reshape(-1, 2)[kept].sum()),
    )


def with_targets(
    sequences: Sequences, offsets: Integers, labels: npt.NDArray[np.int32] | None
) -> Sequences:
    """The sequences that have a target: the label of a token after the first one of a document,
    at the token before it."""
    number = np.searchsorted(offsets, sequences.starts, side="right")
    ends = np.minimum(sequences.starts + sequences.lengths + 1, offsets[number])
    counts = ends - sequences.starts - 1
    if labels is not None:
        counts = count_labels(labels, sequences.starts + 1, ends)
    kept = np.add.reduceat(counts, sequences.bounds[:-1]) > 0
    number = number[np.repeat(kept, np.diff(sequences.bounds))]
    dropped = sequences.documents - np.count_nonzero(np.diff(number, prepend=0))
    return replace(
        _chosen(sequences, kept), dropped_documents=int(dropped), targets=int(counts.sum())
    )


def count_labels(labels: npt.NDArray[np.int32], starts: Integers, ends: Integers) -> Integers:
    """Labels with loss in each range. The ranges are in order and do not overlap."""
    counts = np.zeros(len(starts), dtype=np.int64)
    first = 0
    while first < len(starts):
        begin = starts[first]
        last = max(first + 1, int(np.searchsorted(ends, begin + _COUNTED_TOKENS)))
        sums = np.cumsum(np.append(0, labels[begin : ends[last - 1]] != IGNORED))
        counts[first:last] = sums[ends[first:last] - begin] - sums[starts[first:last] - begin]
        first = last
        advanced()
    return counts


def stream(offsets: Integers, length: int) -> Sequences:
    """All documents in a row, split every `length` tokens. Only the last sequence has padding."""
    total = int(offsets[-1])
    cuts = np.arange(0, total, length, dtype=np.int64)
    starts = np.union1d(cuts, offsets[:-1])
    lengths = np.diff(np.append(starts, total))
    bounds = np.append(np.searchsorted(starts, cuts), len(starts))
    first = np.searchsorted(cuts, offsets[:-1], side="right")
    last = np.searchsorted(cuts, offsets[1:] - 1, side="right")
    split = int((last > first).sum())
    return Sequences(starts, lengths, bounds, documents=len(offsets) - 1, split_documents=split)


def stream_of_text(offsets: Integers, length: int, begins: Integers | None = None) -> Stream:
    """`stream`, without pieces and without the sequences that have no target: each of their tokens is
    the last one of its document. begins: see `Stream`. No document is empty."""
    documents, total = len(offsets) - 1, int(offsets[-1])
    count = -(-total // length)
    lost = [np.zeros(0, dtype=np.int64)]  # numbers of sequences without a target
    split = dropped = 0
    before = -1  # the document that the last cut divides
    for block in range(0, count, _COUNTED_SEQUENCES):
        numbered = np.arange(block, min(block + _COUNTED_SEQUENCES, count) + 1)
        cuts = np.minimum(numbered * length, total)
        ended = np.searchsorted(offsets, cuts, side="right") - 1  # documents before the cut
        divided = np.where(offsets[ended] < cuts, ended, -1)[:-1]
        new = divided != np.append(before, divided[:-1])
        split += int(np.count_nonzero((divided >= 0) & new))
        before = int(divided[-1])
        kept = np.diff(ended) < np.diff(cuts)
        dropped += int((np.diff(ended) - (divided >= 0))[~kept].sum())
        lost.append(numbered[:-1][~kept])
        advanced()
    without = np.concatenate(lost)
    return Stream(
        offsets,
        length,
        begins,
        np.delete(np.arange(count), without) if len(without) else None,
        documents=documents,
        split_documents=split,
        dropped_documents=dropped,
        targets=total - documents,
    )


def separate(offsets: Integers, length: int, *, cut: bool = False) -> Sequences:
    """One piece per sequence. Documents longer than `length` are split, or cut."""
    sizes = np.diff(offsets)
    longer = sizes > length
    if cut:
        starts, lengths = offsets[:-1], np.minimum(sizes, length)
        counts = {"cut_documents": int(longer.sum()), "cut_tokens": int((sizes - lengths).sum())}
    else:
        pieces = -(-sizes // length)
        number = np.arange(int(pieces.sum()), dtype=np.int64)
        number -= np.repeat(np.cumsum(pieces) - pieces, pieces)  # of the piece in its document
        starts = np.repeat(offsets[:-1], pieces) + number * length
        lengths = np.minimum(np.repeat(offsets[1:], pieces) - starts, length)
        counts = {"split_documents": int(longer.sum())}
    bounds = np.arange(len(starts) + 1, dtype=np.int64)
    return Sequences(starts, lengths, bounds, documents=len(sizes), **counts)


def best_fit(pieces: Sequences, length: int) -> Sequences:
    """The pieces of `separate` in few sequences (best-fit decreasing). A piece has 1 to `length`
    tokens.

    Needs at most 11/9 of the fewest sequences possible, and 4 more (Johnson, 1974).
    """
    number = _numbered(_fitted(pieces.lengths, length))
    order = np.argsort(number, kind="stable")
    return replace(
        pieces,
        starts=pieces.starts[order],
        lengths=pieces.lengths[order],
        bounds=np.append(0, np.cumsum(np.bincount(number))),
    )


def _numbered(sequence: Integers) -> Integers:
    """The number of the sequence of each piece, (pieces,), where sequences are numbered by their first
    pieces, so that shuffle: false stays near the order of the files."""
    pieces = np.arange(len(sequence))
    first = np.empty_like(pieces)  # piece of each sequence
    first[sequence[::-1]] = pieces[::-1]
    first = first[sequence]
    number: Integers = np.cumsum(first == pieces)[first] - 1
    return number


def _fitted(lengths: Integers, length: int) -> Integers:
    """The sequence of each piece, (pieces,), by best fit for the longest first.

    A piece goes to the fullest sequence that has room for it; of several, to the one that was last
    filled up to there. So pieces of one size that follow each other fill sequences of equal room one
    after another, each until it has no room for a further one. That takes one operation for a range
    of sequences.
    """
    counts = np.bincount(lengths)
    room: dict[int, list[range]] = {}  # free tokens: sequences, the last one is filled first
    free: list[int] = []  # sorted keys of `room`
    filled: list[tuple[int, int, int, int]] = []  # a range, its length, pieces of each sequence
    opened = 0

    def fill(sequences: range, left: int) -> None:
        if left not in room:
            bisect.insort(free, left)
        room.setdefault(left, []).append(sequences)

    for size in np.flatnonzero(counts)[::-1].tolist():
        pieces = int(counts[size])
        while pieces:
            at = bisect.bisect_left(free, size)
            new = at == len(free)
            left = length if new else free[at]
            most = min(pieces, left // size)
            wanted = pieces // most
            if new:
                sequences = range(opened, opened + wanted)
                opened += wanted
            else:
                last = room[left].pop()
                taken = min(wanted, len(last))
                sequences = last[len(last) - taken :][::-1]
                if taken < len(last):
                    room[left].append(last[: len(last) - taken])
                elif not room[left]:
                    del room[left], free[at]
            fill(sequences, left - most * size)
            filled.append((sequences.start, sequences.step, len(sequences), most))
            pieces -= most * len(sequences)
    starts, steps, sizes, each = np.array(filled, dtype=np.int64).reshape(-1, 4).T
    place = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # in its range
    found = np.repeat(starts, sizes) + np.repeat(steps, sizes) * place
    small = np.uint16 if length < 1 << 16 else np.int64  # numpy sorts it in linear time
    longest_first = np.argsort((length - lengths).astype(small), kind="stable")
    sequence = np.empty(len(lengths), dtype=np.int64)
    sequence[longest_first] = np.repeat(found, np.repeat(each, sizes))
    return sequence


class NothingToTrainError(RecipeError):
    """Data without a sample."""


def first_names(names: Iterable[str]) -> str:
    """The first five names, for a message."""
    listed = list(names)
    return ", ".join(listed[:5]) + (" ..." if listed[5:] else "")


def no_targets(files: str, data: schema.Data) -> str:
    """The message for data without any token with loss."""
    why = "all labels are -100, or rows have a single token"
    whole = KINDS[data.kind].learned == "whole answers"
    if whole:
        unit = "pair" if data.batch_unit == "pairs" else "row"
        why = f"no {unit} fits into {data.sequence_length} tokens (data.sequence_length)"
    if data.drops_overlong and not whole:
        why = f"no row with loss fits into {data.sequence_length} tokens (data.sequence_length)"
        why += "; raise it, or cut such rows (data.overlong)"
    elif KINDS[data.kind].is_cut:
        first = f"the first {data.sequence_length} tokens of its row (data.sequence_length)"
        why = f"each answer begins after {first}"
    return f"data: no token with loss in {files}: {why}"
