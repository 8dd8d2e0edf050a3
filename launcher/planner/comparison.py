"""The plan of a run (`logging.memory_plan`), compared with what its first steps took."""

from __future__ import annotations

import threading
from typing import Any

from launcher.distributed import host_memory
from launcher.metrics.console import bytes_as_text
from launcher.planner.machine import Machine
from launcher.planner.separate_process import Answer, ask
from launcher.recipe.schema import Recipe

SECONDS = 120
"""That the plan may take, beside the training."""
PATIENCE = 60
"""Seconds that the end of a short run waits for the plan that its recipe asks for."""
TOO_FAR = 0.10
COMPARABLE = 2**30
"""Bytes of a plan that resident memory on a CPU is compared with: libraries and the allocator take some 100 MiB beside the tensors,
which is many times what a small model takes."""


class Forecast:
    """Asks for the plan of a run in a process of its own when it starts, and says how it compares once steps were measured.

    Rank 0 has one. On a GPU the allocator's peak is compared; on a CPU, where nobody counts the bytes of tensors, the growth of
    resident memory since this was made, which counts libraries and what the allocator keeps.
    """

    def __init__(self, recipe: Recipe, machine: Machine) -> None:
        self._recipe, self._machine = recipe, machine
        self._resident = host_memory.resident()
        self._answers: list[Answer] = []
        self._trouble = ""
        self._thread = threading.Thread(target=self._ask, name="forecast", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        self._answers, self._trouble = ask("foresee", self._recipe, self._machine, seconds=SECONDS)

    def compare(self, measured: int, *, seconds: float = 0) -> str | None:
        """A line for the console; None where the plan is not there yet.

        measured: peak of a step, `peak_memory_bytes` of a record. seconds: to wait for the plan.
        """
        self._thread.join(timeout=seconds)
        if self._thread.is_alive():
            return None
        if not self._answers:
            why = (self._trouble.strip().splitlines() or ["no answer"])[-1]
            return f"memory: there is no plan to hold the peak against: {why}"
        return in_words(self._answers[0], measured, resident=self._resident if self._machine.device == "cpu" else None)


def in_words(answer: dict[str, Any], measured: int, *, resident: int | None) -> str:
    """answer: of `deciding`'s task foresee: bytes of tensors at the peak, where it falls, and how that was found.

    resident: bytes that this process had before there was a model, where resident memory was measured.
    """
    planned = answer["peak"]
    if resident is not None:
        measured = max(1, measured - resident)
        if planned < COMPARABLE:
            return (
                f"memory: {bytes_as_text(planned)} at the peak by plan, {answer['where']}; resident memory grew by "
                f"{bytes_as_text(measured)}, with libraries and what the allocator keeps"
            )
    off = (measured - planned) / planned
    by = f"{abs(off):.0%} {'more' if off > 0 else 'less'}" if abs(off) >= 0.005 else "the same"
    what = "resident memory grew by" if resident is not None else "measured are"
    text = f"memory: {bytes_as_text(planned)} at the peak by plan, {answer['where']}; {what} {bytes_as_text(measured)}, {by}"
    if abs(off) <= TOO_FAR:
        return text
    if resident is not None:
        return f"{text} (with libraries, and what the allocator keeps)"
    return f"warning: {text}; which component it is says `launcher plan ... --verify`"
