"""What a plan said beside what was measured: `launcher plan --verify`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.memory.plan import Plan
from launcher.memory.words import NAMES

TOLERANCE = 0.10
"""Of the peak: what the plan may be off by."""


def compared(plan: Plan, measured: Any) -> Iterator[tuple[str, int, int]]:
    """(what, bytes that the plan said, bytes measured). measured: `measuring.Measured`; what it could not tell is left out.

    Of states what is held between steps, of gradients what the optimizer gets, of what a forward pass makes what is there
    at the end of the first one; the rest are peaks.
    """
    step = plan.step
    yield NAMES["parameters"], step.held.parameters, measured.parameters
    yield NAMES["gradients"], step.phases["optimizer"].components.gradients, measured.gradients
    yield NAMES["optimizer"], step.held.optimizer, measured.optimizer
    after = step.after_forward
    activations = after.activations
    if measured.gathered is None:
        activations += after.gathered
    else:
        yield NAMES["gathered"], after.gathered, measured.gathered
    if measured.logits is None:
        activations += after.logits
    yield NAMES["activations"], activations, measured.activations
    if measured.logits is not None:
        yield NAMES["logits"], after.logits, measured.logits
    for phase, moment in step.phases.items():
        yield f"peak in {phase}", moment.components.total, measured.phases[phase]
    if measured.context is not None:
        yield NAMES["context"], plan.context, measured.context
    if measured.reserved is not None:
        yield "with margin", step.peak.components.total + plan.margin, measured.reserved
    yield "peak", step.peak.components.total, measured.peak


def is_true(plan: Plan, measured: Any) -> bool:
    """Whether the peak is as planned, and what was taken in all is not more than planned."""
    planned = plan.step.peak.components.total
    close = abs(planned - measured.peak) <= TOLERANCE * measured.peak
    return close and (measured.reserved is None or measured.reserved <= planned + plan.margin)
