"""Pure integers: how many micro-batches a step has, and which sample stands where.

The order of samples is a function of (seed, epoch, global position) alone. Ranks, loader processes and micro-batches
only decide who computes a position, never what stands there, so a run with other hardware sees the same samples in the
same order, and the step is all that must be remembered to go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_MASK = (1 << 64) - 1

NO_SAMPLE = -1
"""A slot without a sample: of the last, incomplete global batch, or where the ranks do not divide the batch. It is computed
as a row without targets and weighs nothing."""


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    step: int = 0
    """Finished optimizer steps."""
    skipped_batches: int = 0
    """Batches before it that were not trained on, because the run diverged on them."""
    stream: Mapping[str, Any] | None = None
    """data.streaming: the position in each shard, from a checkpoint."""


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, ranks: int) -> int:
    """Micro-batches per rank and optimizer step. Where the ranks do not divide the batch, which only a resumed run may have,
    the last ones have places to spare."""
    return -(-global_batch_size // (micro_batch_size * ranks))


def total_steps(
    *, max_steps: int | None, epochs: int | None, samples: int, global_batch_size: int
) -> int:
    """Optimizer steps of the run. The last step of the last epoch may be incomplete; no sample is dropped for it."""
    if max_steps is not None:
        return max_steps
    assert epochs is not None
    return -(-epochs * samples // global_batch_size)


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input moves every bit of the output."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def permuted(index: int, *, size: int, seed: int, epoch: int) -> int:
    """Where a pseudo-random permutation of range(size) sends `index`; no memory, no table.

    A balanced Feistel network of six rounds over the smallest even number of bits that hold `size`, walked until the
    result falls inside (cycle walking: Black and Rogaway, 2002; under four rounds of it on average).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = _mix((seed * 0x9E3779B97F4A7C15 + epoch + 1) & _MASK)
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            left, right = (
                right,
                left ^ (_mix((right + key + turn * 0xD1B54A32D192ED03) & _MASK) & mask),
            )
        index = (left << half) | right
        if index < size:
            return index


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The endless order of samples: position 0, 1, 2, ... over all epochs."""

    samples: int
    seed: int
    shuffle: bool
    epochs: int | None = None
    """After so many passes there is NO_SAMPLE; None: go on for ever."""

    def sample(self, position: int) -> int:
        """Index of the sample at a global position, or NO_SAMPLE after the last epoch."""
        epoch, index = divmod(position, self.samples)
        if self.epochs is not None and epoch >= self.epochs:
            return NO_SAMPLE
        return (
            permuted(index, size=self.samples, seed=self.seed, epoch=epoch)
            if self.shuffle
            else index
        )

    def passes(self, positions: int) -> list[float]:
        """How often so many positions go through the data."""
        return [positions / self.samples]


class Order(Protocol):
    """Which sample stands at which global position."""

    @property
    def samples(self) -> int:
        """In one epoch."""

    @property
    def epochs(self) -> int | None:
        """After so many passes there is NO_SAMPLE; None: never."""

    def sample(self, position: int) -> int:
        """Index of the sample at a global position, or NO_SAMPLE after the last epoch."""

    def passes(self, positions: int) -> list[float]:
        """How often so many positions go through each source."""


_PERIOD = 4096


class MixtureOrder:
    """Several sources in fixed shares: every source is an order of its own, and they take turns by their weights.

    The turns repeat after 4,096 positions, in which each source has its share of them to the nearest whole number (at
    least one), spread as evenly as whole numbers allow (smooth weighted round-robin). Sample indices run through the
    sources one after another. An epoch is as many positions as the sources hold samples: a source with more than its
    size's share is gone through more than once in it, in another order each time.
    """

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        shuffle: bool,
        epochs: int | None = None,
    ) -> None:
        self.samples, self.epochs = sum(sizes), epochs
        self._offsets = [sum(sizes[:source]) for source in range(len(sizes))]
        self._orders = [
            SampleOrder(
                samples=size, seed=_mix((seed * len(sizes) + source) & _MASK), shuffle=shuffle
            )
            for source, size in enumerate(sizes)
        ]
        self._counts = _apportion(weights, _PERIOD)
        self._turns: list[tuple[int, int]] = []
        """Of each position in a period: the source, and how many turns that had before in the period."""
        had, credit = [0] * len(sizes), [0] * len(sizes)
        for _ in range(_PERIOD):
            credit = [have + count for have, count in zip(credit, self._counts, strict=True)]
            source = credit.index(max(credit))
            credit[source] -= _PERIOD
            self._turns.append((source, had[source]))
            had[source] += 1

    def sample(self, position: int) -> int:
        """Index of the sample at a global position, or NO_SAMPLE after the last epoch."""
        if self.epochs is not None and position >= self.epochs * self.samples:
            return NO_SAMPLE
        period, place = divmod(position, _PERIOD)
        source, before = self._turns[place]
        return self._offsets[source] + self._orders[source].sample(
            period * self._counts[source] + before
        )

    def passes(self, positions: int) -> list[float]:
        """How often so many positions go through each source."""
        shares = [count / _PERIOD for count in self._counts]
        return [
            positions * share / order.samples
            for share, order in zip(shares, self._orders, strict=True)
        ]


def _apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in the proportion of the weights that add up to `total`, each at least one (largest remainders)."""
    shares = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - shares[index])
    turn = 0
    while sum(counts) < total:
        counts[by_remainder[turn % len(counts)]] += 1
        turn += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts


