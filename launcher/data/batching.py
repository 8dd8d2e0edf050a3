"""Which sample is at which position of the run, and which positions a rank computes.

The order of samples is a function of (seed, epoch, global position) alone: the same on any
hardware, and a checkpoint need only hold the number of samples before it.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from launcher.recipe import schema

_MASK = (1 << 64) - 1

NO_SAMPLE = -1
"""Index of an empty row: after the last epoch, or where the ranks do not divide the batch."""


@dataclass(frozen=True)
class Position:
    """Progress of a run."""

    step: int = 0
    """Finished optimizer steps."""
    samples: int = 0
    """Samples before this position, with those of skipped batches."""
    skipped_batches: int = 0
    """Batches before this position that were skipped because the run diverged on them."""
    stream: Mapping[str, Any] | None = None
    """`StreamOrder.state`, from a checkpoint."""


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, ranks: int) -> int:
    """Micro-batches per rank and optimizer step."""
    return -(-global_batch_size // (micro_batch_size * ranks))


def rows_of(batch: schema.Batch, *, row_length: int) -> int:
    """Full rows per micro-batch. row_length: `Data.row_length`."""
    if isinstance(batch.micro_batch_size, int):
        return batch.micro_batch_size
    return max(1, (batch.micro_batch_tokens or row_length) // row_length)


Index = int | tuple[int, ...]
"""A row of a micro-batch: the index of a sample, or those of the samples that share the row."""


def row_tokens(row: Index, lengths: Sequence[int]) -> int:
    """Tokens of a row without padding. lengths: of the samples; an index may count on through the
    epochs."""
    samples = row if isinstance(row, tuple) else (row,)
    return sum(int(lengths[index % len(lengths)]) for index in samples if index != NO_SAMPLE)


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def permuted(index: int, *, size: int, seed: int, epoch: int) -> int:
    """Element `index` of a pseudo-random permutation of range(size).

    A balanced Feistel network over the smallest even number of bits that hold `size`, applied until
    the result is below `size` (cycle walking: Black and Rogaway, 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = _mix((seed * 0x9E3779B97F4A7C15 + epoch + 1) & _MASK)
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            mixed = _mix((right + key + turn * 0xD1B54A32D192ED03) & _MASK) & mask
            left, right = right, left ^ mixed
        index = (left << half) | right
        if index < size:
            return index


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The samples of all epochs, one after another."""

    samples: int
    """Per epoch."""
    seed: int
    shuffle: bool
    epochs: int | None = None
    with_epoch: bool = False
    """Whether `sample` adds the samples of the epochs before."""

    def sample(self, position: int) -> int:
        """Index of the sample at a global position, or NO_SAMPLE after the last epoch."""
        epoch, index = divmod(position, self.samples)
        if self.epochs is not None and epoch >= self.epochs:
            return NO_SAMPLE
        if self.shuffle:
            index = permuted(index, size=self.samples, seed=self.seed, epoch=epoch)
        return index + epoch * self.samples if self.with_epoch else index

    def epochs_seen(self, positions: int) -> list[float]:
        """How many times the first `positions` positions go through each source."""
        return [positions / self.samples]


_PERIOD = 4096


@dataclass(frozen=True)
class Blend:
    """The shares of the sources of a mixture."""

    weights: tuple[float, ...]
    """Of the sequences, after the stages."""
    stages: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """The last step of each stage, and the weights in it; 0: a source is not used."""
    most: tuple[float | None, ...] = ()
    """How many times each source is used at most; None: no limit. Empty: there are no limits."""

    def scaled(self, factors: Sequence[float]) -> Blend:
        """With the weights times a factor for each source."""

        def times(weights: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(w * factor for w, factor in zip(weights, factors, strict=True))

        stages = tuple((step, times(weights)) for step, weights in self.stages)
        return Blend(times(self.weights), stages, self.most)


def shares(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum."""
    whole = sum(weights)
    return [weight / whole for weight in weights]


@dataclass(frozen=True)
class _Alternation:
    """Positions of a mixture in which the shares are the same."""

    start: int
    end: int | None
    counts: list[int]
    """Positions of each source in a period."""
    turns: list[tuple[int, int]]
    """For each position of a period: the source, and its number of earlier positions in it."""
    before: list[int]
    """Samples of each source before `start`."""

    def turn(self, position: int) -> tuple[int, int]:
        """The source of a position, and its number of earlier samples."""
        period, index = divmod(position - self.start, _PERIOD)
        source, earlier = self.turns[index]
        return source, self.before[source] + period * self.counts[source] + earlier

    def had(self, end: int) -> list[int]:
        """Samples of each source before a position."""
        periods, rest = divmod(end - self.start, _PERIOD)
        found = [have + periods * n for have, n in zip(self.before, self.counts, strict=True)]
        for source, _ in self.turns[:rest]:
            found[source] += 1
        return found

    def end_of(self, source: int, samples: int) -> int:
        """The position after the one with this number of samples of a source, which has fewer before
        `start`."""
        periods, left = divmod(samples - self.before[source] - 1, self.counts[source])
        index = next(n for n, turn in enumerate(self.turns) if turn == (source, left))
        return self.start + periods * _PERIOD + index + 1


def _alternation(start: int, weights: Sequence[float], before: list[int]) -> _Alternation:
    """In a period each source with a weight has its share, rounded to at least one and spread evenly
    (smooth weighted round-robin)."""
    counts = [max(1, round(each * _PERIOD)) if each else 0 for each in shares(weights)]
    counts[counts.index(max(counts))] += _PERIOD - sum(counts)
    turns = list[tuple[int, int]]()
    had, credit = [0] * len(counts), [0] * len(counts)
    for _ in range(_PERIOD):
        credit = [have + more for have, more in zip(credit, counts, strict=True)]
        source = credit.index(max(credit))
        credit[source] -= _PERIOD
        turns.append((source, had[source]))
        had[source] += 1
    return _Alternation(start, None, counts, turns, before)


class MixtureOrder:
    """Several sources in fixed shares. Each has its own order, and they alternate by their weights.

    The alternation repeats after 4,096 positions, and begins again where the shares change: at the end
    of a stage, and where a source is used up. An epoch has as many positions as the sources have
    samples, so a source with a larger share than its size repeats, in another order.
    """

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        shuffle: bool,
        epochs: int | None = None,
        stages: Sequence[tuple[int, Sequence[float]]] = (),
        most: Sequence[float | None] = (),
    ) -> None:
        """stages: the position after each stage before `weights` hold, and its weights. most: how many
        times each source is used at most."""
        self.samples, self.epochs, count = sum(sizes), epochs, len(sizes)
        self._offsets = [sum(sizes[:source]) for source in range(count)]
        self._orders = [
            SampleOrder(samples=size, seed=_mix((seed * count + source) & _MASK), shuffle=shuffle)
            for source, size in enumerate(sizes)
        ]
        limits = [
            None if times is None else max(1, round(times * size))
            for times, size in zip(most or [None] * count, sizes, strict=True)
        ]
        self.end: int | None = None
        """The position at which all sources are used up; None: there is none."""
        self._parts = list[_Alternation]()
        position, had, left = 0, [0] * count, [*stages, (None, weights)]
        while left:
            end, of_stage = left[0]
            open_weights = [
                0.0 if limit is not None and have >= limit else weight
                for weight, limit, have in zip(of_stage, limits, had, strict=True)
            ]
            if not any(open_weights):
                self.end = position
                break
            part = _alternation(position, open_weights, had)
            ends = [
                part.end_of(source, limit)
                for source, limit in enumerate(limits)
                if limit is not None and part.counts[source]
            ]
            next_end = min([*ends, *([] if end is None else [end])], default=None)
            if next_end is not None:
                part = replace(part, end=next_end)
                position, had = next_end, part.had(next_end)
            self._parts.append(part)
            if next_end is None or next_end == end:
                del left[0]
        self._starts = [part.start for part in self._parts]

    def _part(self, position: int) -> _Alternation:
        return self._parts[bisect.bisect_right(self._starts, position) - 1]

    def sample(self, position: int) -> int:
        """Index of the sample at a global position, or NO_SAMPLE after the last epoch."""
        if self.epochs is not None and position >= self.epochs * self.samples:
            return NO_SAMPLE
        if self.end is not None and position >= self.end:
            return NO_SAMPLE
        source, turn = self._part(position).turn(position)
        return self._offsets[source] + self._orders[source].sample(turn)

    def shares_at(self, position: int) -> list[float]:
        """The share of each source where a position is."""
        return shares(self._part(position).counts)

    def epochs_seen(self, positions: int) -> list[float]:
        """How many times the first `positions` positions go through each source."""
        positions = positions if self.end is None else min(positions, self.end)
        had = self._part(max(0, positions - 1)).had(positions)
        return [count / order.samples for count, order in zip(had, self._orders, strict=True)]


