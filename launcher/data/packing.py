"""Documents into sequences of pieces.

A piece is a run of tokens of one document. A document that is too long is split into several
pieces, and loses context, but no target; or it is cut to one piece.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sequences:
    starts: Integers
    """First token of each piece in the store, (pieces,)."""
    lengths: Integers
    """Tokens of each piece, (pieces,)."""
    bounds: Integers
    """First piece of each sequence, and the end: (sequences + 1,)."""
    split_documents: int = 0
    cut_documents: int = 0
    cut_tokens: int = 0

    def __len__(self) -> int:
        return len(self.bounds) - 1


def pack(offsets: Integers, kind: str, *, packing: bool, sequence_length: int) -> Sequences:
    """kind: data.kind. Documents that are too long are split for kinds text and tokens, and cut for
    other kinds: the end of an answer is no useful target without its beginning."""
    cut = kind in ("chat", "instruct", "classification")
    if not packing or kind == "classification":
        return separate(offsets, sequence_length, cut=cut)
    if kind == "text":
        return stream(offsets, sequence_length)
    return best_fit(offsets, sequence_length, cut=cut)


def stream(offsets: Integers, length: int) -> Sequences:
    """All documents in a row, split every `length` tokens. Only the last sequence has padding."""
    total = int(offsets[-1])
    cuts = np.arange(0, total, length, dtype=np.int64)
    starts = np.union1d(cuts, offsets[:-1])
    lengths = np.diff(np.append(starts, total))
    bounds = np.append(np.searchsorted(starts, cuts), len(starts))
    first = np.searchsorted(cuts, offsets[:-1], side="right")
    last = np.searchsorted(cuts, offsets[1:] - 1, side="right")
    return Sequences(starts, lengths, bounds, int((last > first).sum()))


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
    return Sequences(starts, lengths, np.arange(len(starts) + 1, dtype=np.int64), **counts)


def best_fit(offsets: Integers, length: int, *, cut: bool = False) -> Sequences:
    """Whole documents in few sequences (best-fit decreasing). Only longer ones are split, or cut.

    Needs at most 11/9 of the fewest sequences possible, and 4 more (Johnson, 1974).
    """
    pieces = separate(offsets, length, cut=cut)
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