class Slots(Protocol):
    """The samples that one rank computes: a list of indices a micro-batch, step after step."""

    def __iter__(self) -> Iterator[list[int]]:
        """All micro-batches of the run."""

    def micro_batches(self, step: int) -> int:
        """How many of them belong to a step (0-based): the same number on every rank."""


@dataclass(frozen=True, kw_only=True)
class RankSlots:
    """The positions of a global batch that one rank computes, a list a micro-batch.

    Micro-batch m of rank r holds positions m * ranks * micro + r * micro onwards: with more ranks and fewer
    micro-batches the same rows meet in the same reduction.
    """

    order: Order
    global_batch_size: int
    micro_batch_size: int
    rank: int
    ranks: int
    first_step: int
    """0-based."""
    steps: int

    def micro_batches(self, step: int) -> int:
        """As many in each step."""
        return accumulation_steps(
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            ranks=self.ranks,
        )

    def places(self, micro: int) -> list[int]:
        """The places of the global batch in one of the rank's micro-batches, NO_SAMPLE beyond its end."""
        start = (micro * self.ranks + self.rank) * self.micro_batch_size
        return [
            place if place < self.global_batch_size else NO_SAMPLE
            for place in range(start, start + self.micro_batch_size)
        ]

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.steps):
            for micro in range(self.micro_batches(step)):
                places = self.places(micro)
                yield [
                    self.order.sample(step * self.global_batch_size + place)
                    if place != NO_SAMPLE
                    else NO_SAMPLE
                    for place in places
                ]


@dataclass(frozen=True, kw_only=True)
class TokenSlots:
    """Micro-batches of at most so many tokens, padding included: a step's samples, sorted by length and cut into groups.

    A step has the same samples as with RankSlots. Which of them meet in a micro-batch follows from their lengths alone,
    so every rank knows all ranks' micro-batches without asking.
    """

    order: Order
    lengths: Sequence[int]
    """Tokens of each sample."""
    global_batch_size: int
    micro_batch_tokens: int
    """At least the longest sample's."""
    rank: int
    ranks: int
    first_step: int
    """0-based."""
    steps: int

    def groups(self, step: int) -> list[list[int]]:
        """All ranks' micro-batches of a step (0-based), a multiple of the ranks in number; rank r has every ranks-th from r."""
        start = step * self.global_batch_size
        samples = [
            self.order.sample(position) for position in range(start, start + self.global_batch_size)
        ]
        samples = sorted(
            (sample for sample in samples if sample != NO_SAMPLE),
            key=lambda sample: -int(self.lengths[sample]),
        )
        groups: list[list[int]] = []
        taken = 0
        while taken < len(samples):
            rows = max(1, self.micro_batch_tokens // max(1, int(self.lengths[samples[taken]])))
            groups.append(samples[taken : taken + rows])
            taken += rows
        # What is left over for the last round of ranks is shared out, before a rank gets nothing
        while len(groups) % self.ranks:
            largest = max(range(len(groups)), key=lambda index: len(groups[index]), default=-1)
            if largest < 0 or len(groups[largest]) < 2:
                groups.append([NO_SAMPLE])
                continue
            group = groups[largest]
            groups[largest : largest + 1] = [
                group[: (len(group) + 1) // 2],
                group[(len(group) + 1) // 2 :],
            ]
        return groups or [[NO_SAMPLE] for _ in range(self.ranks)]

    def micro_batches(self, step: int) -> int:
        """How many the step has on each rank."""
        return len(self.groups(step)) // self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.steps):
            yield from self.groups(step)[self.rank :: self.ranks]
