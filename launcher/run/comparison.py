"""The plan of a run (`logging.memory_plan`), compared with the memory of its first steps."""

from __future__ import annotations

import os
import threading

from launcher.console import bytes_as_text
from launcher.distributed import host_memory
from launcher.planner.formatting import micro_batches, moment_text
from launcher.planner.machine import Machine
from launcher.planner.plan import make_plan
from launcher.recipe.schema import Recipe
from launcher.run.separate_process import run_in_process

SECONDS = 120
"""Time limit of the plan."""
PATIENCE = 60
"""Seconds that the end of a short run waits for the plan."""
TOO_FAR = 0.10
"""Relative difference above which a warning is logged."""


def predict_peak(recipe: Recipe, machine: Machine) -> tuple[int, str]:
    """Bytes of tensors at the peak, and where it is."""
    os.nice(10)  # the run is training meanwhile
    peak = make_plan(recipe, machine).step.peak
    return peak.total, moment_text(peak, micro_batches=micro_batches(recipe, machine.ranks))


class Forecast:
    """Plans a run on rank 0 in a separate process, and compares the plan with measured steps.

    On a CPU it is compared with the growth of resident memory since this object was created.
    """

    def __init__(self, recipe: Recipe, machine: Machine) -> None:
        self._resident = host_memory.resident() if machine.device == "cpu" else None
        self._answer: tuple[int, str] | Exception | None = None

        def plan() -> None:
            try:
                self._answer = run_in_process(SECONDS, predict_peak, recipe, machine)
            except Exception as error:
                self._answer = error

        self._thread = threading.Thread(target=plan, name="forecast", daemon=True)
        self._thread.start()

    def compare(self, measured: int, *, seconds: float = 0) -> str | None:
        """A line for the console; None while there is no plan.

        measured: bytes at the peak of a step. seconds: to wait for the plan.
        """
        self._thread.join(timeout=seconds)
        if self._answer is None:
            return None
        if isinstance(self._answer, Exception):
            lines = str(self._answer).strip().splitlines() or [type(self._answer).__name__]
            why = lines[-1]
            return f"memory: the peak cannot be compared with a plan: {why}"
        return comparison_text(*self._answer, measured, resident=self._resident)


def comparison_text(planned: int, where: str, measured: int, *, resident: int | None) -> str:
    """A line with the planned peak, where in the step it is, and the measured peak.

    resident: on a CPU, resident bytes of this process before the model was built.
    """
    text = f"memory: {bytes_as_text(planned)} at the peak by plan, {where}; "
    if resident is not None:
        grown = bytes_as_text(max(0, measured - resident))
        return f"{text}resident memory grew by {grown}, with libraries and allocator caches"
    off = (measured - planned) / planned
    text += f"measured: {bytes_as_text(measured)}, "
    text += f"{abs(off):.0%} {'more' if off > 0 else 'less'}" if abs(off) >= 0.005 else "the same"
    if abs(off) <= TOO_FAR:
        return text
    return f"warning: {text}; `launcher plan ... --verify` shows which component differs"
