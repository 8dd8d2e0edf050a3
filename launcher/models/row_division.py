"""How context parallel ranks divide the tokens of rows, and exchange them.

The ranks of a row are `ring` groups of neighbours. A group's ranks have neighbouring tokens, and exchange
tokens against heads (`exchanged`). The groups have different tokens also in attention, and exchange keys
and values (`ring.py`). With one group each rank has one slice of a row. With more, each group has an early
and a late part of each long document, so that all have as much work in causal attention; what a rank
has of a row is then a list of spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from launcher.distributed.rank_layout import RankLayout

Int64s = npt.NDArray[np.int64]
Span = tuple[int, int]
"""A start and an end."""
_LARGE = 0.05
"""Share of a group's work from which on a document is divided over all groups. Documents below it
leave the busiest group with about 1 % more than the mean (rows of 1,048,576 tokens)."""
_whole_rows = ContextVar("whole_rows", default=False)


@contextmanager
def whole_rows() -> Iterator[None]:
    """In this context each rank computes whole rows by itself."""
    token = _whole_rows.set(True)
    try:
        yield
    finally:
        _whole_rows.reset(token)


def computes_whole_rows() -> bool:
    """Whether each rank computes whole rows for now, without the others."""
    return _whole_rows.get()


class RowGroups(NamedTuple):
    """Process groups of this rank."""

    all: dist.ProcessGroup
    """The ranks that have parts of the same rows."""
    heads: dist.ProcessGroup | None
    """Those that exchange tokens against heads; None: this rank has all heads."""
    ring: dist.ProcessGroup | None
    """Those with the same heads of other tokens; None: there are none."""


class DividedRows(NamedTuple):
    """Which tokens of the rows of a micro-batch the groups of a ring have. The rows are flattened.
    What is a numpy array or a number stays on the host, where the steps of the ring are planned."""

    ends: Int64s
    """Where documents start, and the end, (documents + 1,)."""
    spans: list[Int64s]
    """Of each group, in the order of its tokens: start, end, and the place of the first token among the
    group's, (spans, 3)."""
    group: int
    """The number of this rank's group."""
    lengths: list[int]
    """Tokens of the parts of documents that this group has next to each other, in order."""
    bounds: torch.Tensor
    """Where these start among the group's tokens, and the end, (parts + 1,), int32."""
    order: torch.Tensor | None
    """For recurrent layers: where the tokens of the rows are among those of all ranks, one rank after the
    other, (tokens,), int64."""
    plans: dict[int | None, Any]
    """The plan of attention by its window, which layers of the same window share. Empty at first."""