_WINDOW, _GROUP = 4096, 64
"""Positions of a window of `SimilarLengths`, and samples of similar length that follow each other."""


class SimilarLengths:
    """An order in which samples of similar length follow each other, so that they need little padding.

    Each epoch is cut into windows. The samples of a window are sorted by length and cut into groups,
    and the groups are shuffled. This depends on neither batch sizes nor ranks.
    """

    def __init__(
        self, order: SampleOrder | MixtureOrder, lengths: Sequence[int], seed: int
    ) -> None:
        self.samples, self.epochs = order.samples, order.epochs
        self._order, self._lengths, self._seed = order, lengths, seed
        self._windows: dict[int, list[int]] = {}
        """The samples of the windows that were used last, by their first position."""

    def sample(self, position: int) -> int:
        """Index of the sample at a global position, or NO_SAMPLE after the last epoch."""
        epoch, index = divmod(position, self.samples)
        if self.epochs is not None and epoch >= self.epochs:
            return NO_SAMPLE
        first = position - index % _WINDOW
        if first not in self._windows:
            last = min(first + _WINDOW, (epoch + 1) * self.samples)
            if len(self._windows) > 1:
                del self._windows[min(self._windows)]
            self._windows[first] = self._sorted(first, last)
        return self._windows[first][position - first]

    def _sorted(self, first: int, last: int) -> list[int]:
        found = [self._order.sample(position) for position in range(first, last)]
        found.sort(key=lambda sample: self._lengths[sample % len(self._lengths)])
        groups = [found[start : start + _GROUP] for start in range(0, len(found), _GROUP)]
        turns = range(len(groups))
        shuffled = [permuted(n, size=len(groups), seed=self._seed, epoch=first) for n in turns]
        return [sample for number in shuffled for sample in groups[number]]

    def epochs_seen(self, positions: int) -> list[float]:
        """How many times the first `positions` positions go through each source, up to a window."""
        return self._order.epochs_seen(positions)


