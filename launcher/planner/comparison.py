"""The plan of a run (`logging.memory_plan`), compared with the memory of its first steps."""

from __future__ import annotations

import threading
from typing import Any

from launcher.distributed import host_memory
from launcher.metrics.console import bytes_as_text
from launcher.planner.machine import Machine
from launcher.planner.separate_process import ask
from launcher.recipe.schema import Recipe

SECONDS = 120
"""Time limit of the plan, which is made while the run trains."""
PATIENCE = 60
"""Seconds that the end of a short run waits for the plan."""
TOO_FAR = 0.10
"""Difference that is worth a warning."""


class Forecast:
    """Plans a run on rank 0 in a separate process, and compares the plan once steps were measured.

    On a GPU the allocator's peak is compared; on a CPU the growth of resident memory since this was
    made, which includes libraries and what the allocator caches.
    """

    def __init__(self, recipe: Recipe, machine: Machine) -> None:
        self._resident = host_memory.resident() if machine.device == "cpu" else None
        self._answers: list[Any] = []
        self._trouble = ""

        def plan() -> None:
            self._answers, self._trouble = ask("predict_peak", recipe, machine, seconds=SECONDS)

        self._thread = threading.Thread(target=plan, name="forecast", daemon=True)
        self._thread.start()

    def compare(self, measured: int, *, seconds: float = 0) -> str | None:
        """A line for the console; None while there is no plan.

        measured: peak of a step, `peak_memory_bytes` of a record. seconds: to wait for the plan.
        """
        self._thread.join(timeout=seconds)
        if self._thread.is_alive():
            return None
        answer = self._answers[0] if self._answers else self._trouble
        if not isinstance(answer, tuple):
            why = (str(answer).strip().splitlines() or ["no answer"])[-1]
            return f"memory: the peak cannot be compared with a plan: {why}"
        planned, where = answer
        return comparison_text(planned, where, measured, resident=self._resident)


def comparison_text(planned: int, where: str, measured: int, *, resident: int | None) -> str:
    """The plan's peak, where it is, and the measured one.

    resident: on a CPU, bytes of this process before there was a model.
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