@dataclass(frozen=True)
class RowDivision:
    """The context parallel ranks of a row, and which of them this is."""

    size: int = 1
    """All ranks (strategy.context_parallel_size). The tokens of a row are a multiple of it."""
    ring: int = 1
    """Groups with different tokens also in attention (strategy.context_parallel_ring)."""
    rank: int = 0
    """The ranks of a group are neighbours."""
    groups: RowGroups | None = field(default=None, compare=False, repr=False)
    """None in loader processes, which only collate."""

    @classmethod
    def of(cls, ranks: RankLayout, ring: int) -> RowDivision:
        """That of a layout. Every rank must call this: process groups are made."""
        if ranks.context_parallel_size == 1:
            return WHOLE_ROWS
        groups = RowGroups(ranks.stage.context_parallel_group, *ranks.stage.context_groups(ring))
        return cls(ranks.context_parallel_size, ring, ranks.context_parallel_rank, groups)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "groups": None}

    def __deepcopy__(self, memo: object) -> RowDivision:
        return self  # nothing of it changes, and a copied model computes in the same groups

    @property
    def heads(self) -> int:
        """The number of ranks that exchange tokens against heads."""
        return self.size // self.ring

    @property
    def group(self) -> int:
        """The number of this rank's group in the ring."""
        return self.rank // self.heads

    def padded(self, width: int) -> int:
        """The tokens of rows of `width` tokens that are padded so that they can be divided."""
        return -(-width // self.size) * self.size

    def slice_of(self, width: int) -> slice:
        """This rank's tokens of a row of `width`, where there is one group."""
        assert self.ring == 1
        size = width // self.size
        return slice(self.rank * size, (self.rank + 1) * size)

    def place(
        self, ends: Int64s, *, rows: int, width: int, recurrent: bool = False
    ) -> DividedRows | None:
        """Where the tokens of rows of a micro-batch go; None: each rank has one slice of each row.
        ends: see `DividedRows`; each row ends a document. recurrent: with `order`."""
        if self.ring == 1:
            return None
        of_rows = list[list[list[Span]]]()
        for row in range(rows):
            first, last = np.searchsorted(ends, [row * width, (row + 1) * width])
            of_rows.append(placed(ends[first : last + 1].tolist(), self.ring))
        spans = list[Int64s]()
        for group in range(self.ring):
            each = np.array([span for row in of_rows for span in row[group]], dtype=np.int64)
            places = np.cumsum(each[:, 1] - each[:, 0])
            spans.append(np.column_stack([each, places - each[:, 1] + each[:, 0]]))
        lengths = list[int]()
        for start, end, _ in spans[self.group].tolist():
            first, last = np.searchsorted(ends, [start, end])
            inner = ends[first + int(ends[first] == start) : last].tolist()
            lengths += [after - before for before, after in pairwise([start, *inner, end])]
        bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        order = None
        if recurrent:
            each = np.stack([self._tokens(spans, rank, rows) for rank in range(self.size)])
            order = torch.from_numpy(each.ravel().argsort())
        return DividedRows(ends, spans, self.group, lengths, bounds, order, {})

    def _tokens(self, spans: Sequence[Int64s], rank: int, rows: int) -> Int64s:
        """The tokens of the flattened rows that a rank has, (rows, tokens of a row)."""
        of_group = [np.arange(start, end) for start, end, _ in spans[rank // self.heads].tolist()]
        by_rank = np.concatenate(of_group).reshape(rows, self.heads, -1)
        return by_rank[:, rank % self.heads]

    def tokens(self, divided: DividedRows | None, *, rows: int, width: int) -> Int64s:
        """The tokens of each row that this rank has, in order, (rows, tokens of this rank)."""
        if divided is None:
            return np.broadcast_to(
                np.arange(width)[self.slice_of(width)], (rows, width // self.size)
            )
        own = self._tokens(divided.spans, self.rank, rows)
        return own - width * np.arange(rows)[:, None]

    def take(self, of_tokens: torch.Tensor, divided: DividedRows | None) -> torch.Tensor:
        """This rank's part of what rows have for each token, (rows, tokens)."""
        if self.size == 1:
            return of_tokens
        rows, width = of_tokens.shape
        if divided is None:
            return of_tokens[:, self.slice_of(width)].contiguous()
        own = self.tokens(divided, rows=rows, width=width)
        return of_tokens.gather(1, torch.from_numpy(own).to(of_tokens.device))


WHOLE_ROWS = RowDivision()
"""Each rank has whole rows."""


def rings_that_fit(ranks: int, heads: int) -> list[int]:
    """The numbers of groups with which these ranks can divide so many attention heads. The first one is
    the smallest; that of all ranks always fits."""
    rings = [ring for ring in range(1, ranks + 1) if ranks % ring == 0]
    return [ring for ring in rings if heads % (ranks // ring) == 0]


def placed(ends: Sequence[int], ring: int) -> list[list[Span]]:
    """The spans of a row that each group of the ring has, as many tokens each, so that all have as much
    work in causal attention. ends: where documents start, and the end; `ring` divides the tokens.

    A document with much work is cut into 2 `ring` pieces, of which group g has pieces g and
    2 ring - 1 - g: the work of a piece grows with its number, so that each pair is the same. The others
    stay whole where there is room: the largest first, each in the group with the least work.
    """
    room = [(ends[-1] - ends[0]) // ring] * ring
    lengths = [end - start for start, end in pairwise(ends)]
    small = _LARGE * sum(length**2 for length in lengths) / ring
    found: list[list[Span]] = [[] for _ in room]
    work, others = [0] * ring, list[tuple[int, int, int]]()  # length, start, start of the document
    for start, length in zip(ends, lengths, strict=False):
        piece = length // (2 * ring) if length**2 > small else 0
        for group in range(ring) if piece else ():
            for number in (group, 2 * ring - 1 - group):
                found[group].append((start + number * piece, start + (number + 1) * piece))
            room[group] -= 2 * piece
            work[group] += 2 * ring * piece**2
        if rest := length - 2 * ring * piece:
            others.append((rest, start + 2 * ring * piece, start))
    free = [(work[group], group) for group in range(ring) if room[group]]
    heapify(free)
    for length, start, document in sorted(others, reverse=True):
        left = length
        while left:
            done, group = heappop(free)
            count = min(left, room[group])
            found[group].append((start, start + count))
            room[group] -= count
            done += ((start + count - document) ** 2 - (start - document) ** 2) // 2
            start, left = start + count, left - count
            if room[group]:
                heappush(free, (done, group))
    return [_joined(sorted(spans)) for spans in found]


def _joined(spans: list[Span]) -> list[Span]:
    """Spans, joined where they are neighbours."""
    joined = list[Span]()
    for start, end in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


def exchanged(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Divides dimension 1 over the ranks of the group, and joins what they send along dimension
    2."""
    parts = torch.stack(tensor.chunk(group.size(), 1))
    return torch.cat(all_to_all(parts, group).unbind(), 2)


def all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sends the parts along dimension 0, one to each rank of the group, and returns what the ranks have
    sent, in order. So does its backward pass with the gradients."""
    received: torch.Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_to_all(gradient, ctx.group), None
