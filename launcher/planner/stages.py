"""The division of a model into the stages of a pipeline, if each stage must fit into memory."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import accumulate

from launcher.models.pipeline import balanced
from launcher.planner.machine import Machine
from launcher.planner.plan import estimated_plan
from launcher.planner.profile import costs_of_blocks
from launcher.planner.work import Work


def blocks_that_fit(work: Work, machine: Machine) -> tuple[int, ...] | None:
    """The number of blocks of each stage with which the stage that computes longest takes the least time,
    if each stage must fit into the memory of a GPU by the estimate. None if no division fits, or if a
    rank has several stages.

    The first stages hold the activations of most micro-batches, and the last one has the logits. Memory
    is taken as linear in the blocks of a class, and in the micro-batches that a rank holds.
    """
    size, kinds, memory = (
        work.strategy.pipeline_parallel_size,
        work.profile.block_classes,
        machine.memory,
    )
    if memory is None or work.chunks > 1 or size > len(kinds):
        return None

    @functools.cache
    def needed(rank: int, kind: int, count: int) -> int:
        """Bytes that a rank with so many blocks of a class needs."""
        return estimated_plan(work.of_rank(rank, [kinds.index(kind)] * count), machine).needed

    def line(rank: int, kind: int) -> tuple[float, float]:
        """Bytes without a block, and for each block."""
        # Two blocks are not enough: while one computes, the next one is gathered
        one, three = needed(rank, kind, 1), needed(rank, kind, 3)
        slope = (three - one) / 2
        return one - slope, slope

    def between(rank: int, kind: int) -> tuple[float, float]:
        """`line` of a rank; for those between the second and the second last one by interpolation."""
        if rank in (0, size - 1) or size < 4:
            return line(rank, kind)
        share = (rank - 1) / (size - 3)
        (start, first), (end, last) = line(1, kind), line(size - 2, kind)
        return start + share * (end - start), first + share * (last - first)

    lines = [{kind: between(rank, kind) for kind in {*kinds}} for rank in range(size)]
    counts = [Counter[int](), *accumulate(Counter([kind]) for kind in kinds)]

    def fits(rank: int, start: int, end: int) -> bool:
        of_rank = lines[rank].items()
        fixed = max(without for _, (without, _) in of_rank)
        each = sum(
            slope * (counts[end][kind] - counts[start][kind]) for kind, (_, slope) in of_rank
        )
        return fixed + each <= memory

    found = balanced(costs_of_blocks(work.profile), size, fits)
    return None if found is None else tuple(len(part) for part in found)