class Order(Protocol):
    """Which sample is at which global position: one of the classes above, or that of a stream
    (`streaming.py`)."""

    @property
    def samples(self) -> int:
        """Per epoch; 0: not known."""

    @property
    def epochs(self) -> int | None:
        """None: there is no last one."""

    def sample(self, position: int) -> int:
        """Index of the sample at a global position, or NO_SAMPLE after the last epoch."""

    def epochs_seen(self, positions: int) -> list[float]:
        """How many times the first `positions` positions go through each source."""


@dataclass(frozen=True, kw_only=True)
class _RankPart:
    """The part of the run that a sampler covers."""

    order: Order
    global_batch_size: int
    rank: int = 0
    ranks: int = 1
    first_step: int = 0
    """0-based."""
    first_sample: int | None = None
    """Global position of the first sample of `first_step`; None: all steps before it had
    `global_batch_size` samples."""
    steps: int

    def start_of(self, step: int) -> int:
        """Global position of the first sample of a step."""
        if self.first_sample is None:
            return step * self.global_batch_size
        return self.first_sample + (step - self.first_step) * self.global_batch_size

    def samples_of(self, step: int) -> list[int]:
        """The samples of a step, without empty ones."""
        start = self.start_of(step)
        drawn = map(self.order.sample, range(start, start + self.global_batch_size))
        return [sample for sample in drawn if sample != NO_SAMPLE]


@dataclass(frozen=True, kw_only=True)
class RankBatchSampler(_RankPart):
    """Micro-batches of a fixed number of rows.

    Micro-batch m of rank r has the positions from (m * ranks + r) * micro_batch_size on.
    """

    micro_batch_size: int

    def micro_batches(self, step: int) -> int:
        """Of a step (0-based): the same number on every rank."""
        size, micro = self.global_batch_size, self.micro_batch_size
        return accumulation_steps(global_batch_size=size, micro_batch_size=micro, ranks=self.ranks)

    def __iter__(self) -> Iterator[list[int]]:
        """The sample indices of each micro-batch of this rank."""
        for step in range(self.first_step, self.steps):
            first, size = self.start_of(step), self.micro_batch_size
            for micro in range(self.micro_batches(step)):
                start = (micro * self.ranks + self.rank) * size
                yield [
                    self.order.sample(first + row) if row < self.global_batch_size else NO_SAMPLE
                    for row in range(start, start + size)
                ]


