"""Requests to stop: SIGTERM (torchrun, Slurm), SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning), or the
file RUN_DIR/stop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Any

from launcher.errors import EXIT_FAILED
from launcher.reliability.failures import end_process

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SAME_REQUEST_SECONDS = 5.0
"""The first request comes twice: to the process, and through torchrun's agent."""


def _forget() -> None:
    """In a forked process: its signals are not for its parent."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)


class StopRequest:
    """Remembers that this process was asked to stop; the ranks agree on it at the next step.

    A second signal more than five seconds after the first one ends the process at once.

    Python runs a signal handler when the main thread returns from a call, and a collective may
    never return. Each signal is therefore also written to a pipe, which the watch reads (`look`).
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        """Who asked: the name of a signal, or a file."""
        self._at: float | None = None
        self._before: dict[int, Any] = {}
        self._read = self._write = self._wakeup = -1

    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal is not None

    def ask(self, who: str) -> None:
        """A request by other means than a signal."""
        self.signal = self.signal or who

    def look(self) -> None:
        """Reads the signals that came; from any thread."""
        with contextlib.suppress(OSError):
            for number in os.read(self._read, 64) if self._read >= 0 else b"":
                if number in _SIGNALS:
                    self._note(number)

    def __enter__(self) -> StopRequest:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        read, self._read = self._read, -1
        os.close(read)
        os.close(self._write)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.look()

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if self._at is None:
            self.ask(signal.Signals(number).name)
            self._at = now
        elif now - self._at > _SAME_REQUEST_SECONDS:
            end_process(EXIT_FAILED)
