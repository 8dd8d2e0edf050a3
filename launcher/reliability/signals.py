"""Requests to stop: SIGTERM (torchrun, Slurm), SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from launcher.errors import EXIT_FAILED
from launcher.reliability.failures import end_process

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SAME_REQUEST_SECONDS = 5.0
"""A request may arrive twice: directly, and through torchrun's agent."""


def _reset_in_child() -> None:
    """A forked process must not report its signals to its parent."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_reset_in_child)


class StopRequest:
    """Remembers a request to stop; the ranks agree on it at the next step. A second signal, more
    than five seconds later, ends the process at once.

    Python runs a signal handler when the main thread returns from a call, but a collective may
    never return. So each signal is also written to a pipe that the watchdog reads (`look`).
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        """The source of the request: the name of a signal, or a file."""
        self._first: float | None = None
        self._handlers: dict[int, Any] = {}
        self._read = -1

    def requested(self) -> bool:
        return self.signal is not None

    def ask(self, source: str) -> None:
        """Requests a stop without a signal."""
        self.signal = self.signal or source

    def look(self) -> None:
        """Reads the signals that arrived; from any thread."""
        with contextlib.suppress(OSError):
            for number in os.read(self._read, 64):
                if number in _SIGNALS:
                    self._note(signal.Signals(number))

    def _note(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._first is None:
            self.ask(number.name)
            self._first = now
        elif now - self._first > _SAME_REQUEST_SECONDS:
            end_process(EXIT_FAILED)

    def __enter__(self) -> StopRequest:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in _SIGNALS:
            self._handlers[number] = signal.signal(number, lambda *_: self.look())
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        read, self._read = self._read, -1
        os.close(read)
        os.close(self._write)
