"""What a rank records when a run hangs: stacks, the kernel's view of a process, and collectives."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d


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


def flight_recorder() -> bytes | None:
    """The last collectives as JSON: of NCCL, or of gloo without it; None: not recorded."""
    name = "_dump_nccl_trace_json" if torch.cuda.is_available() else "_dump_fr_trace_json"
    try:
        return bytes(getattr(_distributed_c10d, name)())
    except Exception:  # these functions are not public: they may be missing or raise anything
        return None


def collectives(recorded: bytes | None) -> dict[str, dict[str, Any]]:
    """By process group: the number of the newest collective, which may only be enqueued, and the
    oldest unfinished ones, of which the first hangs."""
    groups: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        for entry in json.loads(recorded or b"{}").get("entries") or []:
            if entry["is_p2p"]:
                continue
            number, name = entry["collective_seq_id"], " ".join(entry["process_group"])
            group = groups.setdefault(name, {"newest": 0, "unfinished": {}})
            group["newest"] = max(group["newest"], number)
            # gloo retires finished entries without changing their state
            finished = entry["state"] == "completed" or entry["retired"]
            if not finished and len(group["unfinished"]) < 8:
                text = f"{entry['profiling_name']} {entry['input_sizes']}"
                group["unfinished"][str(number)] = text
    return groups


def compare_collectives(ranks: dict[int, dict[str, dict[str, Any]]]) -> list[str]:
    """A line for each group that waits, by the `collectives` of each rank: the oldest unfinished one,
    and its state by rank. Groups with a rank that has not begun it come first."""
    lines = []
    for name in sorted({name for groups in ranks.values() for name in groups}):
        members = {rank: groups[name] for rank, groups in ranks.items() if name in groups}
        numbers = [int(number) for group in members.values() for number in group["unfinished"]]
        if not numbers:
            continue
        oldest = min(numbers)
        by_state: dict[str, list[int]] = {}
        for rank, group in members.items():
            other = "finished" if group["newest"] >= oldest else "not begun"
            by_state.setdefault(group["unfinished"].get(str(oldest), other), []).append(rank)
        states = "; ".join(f"{what}: rank {_list(of)}" for what, of in sorted(by_state.items()))
        text = f"oldest unfinished collective of group {name}, number {oldest}: {states}"
        lines.append(("not begun" not in by_state, text))
    return [line for _, line in sorted(lines)[:3]]


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)[:8])) + (" ..." if len(ranks) > 8 else "")
