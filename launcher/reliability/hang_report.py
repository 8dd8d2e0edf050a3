"""What a rank does when a run hangs: stacks, the kernel's view of a process, and collectives."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._C import _distributed_c10d


def stacks() -> tuple[str, str]:
    """Where the main thread is, as `function (file:line)`; and the stacks of all threads."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    parts = []
    for ident in sorted(frames, key=lambda ident: (ident != main, ident == own)):
        parts.append(f"\nthread {names.get(ident, ident)}\n")
        parts += traceback.format_stack(frames[ident])
    return innermost(frames[main]) if main in frames else "?", "".join(parts)


def innermost(frame: FrameType) -> str:
    """`function (file:line)`."""
    code = frame.f_code
    return f"{code.co_name} ({os.path.relpath(code.co_filename)}:{frame.f_lineno})"


def process_state(pid: int) -> list[str]:
    """What the kernel says of a process and its threads, in lines.

    Its state (R runs, S sleeps, D waits for a device, T stopped), where it waits in the kernel,
    and its kernel stack where we may read it.
    """
    folder = Path(f"/proc/{pid}")

    def read(name: str) -> str:
        try:
            return (folder / name).read_text().replace("\0", " ").strip()
        except OSError as error:
            return f"({error.strerror})"

    status = dict(line.split(":\t", 1) for line in read("status").splitlines() if ":\t" in line)
    if not status:
        return ["State: gone, there is no such process"]
    lines = [f"State: {status.get('State', '?').strip()}"]
    lines.append(f"waits in the kernel in: {read('wchan') or '?'}")
    lines.append(f"command: {read('cmdline')}")
    for task in sorted((folder / "task").glob("*"))[:64]:
        with contextlib.suppress(OSError, IndexError):
            name, rest = (task / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            waits = (task / "wchan").read_text()
            lines.append(f"thread {task.name} {name}: {rest.split()[0]}, {waits}")
    return [*lines, "kernel stack:", read("stack")]


def flight_recorder() -> bytes | None:
    """The last collectives, as JSON: NCCL's, or gloo's without NCCL. None: not recorded."""
    cuda = torch.cuda.is_available()
    name = "_dump_nccl_trace_json" if cuda else "_dump_fr_trace_json"
    dump = getattr(_distributed_c10d, name, None)
    try:
        return None if dump is None else bytes(dump())
    except Exception:
        return None


def collectives(recorded: bytes | None) -> dict[str, dict[str, Any]]:
    """By process group: the number of the newest collective, and the oldest unfinished ones.

    The newest entry of a flight recorder was only enqueued. The oldest unfinished one hangs.
    """
    groups: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        for entry in json.loads(recorded or b"{}").get("entries") or []:
            if entry["is_p2p"]:
                continue
            number, name = entry["collective_seq_id"], " ".join(entry["process_group"])
            group = groups.setdefault(name, {"newest": 0, "unfinished": {}})
            group["newest"] = max(group["newest"], number)
            # gloo retires what is finished, without changing its state
            finished = entry["state"] == "completed" or entry["retired"]
            if not finished and len(group["unfinished"]) < 8:
                text = f"{entry['profiling_name']} {entry['input_sizes']}"
                group["unfinished"][str(number)] = text
    return groups


def compare_collectives(ranks: dict[int, dict[str, dict[str, Any]]]) -> list[str]:
    """A line for each group that waits: its oldest unfinished collective, and who has not begun it.

    ranks: `collectives` of each. Groups with a rank that has not begun come first; three at most.
    """
    lines = []
    for name in sorted({name for groups in ranks.values() for name in groups}):
        members = {rank: groups[name] for rank, groups in ranks.items() if name in groups}
        numbers = [int(number) for group in members.values() for number in group["unfinished"]]
        if not numbers:
            continue
        oldest = min(numbers)
        begun: dict[str, list[int]] = {}
        for rank, group in members.items():
            other = "is finished" if group["newest"] >= oldest else "not begun"
            begun.setdefault(group["unfinished"].get(str(oldest), other), []).append(rank)
        states = "; ".join(f"{what}: rank {_list(of)}" for what, of in sorted(begun.items()))
        text = f"oldest unfinished collective of group {name}, number {oldest}: {states}"
        lines.append(("not begun" not in begun, text))
    return [line for _, line in sorted(lines)[:3]]


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)[:8])) + " ..." * (len(ranks) > 8)
