"""Pure integers: how many micro-batches a step has, and which sample stands where.

The order of samples is a function of (seed, epoch, global position) alone. Ranks, loader processes and micro-batches
only decide who computes a position, never what stands there, so a run with other hardware sees the same samples in the
same order, and the step is all that must be remembered to go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_MASK = (1 << 64) - 1

NO_SAMPLE = -1
"""A slot of the last, incomplete global batch: it is computed as a row without targets and weighs nothing."""


def accumulation_steps(*, global_batch_size: int, micro_batch_size: int, ranks: int) -> int:
    """Micro-batches per rank and optimizer step. The recipe's check has made sure that it is whole."""
    assert global_batch_size % (micro_batch_size * ranks) == 0
    return global_batch_size // (micro_batch_size * ranks)


def total_steps(*, max_steps: int | None, epochs: int | None, samples: int, global_batch_size: int) -> int:
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
            left, right = right, left ^ (_mix((right + key + turn * 0xD1B54A32D192ED03) & _MASK) & mask)
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
        return permuted(index, size=self.samples, seed=self.seed, epoch=epoch) if self.shuffle else index


@dataclass(frozen=True, kw_only=True)
class RankSlots:
    """The positions of a global batch that one rank computes, a list a micro-batch.

    Micro-batch m of rank r holds positions m * ranks * micro + r * micro onwards: with more ranks and fewer
    micro-batches the same rows meet in the same reduction.
    """

    order: SampleOrder
    global_batch_size: int
    micro_batch_size: int
    rank: int
    ranks: int
    first_step: int
    """0-based."""
    steps: int

    def __iter__(self) -> Iterator[list[int]]:
        accumulation = accumulation_steps(
            global_batch_size=self.global_batch_size, micro_batch_size=self.micro_batch_size, ranks=self.ranks
        )
        for step in range(self.first_step, self.steps):
            for micro in range(accumulation):
                start = step * self.global_batch_size + (micro * self.ranks + self.rank) * self.micro_batch_size
                yield [self.order.sample(position) for position in range(start, start + self.micro_batch_size)]
