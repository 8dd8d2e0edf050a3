"""The plan of a run (`logging.memory_plan`), compared with the memory of its first steps."""

from __future__ import annotations

import threading
from typing import Any

from launcher.distributed import host_memory
from launcher.metrics.console import bytes_as_text
from launcher.planner.machine import Machine
from launcher.planner.separate_process import Answer, ask
from launcher.recipe.schema import Recipe

SECONDS = 120
"""Time limit of the plan, which is made beside the training."""
PATIENCE = 60
"""Seconds that the end of a short run waits for the plan."""
TOO_FAR = 0.10
"""Difference that is worth a warning."""
COMPARABLE = 2**30
"""Bytes of a plan that resident memory on a CPU can be compared with: libraries and the allocator
take some 100 MiB, many times the tensors of a small model."""


class Forecast:
    """Makes a run's plan in a process of its own, to be compared once steps were measured.

    Rank 0 has one. On a GPU the allocator's peak is compared; on a CPU the growth of resident
    memory since this was made, which includes libraries and what the allocator caches.
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
        """A line for the console; None while there is no plan.

        measured: peak of a step, `peak_memory_bytes` of a record. seconds: to wait for the plan.
        """
        self._thread.join(timeout=seconds)
        if self._thread.is_alive():
            return None
        if not self._answers:
            why = (self._trouble.strip().splitlines() or ["no answer"])[-1]
            return f"memory: there is no plan to compare with the peak: {why}"
        resident = self._resident if self._machine.device == "cpu" else None
        return in_words(self._answers[0], measured, resident=resident)


def in_words(answer: dict[str, Any], measured: int, *, resident: int | None) -> str:
    """The plan's peak and the measured one.

    answer: of `answers.foresee`. resident: bytes of this process before there was a model, where
    resident memory was measured.
    """
    planned = answer["peak"]
    head = f"memory: {bytes_as_text(planned)} at the peak by plan, {answer['where']}"
    if resident is not None:
        measured = max(1, measured - resident)
        if planned < COMPARABLE:
            return (
                f"{head}; resident memory grew by {bytes_as_text(measured)}, with libraries and "
                "what the allocator keeps"
            )
    off = (measured - planned) / planned
    less = "more" if off > 0 else "less"
    by = f"{abs(off):.0%} {less}" if abs(off) >= 0.005 else "the same"
    what = "resident memory grew by" if resident is not None else "measured are"
    text = f"{head}; {what} {bytes_as_text(measured)}, {by}"
    if abs(off) <= TOO_FAR:
        return text
    if resident is not None:
        return f"{text} (with libraries, and what the allocator keeps)"
    return f"warning: {text}; `launcher plan ... --verify` shows which component it is"
