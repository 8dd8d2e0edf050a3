"""Null GPUs for a test: the environment that starts processes on them, and the log of what they did."""

import ctypes
import os
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.nullgpu.build import build

TRAIN = Path(__file__).parent / "train.py"
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Event:
    """One line of a process's log."""

    thread: int
    thread_name: str
    kind: str
    """context, allocate, refuse, free, pin, unpin, pageable (a copy from such memory), wait, nccl, stuck, stub or mark."""
    arguments: list[str]


@dataclass(frozen=True)
class ProcessLog:
    """What one process did on the devices, in order."""

    rank: int | None
    """None: a process that is not a rank, such as torchrun's agent."""
    process: int
    events: list[Event]

    def of_kind(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    @property
    def contexts(self) -> set[int]:
        """The devices that this process has a context on."""
        return {int(event.arguments[0]) for event in self.of_kind("context")}

    @property
    def main_thread(self) -> int:
        return self.process

    def steps(self) -> dict[int, list[Event]]:
        """The events after each step until the next one has ended, by the step that ends with them."""
        found: dict[int, list[Event]] = {}
        current: list[Event] = []
        for event in self.events:
            current.append(event)
            if event.kind == "mark" and event.arguments[0] == "step":
                found[int(event.arguments[1])] = current
                current = []
        return found

    def waits(self, step: int) -> Counter[str]:
        """How often a thread waited for the device in a step, by what it waited for."""
        return Counter(event.arguments[0] for event in self.steps()[step] if event.kind == "wait")


@dataclass(frozen=True)
class NullGpus:
    """Devices without a GPU, for processes started with `variables` in their environment."""

    library: Path
    log: Path
    variables: dict[str, str] = field(repr=False)

    def logs(self) -> list[ProcessLog]:
        """Of all processes so far, by rank; those of an earlier start come first."""
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
        """Of the ranks' main processes, in their order. For one start of the ranks."""
        return [log for log in self.logs() if log.rank is not None and log.of_kind("mark")]

    def clear(self) -> None:
        for file in self.log.iterdir():
            file.unlink()


def null_gpus(
    folder: Path, *, build_folder: Path, count: int = 8, gib: float = 79.6, capability: int = 80
) -> NullGpus:
    """`count` devices of `gib` GiB and of this compute capability (80: A100, 90: H100)."""
    library = build(build_folder)
    log = folder / "nullgpu_log"
    log.mkdir(exist_ok=True)
    names = {80: "NVIDIA A100-SXM4-80GB", 90: "NVIDIA H100 80GB HBM3"}
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
    """The library in this process, for its nullgpu_* functions. Raises OSError where it was not preloaded."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.nullgpu_mark.argtypes = [ctypes.c_char_p]
    library.nullgpu_fail_allocations.argtypes = [ctypes.c_long]
    for name in ("nullgpu_waits", "nullgpu_launches", "nullgpu_pinned_peak"):
        getattr(library, name).restype = ctypes.c_long
    return library


def cuda_build() -> bool:
    """Whether this interpreter's PyTorch is a CUDA build."""
    return any(Path(sysconfig.get_path("purelib")).glob("torch/lib/libtorch_cuda.so"))
