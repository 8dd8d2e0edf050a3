"""The plan compared with what training took (`launcher plan --verify`)."""

from __future__ import annotations

from typing import Any

from launcher.planner.memory import Plan, StepMemory

OVER, UNDER = 0.05, 0.02
"""The plan's peak may be so much more, or less, than the measured one. Less is the worse error:
the job would run out of memory."""


def compare(planned: StepMemory, measured: Any) -> list[tuple[str, int, int]]:
    """Rows of (what, planned bytes, measured bytes), the peak last. measured: a `Measured`."""
    held, optimizer = planned.held, planned.phases["optimizer"].components
    return [
        ("parameters", held.parameters, measured.parameters),
        ("gradients", optimizer.gradients, measured.gradients),
        ("optimizer state", held.optimizer, measured.optimizer),
        ("between steps", held.total, measured.step_start),
        ("after forward", planned.after_forward.total, measured.after_forward),
        *(
            (f"peak in {phase}", moment.components.total, measured.phases[phase])
            for phase, moment in planned.phases.items()
        ),
        ("peak", planned.peak.components.total, measured.peak),
    ]


def peak_holds(planned: StepMemory, measured: Any) -> bool:
    """Whether the planned peak is within `OVER` and `UNDER` of the measured one.

    What the allocator reserves beyond it does not count: while the device has room the allocator
    caches memory per stream, and frees it when the device is full.
    """
    off: float = planned.peak.components.total / measured.peak - 1
    return -UNDER <= off <= OVER


def verified(plan: Plan, measured: Any) -> dict[str, Any]:
    """Whether the plan holds, and all rows, as plain values. measured: a `Measured`."""
    *rows, peak = compare(plan.step, measured)
    if measured.context is not None:
        rows.append(("driver and libraries", plan.context, measured.context))
    if measured.reserved is not None:
        rows.append(("with margin", peak[1] + plan.margin, measured.reserved))
    names = ("what", "planned", "measured")
    return {
        "true": peak_holds(plan.step, measured),
        "compared": [dict(zip(names, row, strict=True)) for row in (*rows, peak)],
    }
