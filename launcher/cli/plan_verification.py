"""What a plan said beside what was measured: `launcher plan --verify`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.planner.formatting import NAMES
from launcher.planner.plan import Plan
from launcher.planner.verification import compare

if TYPE_CHECKING:
    from launcher.planner.measure import Measured

TOLERANCE, TOLERANCE_UNDER = 0.05, 0.02
"""Of the peak: what the plan may be off by, and by how much it may be less than what was measured."""


def compared(plan: Plan, measured: Measured) -> Iterator[tuple[str, int, int]]:
    """(what, bytes that the plan said, bytes measured), as `memory.verification.compare` has them, and what is outside of tensors.

    measured: `measuring.Measured`; what it could not tell is left out.
    """
    *rows, peak = (row for row in compare(plan.step, measured).rows if not row.by_difference)
    for row in rows:
        yield row.what, row.planned, row.measured
    if measured.context is not None:
        yield NAMES["context"], plan.context, measured.context
    if measured.reserved is not None:
        yield "with margin", plan.step.peak.components.total + plan.margin, measured.reserved
    yield peak.what, peak.planned, peak.measured


def is_true(plan: Plan, measured: Measured) -> bool:
    """Whether the peak is as planned. What the allocator reserves beside it is no part of this: while the device has room it
    caches what each stream once used, and gives it back when the device is full."""
    planned = plan.step.peak.components.total
    return -TOLERANCE_UNDER * measured.peak <= planned - measured.peak <= TOLERANCE * measured.peak
