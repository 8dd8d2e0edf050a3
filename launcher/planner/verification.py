"""What was planned beside what was measured: each component and phase, and whether the two are near enough.

Knows of the measurement what it found alone: neither imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.planner.components import StepMemory
from launcher.planner.formatting import NAMES

SMALL = 0.01
"""Of the peak: what is less is judged as if it were as much."""

SMALL_BY_DIFFERENCE = 0.05
"""The same for what is told by difference only, where the deviations of all else add up."""


@dataclass(frozen=True)
class Row:
    """One component, phase or moment."""

    what: str
    planned: int
    measured: int
    """Bytes both."""
    by_difference: bool
    """Not measured itself: what is left of the measured peak without the other components as planned."""
    good: bool

    @property
    def ratio(self) -> float:
        """Planned over measured."""
        return self.planned / self.measured if self.measured else 1.0 if self.planned == 0 else float("inf")


@dataclass(frozen=True)
class Comparison:
    """All rows, the peak last."""

    rows: tuple[Row, ...]

    @property
    def good(self) -> bool:
        """Whether every row is."""
        return all(row.good for row in self.rows)


def compare(planned: StepMemory, measured: Any, *, tolerance: float = 0.05) -> Comparison:
    """Holds a planned step against a measured one.

    measured: a `measuring.Measured`. tolerance: of what was measured, or of SMALL of the peak where that is more.
    Of states what is held between steps is compared, of gradients what the optimizer gets, of what a forward pass makes
    what is there at the end of the first one; the rest are peaks. What the measurement could not tell from activations is
    compared together with them. Communication and temporary, which nobody can count on tensors, are told by difference, on
    the CPU, whose allocator counts to the byte and where nobody but the model allocates.
    """
    rows: list[Row] = []

    def add(what: str, bytes_planned: int, bytes_measured: int, *, by_difference: bool = False) -> None:
        least = (SMALL_BY_DIFFERENCE if by_difference else SMALL) * measured.peak
        good = abs(bytes_planned - bytes_measured) <= tolerance * max(bytes_measured, least)
        rows.append(Row(what, bytes_planned, bytes_measured, by_difference, good))

    after, peak = planned.after_forward, planned.peak.components
    add(NAMES["parameters"], planned.held.parameters, measured.parameters)
    add(NAMES["gradients"], planned.phases["optimizer"].components.gradients, measured.gradients)
    add(NAMES["optimizer"], planned.held.optimizer, measured.optimizer)
    activations = after.activations
    if measured.gathered is None:
        activations += after.gathered
    else:
        add(NAMES["gathered"], after.gathered, measured.gathered)
    if measured.logits is None:
        activations += after.logits
    add(NAMES["activations"], activations, measured.activations)
    if measured.logits is not None:
        add(NAMES["logits"], after.logits, measured.logits)
    if measured.device == "cpu":
        for name in ("communication", "temporary"):
            own = getattr(peak, name)
            add(NAMES[name], own, measured.peak - (peak.total - own), by_difference=True)
    add("between steps", planned.held.total, measured.step_start)
    add("after forward", after.total, measured.after_forward)
    for phase, moment in planned.phases.items():
        add(f"peak in {phase}", moment.components.total, measured.phases[phase])
    add("peak", peak.total, measured.peak)
    return Comparison(tuple(rows))
