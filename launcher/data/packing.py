"""Documents into sequences: which pieces of which documents stand in one.

A piece is a run of tokens of one document. Every token of every document stands in exactly one piece; where a
document is cut, the first token of the next piece is still the target of the last token of this one, so no target is
lost to the cut but the context before it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sequences:
    """Sequences as lists of pieces."""

    starts: Integers
    """First token of each piece in the store, (pieces,)."""
    lengths: Integers
    """Tokens of each piece, (pieces,)."""
    bounds: Integers
    """Where each sequence's pieces start, and the end: (sequences + 1,)."""
    split_documents: int
    """Documents that did not fit into one sequence and were cut."""

    def __len__(self) -> int:
        return len(self.bounds) - 1


def stream(offsets: Integers, length: int) -> Sequences:
    """All documents behind one another, cut every `length` tokens: no padding but in the last sequence."""
    total = int(offsets[-1])
    cuts = np.arange(0, total, length, dtype=np.int64)
    starts = np.union1d(cuts, offsets[:-1])
    lengths = np.diff(np.append(starts, total))
    bounds = np.append(np.searchsorted(starts, cuts), len(starts))
    crossing = np.searchsorted(cuts, offsets[1:] - 1, side="right") - np.searchsorted(cuts, offsets[:-1], side="right")
    return Sequences(starts, lengths, bounds, int((crossing > 0).sum()))


def separate(offsets: Integers, length: int) -> Sequences:
    """One piece a sequence: documents as they are, longer ones cut."""
    starts, lengths, split = _pieces(offsets, length)
    return Sequences(starts, lengths, np.arange(len(starts) + 1, dtype=np.int64), split)


def best_fit(offsets: Integers, length: int) -> Sequences:
    """Whole documents into as few sequences as best-fit decreasing finds; only longer ones than a sequence are cut.

    Best-fit decreasing needs at most 11/9 of the fewest sequences possible, and 4 more (Johnson, 1974).
    """
    starts, lengths, split = _pieces(offsets, length)
    contents: list[list[int]] = []
    room: dict[int, list[int]] = {}  # free tokens: sequences
    free: list[int] = []  # keys of `room`, sorted
    for piece in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[piece])
        at = bisect.bisect_left(free, size)
        if at == len(free):
            sequence, left = len(contents), length - size
            contents.append([piece])
        else:
            space = free[at]
            sequence, left = room[space].pop(), space - size
            if not room[space]:
                del room[space]
                free.pop(at)
            contents[sequence].append(piece)
        if left not in room:
            room[left] = []
            bisect.insort(free, left)
        room[left].append(sequence)
    # In the order of the earliest document in each, so that shuffle: false stays near the order of the files.
    contents = sorted((sorted(content) for content in contents), key=lambda content: content[0])
    order = np.array([piece for content in contents for piece in content], dtype=np.int64)
    bounds = np.cumsum([0] + [len(content) for content in contents], dtype=np.int64)
    return Sequences(starts[order], lengths[order], bounds, split)


def _pieces(offsets: Integers, length: int) -> tuple[Integers, Integers, int]:
    sizes = np.diff(offsets)
    counts = -(-sizes // length)
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(offsets[:-1], counts) + within * length
    lengths = np.minimum(np.repeat(offsets[1:], counts) - starts, length)
    return starts, lengths, int((counts > 1).sum())
