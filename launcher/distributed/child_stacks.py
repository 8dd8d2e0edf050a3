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
"""Time for all processes to write their stacks. Those that are stopped do not."""


def offer_stack() -> None:
    """Makes this process write its stack to a file in memory when it gets SIGUSR2."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create(_NAME)
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False)


def stacks_of_children() -> dict[int, str]:
    """The stacks of the processes that this process has forked, by process id, innermost call
    first."""
    asked: dict[int, tuple[Path, int]] = {}
    """The file of each process, and its size before."""
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in map(int, (thread / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    if (link := _offered(child)) is not None:
                        asked[child] = link, link.stat().st_size
                        os.kill(child, signal.SIGUSR2)
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and not all(_grown(*file) for file in asked.values()):
        time.sleep(0.02)
    time.sleep(0.02)  # a process writes a line at a time
    found = dict[int, str]()
    for child, (link, before) in asked.items():
        with contextlib.suppress(OSError):
            found[child] = link.read_bytes()[before:].decode(errors="replace")
    return found


def _offered(process: int) -> Path | None:
    """The file to which a process writes its stack; None if it offers none."""
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(f"/memfd:{_NAME}"):
                return link
    return None


def _grown(link: Path, before: int) -> bool:
    try:
        return link.stat().st_size > before
    except OSError:  # the process has ended
        return True


def last_call(stack: str) -> str:
    """The innermost call of a stack of `stacks_of_children`, as `function (file:line)`."""
    call = re.search(r'File "(.*)", line (\d+) in (.*)', stack)
    return f"{call[3]} ({os.path.relpath(call[1])}:{call[2]})" if call else "an unknown line"
