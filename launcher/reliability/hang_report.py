"""What a rank records when a run hangs: stacks, the kernel's view of a process, NCCL's of all."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

import torch.distributed as dist

_WAITS = (
    ("torch/distributed/", None),
    ("torch/nn/parallel/distributed.py", None),
    ("launcher/data/token_store.py", "_wait"),
    ("launcher/data/loader.py", "_wait"),
    ("launcher/reliability/stop_agreement.py", "reached"),
)
"""Files, and functions of them, in which a rank waits for other ranks."""
_RAS_SECONDS, _RAS_BYTES = 2.0, 16 << 10
"""Time for the answer of NCCL's RAS, and how much of it is read."""
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


def nccl_status() -> str:
    """What NCCL's RAS (NCCL 2.24 and later) says about the processes of the run; empty if NCCL is not
    used or RAS does not answer. What has not arrived in time is left out."""
    if not (dist.is_initialized() and "nccl" in dist.get_backend_config()):
        return ""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", "localhost:28028").rpartition(":")
    deadline, answer = time.monotonic() + _RAS_SECONDS, b""
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), timeout=_RAS_SECONDS) as connection,
    ):
        connection.sendall(b"status\n")
        while len(answer) < _RAS_BYTES and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (received := connection.recv(_RAS_BYTES - len(answer))):
                break
            answer += received
    return answer.decode(errors="replace").strip()
