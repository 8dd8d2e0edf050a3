"""Whether a process of this machine still runs."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path


def process_start(pid: int) -> int | None:
    """Start of a process in ticks since boot (proc_pid_stat(5), field 22); None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@functools.cache
def this_machine() -> str:
    """Boot id and process namespace: equal for processes that see each other in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
