"""Documents into sequences of pieces.

A piece is a run of tokens of one document. A document that is too long is split into several
pieces, and loses context, but no target; or it is cut to one piece.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from launcher.sources.layouts import KINDS

if TYPE_CHECKING:
    from launcher.data.token_store import TokenStore

Integers = npt.NDArray[np.int64]
_COUNTED_TOKENS = 1 << 22
"""Tokens of labels that are read at once."""


@dataclass(frozen=True)
class Sequences:
    """Which pieces of the store make up each sequence."""

    starts: Integers
    """First token of each piece in the store, (pieces,)."""
    lengths: Integers
    """Tokens of each piece, (pieces,)."""
    bounds: Integers
    """First piece of each sequence, and the end: (sequences + 1,)."""
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

    def __len__(self) -> int:
        return len(self.bounds) - 1


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
) -> Sequences:
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
                return Sequences(empty, empty, np.zeros(1, np.int64), count, long_documents=count)
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
    pieces = (
        stream(packed, sequence_length) if streamed else separate(packed, sequence_length, cut=cut)
    )
    if documents is not None:
        of = np.searchsorted(packed, pieces.starts, side="right") - 1
        pieces = replace(pieces, starts=pieces.starts + (offsets[documents] - packed[:-1])[of])
    if KINDS[kind].loss_on == "class":
        return pieces
    if attachments is not None:
        pieces = _before_cut_attachments(pieces, attachments["first"], attachments["end"])
    pieces = with_targets(pieces, offsets, labels)
    return best_fit(pieces, sequence_length) if packing and not streamed else pieces


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


def text_lengths(store: TokenStore, texts: int) -> Integers:
    """Tokens of each document; with two `texts`, of a pair's longer answer with its
    prompt."""
    lengths: Integers = np.diff(store.offsets)
    if texts == 1:
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
        int(np.count_nonzero(wanted)),
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
    bounds = sequences.bounds
    kept = np.add.reduceat(counts, bounds[:-1]) > 0
    pieces = np.diff(bounds)
    chosen = np.repeat(kept, pieces)
    dropped = sequences.documents - np.count_nonzero(np.diff(number[chosen], prepend=0))
    return replace(
        sequences,
        starts=sequences.starts[chosen],
        lengths=sequences.lengths[chosen],
        bounds=np.cumsum(np.append(0, pieces[kept])),
        dropped_documents=int(dropped),
        targets=int(counts.sum()),
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
    return Sequences(starts, lengths, bounds, len(offsets) - 1, int((last > first).sum()))


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
    return Sequences(starts, lengths, bounds, len(sizes), **counts)


def best_fit(pieces: Sequences, length: int) -> Sequences:
    """The pieces of `separate` in few sequences (best-fit decreasing).

    Needs at most 11/9 of the fewest sequences possible, and 4 more (Johnson, 1974).
    """
    contents: list[list[int]] = []
    room: defaultdict[int, list[int]] = defaultdict(list)  # free tokens: sequences
    free: list[int] = []  # sorted keys of `room` that have a sequence
    for piece in np.argsort(-pieces.lengths, kind="stable").tolist():
        size = int(pieces.lengths[piece])
        at = bisect.bisect_left(free, size)
        if at == len(free):
            sequence, left = len(contents), length - size
            contents.append([])
        else:
            sequence, left = room[free[at]].pop(), free[at] - size
            if not room[free[at]]:
                free.pop(at)
        contents[sequence].append(piece)
        if not room[left]:
            bisect.insort(free, left)
        room[left].append(sequence)
    # Sorted by the first document of each, so that shuffle: false stays near the order of the files
    contents = sorted(sorted(content) for content in contents)
    order = np.array([piece for content in contents for piece in content], dtype=np.int64)
    bounds = np.cumsum([0] + [len(content) for content in contents], dtype=np.int64)
    return replace(
        pieces, starts=pieces.starts[order], lengths=pieces.lengths[order], bounds=bounds
    )


class NothingToTrainError(RecipeError):
    """Data without a sample."""


def first_names(names: Iterable[str]) -> str:
    """The first five names, for a message."""
    listed = list(names)
    return ", ".join(listed[:5]) + (" ..." if listed[5:] else "")


def no_targets(files: str, data: schema.Data) -> str:
    """The message for data without any token with loss."""
    why = "all labels are -100, or rows have a single token"
    whole = KINDS[data.kind].loss_on == "whole answers"
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
