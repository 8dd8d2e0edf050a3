"""Processes of this machine: whether one still runs, and the signals that this one has got."""

from __future__ import annotations

import functools
import os
import signal
import socket
import time
from collections.abc import Collection
from pathlib import Path

_SIGNAL_SECONDS = 0.05
"""How often `next_signal` looks."""


def next_signal(signals: Collection[signal.Signals], seconds: float) -> signal.Signals | None:
    """One of the signals, which must be blocked; None if none arrives within these seconds.

    It looks again and again. `signal.sigtimedwait` that sleeps must not be used: if the process is
    stopped (Ctrl-Z, `scontrol suspend`, a machine that is paused) until the time is over, Python
    returns memory that was never written as the signal. A call that does not sleep is safe.
    """
    deadline = time.monotonic() + seconds
    while (arrived := signal.sigtimedwait(signals, 0)) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(left, _SIGNAL_SECONDS))
    return signal.Signals(arrived.si_signo)


def process_start(pid: int) -> int | None:
    """Start of a process in ticks since boot (proc_pid_stat(5), field 22); None if it has ended."""
    try:
        return _start(pid)
    except OSError:
        return None


def _start(pid: int) -> int | None:
    """`process_start` of a process. None if it has ended and its parent has not noticed yet.
    Raises OSError if there is no such process, or if /proc hides it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[-1].split()
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def is_running(pid: int, started: int) -> bool:
    """Whether the process with this id and `process_start` runs.

    /proc may hide the processes of other users (hidepid), but the kernel knows their ids: a process
    that exists and cannot be read counts as running, though it may be a later one with this id.
    """
    try:
        return _start(pid) == started
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


@functools.cache
def this_machine() -> str:
    """Boot id and process namespace: equal for processes that see each other in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
