"""Finds ranks that the others wait for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from launcher.console import seconds_as_text

RECORDS = 15
"""Consecutive records whose medians are compared: single slow steps do not count."""
SLOW, FAST = 1.3, 1.15
"""A rank is slow from the first factor on, until it is below the second."""
LEAST_SECONDS = 0.01
"""Least time per step that a slow rank must cost for a warning."""
LASTING_SECONDS = 3.0
"""A rank is named only if it is slow for this long: short steps vary with the load of the node."""


class SlowRanks:
    """Compares the ranks' own times of a step, without waits for other ranks. Messages name the
    host of a rank. Only ranks with the same stages of a pipeline are compared: others compute other
    blocks."""

    def __init__(self, hosts: Sequence[str], *, stages: int = 1) -> None:
        """hosts: of each rank. stages: the ranks of a pipeline; ranks with the same stages are
        neighbours."""
        self._hosts, self._stages = hosts, stages
        self._recent: deque[tuple[int, float, Sequence[float]]] = deque(maxlen=RECORDS)
        self._since: dict[int, tuple[int, float]] = {}
        """For each slow rank, the step and time since which it is slow."""
        self._named: set[int] = set()
        """The slow ranks that a message has named."""
        self.note: str | None = None
        """The slowest rank now, for a line of a step."""

    def update(self, step: int, own_seconds: Sequence[float]) -> list[str]:
        """Takes the seconds that each rank needed for a step. Returns messages about ranks that
        became slow or are no longer slow."""
        self._recent.append((step, time.monotonic(), own_seconds))
        if len(self._recent) < RECORDS:
            return []
        medians = np.median([own for *_, own in self._recent], axis=0)
        compared = medians.reshape(self._stages, -1)
        # With two ranks, the median would be the mean of both
        typical = np.min if compared.shape[1] == 2 else np.median
        usual = np.repeat(typical(compared, axis=1), compared.shape[1])
        factors, messages = medians / np.maximum(usual, 1e-9), []
        slow = np.flatnonzero((factors >= SLOW) & (medians - usual >= LEAST_SECONDS)).tolist()
        for rank in sorted({*slow, *self._since}):
            first, started = self._since.setdefault(rank, self._begin(rank, SLOW * usual[rank]))
            seconds, where = time.monotonic() - started, f"rank {rank} on {self._hosts[rank]}"
            passed = seconds_as_text(seconds)
            if factors[rank] < FAST:
                del self._since[rank]
                if rank in self._named:
                    self._named.remove(rank)
                    text = f"{where} is no longer slow, after {passed}, since step {first}"
                    messages.append(text)
            elif rank not in self._named and seconds >= LASTING_SECONDS:
                self._named.add(rank)
                messages.append(
                    f"slow: {where} takes {factors[rank]:.1f} times as long for a step as the "
                    f"others, which wait for it, since step {first} ({passed})"
                )
        slowest = max(self._named, key=lambda rank: factors[rank], default=None)
        self.note = None if slowest is None else f"rank {slowest} slow x{factors[slowest]:.1f}"
        return messages

    def _begin(self, rank: int, limit: float) -> tuple[int, float]:
        """Step and time of the first of the last records in which a rank took this long."""
        begin = self._recent[-1][:2]
        for step, when, own_seconds in reversed(self._recent):
            if own_seconds[rank] < limit:
                break
            begin = step, when
        return begin