@dataclass(frozen=True, kw_only=True)
class TokenBatchSampler(_RankPart):
    """Micro-batches of a limited number of tokens, padding included: the samples of a step, sorted
    by length and cut into groups."""

    lengths: Sequence[int]
    """Tokens of each sample."""
    width: Callable[[int], int] = int
    """Tokens of a row of a micro-batch whose longest sample has this length."""
    micro_batch_tokens: int
    """At least the width of the longest sample."""

    def groups(self, step: int) -> list[list[int]]:
        """All ranks' micro-batches of a step; rank r has every ranks-th one from r on."""
        samples, lengths = self.samples_of(step), self.lengths
        samples.sort(key=lambda sample: -row_tokens(sample, lengths))
        groups: list[list[int]] = []
        while samples:
            width = max(1, self.width(row_tokens(samples[0], lengths)))
            rows = max(1, self.micro_batch_tokens // width)
            groups.append(samples[:rows])
            samples = samples[rows:]
        # If the groups do not divide by the ranks, split groups before a rank gets none
        while not groups or len(groups) % self.ranks:
            largest = max(groups, key=len, default=[])
            if len(largest) > 1:
                index, half = groups.index(largest), (len(largest) + 1) // 2
                groups[index : index + 1] = [largest[:half], largest[half:]]
            else:
                groups.append([NO_SAMPLE])
        return groups

    def micro_batches(self, step: int) -> int:
        """Micro-batches of a step (0-based): the same number on every rank."""
        return len(self.groups(step)) // self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.steps):
            yield from self.groups(step)[self.rank :: self.ranks]


@dataclass(frozen=True, kw_only=True)
class JoinedBatchSampler(_RankPart):
    """Micro-batches of rows that samples of a step share, without padding between them. Each rank has
    as many rows, which are about equally full."""

    lengths: Sequence[int]
    """Tokens of each sample."""
    row_length: int
    """Most tokens of a row; at least those of the longest sample."""
    rows: int
    """Most rows of a micro-batch."""

    def micro_batches(self, step: int) -> int:
        """Of a step (0-based): the same number on every rank."""
        return -(-len(self._of_step(step)) // (self.ranks * self.rows))

    def _of_step(self, step: int) -> list[tuple[int, ...]]:
        """The rows of all ranks, the fullest first."""
        return joined_rows(
            self.samples_of(step), self.lengths, row_length=self.row_length, ranks=self.ranks
        )

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        for step in range(self.first_step, self.steps):
            mine = self._of_step(step)[self.rank :: self.ranks]
            count = -(-len(mine) // self.rows)
            ends = [len(mine) * number // count for number in range(count + 1)]
            yield from (mine[start:end] for start, end in itertools.pairwise(ends))


def joined_rows(
    samples: Sequence[int], lengths: Sequence[int], *, row_length: int, ranks: int
) -> list[tuple[int, ...]]:
    """Samples in rows of up to `row_length` tokens, the fullest first: a multiple of `ranks`, few,
    and about equally full. Each sample, the longest first, goes to the row with the fewest tokens,
    or to a new one if it does not fit there."""
    sizes = {sample: row_tokens(sample, lengths) for sample in samples}
    ordered = sorted(samples, key=lambda sample: -sizes[sample])
    count = -(-sum(sizes[sample] for sample in samples) // row_length)
    while True:
        count = max(1, -(-count // ranks)) * ranks
        rows: list[list[int]] = [[] for _ in range(count)]
        least = [(0, row) for row in range(count)]
        for sample in ordered:
            tokens, row = least[0]
            if tokens + sizes[sample] <= row_length:
                heapq.heapreplace(least, (tokens + sizes[sample], row))
            else:
                row = len(rows)
                rows.append([])
                heapq.heappush(least, (sizes[sample], row))
            rows[row].append(sample)
        if len(rows) % ranks == 0:
            fullest = sorted(least, key=lambda at: (-at[0], at[1]))
            return [tuple(rows[row]) for _, row in fullest]
        count = len(rows)


BatchSampler = RankBatchSampler | TokenBatchSampler | JoinedBatchSampler


def make_batch_sampler(
    batch: schema.Batch,
    *,
    lengths: Sequence[int] | None,
    width: Callable[[int], int] = int,
    joined: int | None = None,
    **part: Any,
) -> BatchSampler:
    """The sampler of a rank. `lengths` and `width` are those of `TokenBatchSampler`; part holds the
    other fields of `_RankPart`. joined: tokens of a row that samples share; None: each has its own."""
    part["global_batch_size"] = batch.global_batch_size
    if joined is not None:
        assert lengths is not None
        rows = rows_of(batch, row_length=joined)
        return JoinedBatchSampler(lengths=lengths, row_length=joined, rows=rows, **part)
    if batch.micro_batch_tokens is None:
        assert isinstance(batch.micro_batch_size, int)  # `auto` was resolved before
        return RankBatchSampler(micro_batch_size=batch.micro_batch_size, **part)
    assert lengths is not None
    return TokenBatchSampler(
        micro_batch_tokens=batch.micro_batch_tokens, lengths=lengths, width=width, **part
    )


def blend_of(data: schema.Data) -> Blend | None:
    """The shares of the sources of data.train, a mixture, in data.mixture_unit; None: all weights are
    `size`."""
    assert isinstance(data.train, dict)
    sources = data.train.values()
    weights = tuple(source.weight for source in sources if source.weight != "size")
    if not weights:
        return None
    stages = tuple(
        (stage.until_step, tuple(stage.weights[name] for name in data.train))
        for stage in data.mixture_stages or ()
    )
    most = tuple(source.max_epochs for source in sources)
    return Blend(weights, stages, most if any(most) else ())
