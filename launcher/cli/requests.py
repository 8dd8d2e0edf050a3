"""Requests to stop a command: SIGINT (Ctrl-C), SIGTERM, and SIGHUP of a closed terminal.

All of them raise KeyboardInterrupt, so that a command removes what it has not completed, and end it
with one line and exit status 128 + the signal's number. Ranks save first: `reliability/signals.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__()


def handle_requests() -> Callable[[], None]:
    """Ends this process at a request to stop: at once until the returned function is called, because
    an import may not pass an exception on, and by an exception from then on. A signal that is
    ignored, such as SIGHUP under nohup, stays so."""
    importing = True

    def handle(number: int, _: object) -> None:
        if importing:
            os._exit(report(Terminated(number)))
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handle)

    def in_forked_process() -> None:  # a worker: it has nothing to say, and pools end it so
        for number in handled:
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=in_forked_process)

    def imported() -> None:
        nonlocal importing
        importing = False

    return imported


def report(request: KeyboardInterrupt) -> int:
    """Prints what has stopped the command, and what it leaves by the notes of the exception; returns
    the exit status."""
    number = signal.Signals(getattr(request, "number", signal.SIGINT))
    left = "".join(f"; {note}" for note in getattr(request, "__notes__", ()))
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        clear = "\r\x1b[2K" if sys.stderr and sys.stderr.isatty() else ""
        print(f"{clear}stopped by {number.name}{left}", file=sys.stderr, flush=True)
    return 128 + number
