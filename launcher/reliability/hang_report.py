"""What a rank records when a run hangs: stacks, and the kernel's view of a process."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

_WAITS = (
    ("torch/distributed/", None),
    ("torch/nn/parallel/distributed.py", None),
    ("launcher/data/token_store.py", "_wait"),
    ("launcher/data/loader.py", "_wait"),
    ("launcher/reliability/stop_agreement.py", "reached"),
)
"""Files, and functions of them, in which a rank waits for other ranks."""
_LIBRARIES = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")})


def waits_for_ranks() -> bool:
    """Whether the main thread waits for other ranks, as in a collective."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        for file, function in _WAITS:
            if file in code.co_filename and function in (None, code.co_name):
                return True
        frame = frame.f_back
    return False


def stacks() -> tuple[str, str]:
    """The position of the main thread as `function (file:line)`, with that of its caller outside of
    libraries, and the stacks of all threads."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, parts = threading.main_thread().ident or 0, []
    for ident in sorted(frames, key=lambda ident: ident != main):
        parts.append(f"\nthread {names.get(ident, ident)}\n")
        parts += traceback.format_stack(frames[ident])
    frame: FrameType | None = frames[main]
    where = _position(frames[main])
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is not None and frame is not frames[main]:
        where += f", called by {_position(frame)}"
    return where, "".join(parts)


def _position(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno})"


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
