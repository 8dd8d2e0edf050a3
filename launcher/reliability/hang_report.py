"""What a rank records when a run hangs: stacks, and the kernel's view of a process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path


def stacks() -> tuple[str, str]:
    """The position of the main thread as `function (file:line)`, and the stacks of all threads."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, parts = threading.main_thread().ident or 0, []
    for ident in sorted(frames, key=lambda ident: ident != main):
        parts.append(f"\nthread {names.get(ident, ident)}\n")
        parts += traceback.format_stack(frames[ident])
    code, line = frames[main].f_code, frames[main].f_lineno
    return f"{code.co_name} ({os.path.relpath(code.co_filename)}:{line})", "".join(parts)


def process_state(pid: int) -> list[str]:
    """The kernel's view of a process: its state, and the kernel function it waits in."""
    folder, waits = Path(f"/proc/{pid}"), ""
    try:
        lines = (folder / "status").read_text().splitlines()
    except OSError:
        return [f"process {pid} has ended"]
    with contextlib.suppress(OSError):
        waits = (folder / "wchan").read_text()
    state = next(line for line in lines if line.startswith("State:")).replace("\t", " ")
    return [f"process {pid}", state, f"waits in the kernel in: {waits or '?'}"]
