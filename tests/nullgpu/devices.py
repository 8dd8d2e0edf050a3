"""Null GPUs for tests: the environment for processes that use them, and the log of CUDA calls."""

import ctypes
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.nullgpu.build import SITE, build

TRAIN = Path(__file__).parent / "train.py"
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Event:
    """One line of a process's log."""

    thread: int
    thread_name: str
    kind: str
    """One of context, allocate, refuse, free, pin, unpin, pageable (a copy from pageable memory),
    wait, nccl, stuck, stub, mark."""
    arguments: list[str]


@dataclass(frozen=True)
class ProcessLog:
    """The logged CUDA calls of one process, in order."""

    rank: int | None
    """None for a process that is not a rank, such as torchrun's agent."""
    process: int
    events: list[Event]

    def of_kind(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    @property
    def contexts(self) -> set[int]:
        """The devices on which this process has a context."""
        return {int(event.arguments[0]) for event in self.of_kind("context")}

    @property
    def main_thread(self) -> int:
        return self.process

    def steps(self) -> dict[int, list[Event]]:
        """The events of each step: from the end of the previous step to the end of this one."""
        found: dict[int, list[Event]] = {}
        current: list[Event] = []
        for event in self.events:
            current.append(event)
            if event.kind == "mark" and event.arguments[0] == "step":
                found[int(event.arguments[1])] = current
                current = []
        return found

    def waits(self, step: int) -> Counter[str]:
        """Number of waits for the device in a step, by what was waited for."""
        return Counter(event.arguments[0] for event in self.steps()[step] if event.kind == "wait")


@dataclass(frozen=True)
class NullGpus:
    """Null devices for processes started with `variables` in their environment."""

    library: Path
    log: Path
    variables: dict[str, str] = field(repr=False)

    def logs(self) -> list[ProcessLog]:
        """The logs of all processes, sorted by rank and then by time of the last write."""
        found = []
        for file in sorted(self.log.iterdir(), key=lambda file: file.stat().st_mtime_ns):
            rank, _, process = file.name.removeprefix("rank_").partition(".")
            events = []
            for line in file.read_text().splitlines():
                thread, name, kind, *arguments = line.split()
                events.append(Event(int(thread), name, kind, arguments))
            found.append(ProcessLog(int(rank) if rank != "none" else None, int(process), events))
        return sorted(found, key=lambda log: -1 if log.rank is None else log.rank)

    def ranks(self) -> list[ProcessLog]:
        """The logs of the ranks' main processes, sorted by rank, if the ranks started only once."""
        return [log for log in self.logs() if log.rank is not None and log.of_kind("mark")]

    def clear(self) -> None:
        for file in self.log.iterdir():
            file.unlink()


def null_gpus(
    folder: Path, *, build_folder: Path, count: int = 8, gib: float = 79.6, capability: int = 80
) -> NullGpus:
    """Creates `count` devices with `gib` GiB of memory each.

    capability: 75 (T4), 80 (A100) or 90 (H100).
    """
    library = build(build_folder)
    log = folder / "nullgpu_log"
    log.mkdir(exist_ok=True)
    names = {75: "Tesla T4", 80: "NVIDIA A100-SXM4-80GB", 90: "NVIDIA H100 80GB HBM3"}
    variables = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "NULLGPU_COUNT": str(count),
        "NULLGPU_GIB": str(gib),
        "NULLGPU_CAPABILITY": str(capability),
        "NULLGPU_NAME": names[capability],
        "NULLGPU_LOG": str(log),
    }
    return NullGpus(library, log, variables)


def preloaded() -> ctypes.CDLL:
    """The preloaded library of this process, for its nullgpu_* functions.

    Raises OSError if LD_PRELOAD names no library.
    """
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.nullgpu_mark.argtypes = [ctypes.c_char_p]
    library.nullgpu_fail_allocations.argtypes = [ctypes.c_long]
    for name in ("nullgpu_waits", "nullgpu_launches", "nullgpu_pinned_peak"):
        getattr(library, name).restype = ctypes.c_long
    return library


def cuda_build() -> bool:
    """Whether PyTorch is installed as a CUDA build."""
    return (SITE / "torch/lib/libtorch_cuda.so").exists()
