"""Being asked to stop: SIGTERM (torchrun, Slurm), SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning)."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from launcher.errors import EXIT_FAILED
from launcher.failures import end_process

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SAME_REQUEST_SECONDS = 5.0
"""The first request comes twice: to the process, and through torchrun's agent."""


class StopRequest:
    """Remembers that this process was asked to stop; the ranks agree on it at the next step. Asked again more than
    five seconds later, the process ends at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def requested(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._at = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._at > _SAME_REQUEST_SECONDS:
            end_process(EXIT_FAILED)
