"""Stacks of the loader processes of a rank, for the report of a hang. Linux only.

A loader process that calls `offer_stack` writes its stack to a file in memory when it gets SIGUSR2,
even while a call keeps its interpreter's lock. Its parent reads that file by /proc.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path

_NAME = "launcher-stack"
_SECONDS = 1.0
"""Time for a process to write its stack. One that is stopped does not."""


def offer_stack() -> None:
    """Makes this process write its stack to a file in memory when it gets SIGUSR2."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create(_NAME)
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False)


def stacks_of_children() -> dict[int, str]:
    """The stacks of the processes that this process has forked, by process id, innermost call
    first."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in (thread / "children").read_text().split():
                with contextlib.suppress(OSError):
                    if (stack := _stack(int(child))) is not None:
                        found[int(child)] = stack
    return found


def _stack(process: int) -> str | None:
    """None if the process offers none."""
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(link).startswith(f"/memfd:{_NAME}"):
                continue
            before = link.stat().st_size
            os.kill(process, signal.SIGUSR2)
            deadline = time.monotonic() + _SECONDS
            while link.stat().st_size == before and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.02)  # it writes a line at a time
            return link.read_bytes()[before:].decode(errors="replace")
    return None


def last_call(stack: str) -> str:
    """The innermost call of a stack of `stacks_of_children`, as `function (file:line)`."""
    call = re.search(r'File "(.*)", line (\d+) in (.*)', stack)
    return f"{call[3]} ({os.path.relpath(call[1])}:{call[2]})" if call else "an unknown line"
