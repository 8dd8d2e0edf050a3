"""Host memory, from /proc and control groups; missing files are skipped. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.console import bytes_as_text

_ROOT = Path("/")


def available() -> int | None:
    """Bytes left on this node and in this process's control groups; None if unknown."""
    return _least("MemAvailable", [max(0, limit - used) for limit, used in _limits()])


def allowed() -> int | None:
    """Bytes that the node and this process's control groups allow; None if unknown."""
    return _least("MemTotal", [limit for limit, _ in _limits()])


def _least(name: str, limits: list[int]) -> int | None:
    node = _numbers(_ROOT / "proc/meminfo").get(name)
    if node is not None:
        limits.append(node * 1024)
    return min(limits, default=None)


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and use of this process's control groups."""
    for folder in _control_groups():
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):  # memory.max is `max` without a limit
                yield int((folder / limit).read_text()), int((folder / used).read_text())


def _numbers(file: Path) -> dict[str, int]:
    """Numbers by name, from lines such as `MemTotal: 8 kB`; empty if there is no such file."""
    with contextlib.suppress(OSError):
        pairs = [line.split()[:2] for line in file.read_text().splitlines()]
        known = [pair for pair in pairs if len(pair) == 2 and pair[1].isdigit()]
        return {name.rstrip(":"): int(number) for name, number in known}
    return {}


def shared_memory() -> tuple[int, int] | None:
    """Free and all bytes of /dev/shm, through which processes pass tensors; None if there is none."""
    with contextlib.suppress(OSError):
        space = os.statvfs(_ROOT / "dev/shm")
        return space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    return None


def shared_text() -> str:
    """How much shared memory is free, and how to get more."""
    free, size = shared_memory() or (0, 0)
    return (
        f"/dev/shm has {bytes_as_text(free)} of {bytes_as_text(size)} free: start the container with "
        "more (docker: --shm-size=8g or --ipc=host; Kubernetes: a volume with medium: Memory at "
        "/dev/shm), or set data.workers=0"
    )


_MMAP_THRESHOLD = -3
"""Parameter of mallopt(3): larger allocations are mapped, and unmapped when they are freed."""
_TRIM_THRESHOLD = -1
"""Parameter of mallopt(3): free memory at the end of the heap above this goes back to the system."""
RETURNED = 1 << 21
"""Allocations of so many bytes or more go back to the system when they are freed."""
_LARGEST_THRESHOLD = 32 << 20
"""The same while freed memory is kept: glibc maps larger allocations in any case."""
_KEPT_AT_END = 1 << 30
"""Free bytes at the end of the heap while freed memory is kept."""
_DEFAULT_AT_END = 128 << 10
"""The same by default."""
_MORE = 1.05
"""Resident memory may exceed what the run needs by this factor while freed memory is kept."""
_MEASURED_STEPS = 2
"""Steps after which the need of a run is known. The optimizer's state exists from the first on."""


def _glibc() -> Any:
    """The C library, if it is glibc and the user has not set its thresholds; else None."""
    tuned = os.environ.get("GLIBC_TUNABLES", "")
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in tuned:
        return None
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        return library if library.mallopt and library.malloc_trim else None
    return None


def return_freed_memory() -> None:
    """Makes glibc return freed tensors to the system, on a rank that computes on the CPU.

    By default glibc raises its threshold to the size of what was freed, up to 32 MiB, and keeps
    smaller blocks in a heap that fragments: fine-tuning a model of 135 million parameters took
    5.4 GiB instead of 4.2. Does nothing where the user has set the threshold, or with another C
    library.
    """
    if (glibc := _glibc()) is not None:
        glibc.mallopt(_MMAP_THRESHOLD, RETURNED)


class FreedMemory:
    """Keeps freed memory in the process for the next step, as long as it is no more than the steps
    before needed.

    A block that went back to the system costs a page fault for each of its pages when it is
    allocated again: four times as many faults in a step of a small model under FSDP as in a loop
    written by hand. Whether the heap fragments depends on the model, so the first steps measure
    what the run needs without keeping anything. If the resident memory exceeds that by 5 %, or if
    memory is short, freed memory goes back to the system from then on.
    """

    def __init__(self) -> None:
        self._glibc, self._steps = _glibc(), 0
        self._limit = 0.0
        """Resident bytes with which freed memory goes back; 0: not known yet."""

    def step_done(self) -> None:
        """Must be called after each step."""
        if self._glibc is None:
            return
        self._steps += 1
        if self._steps == _MEASURED_STEPS:
            self._keep()
        elif self._steps > _MEASURED_STEPS and resident() > self._limit:
            self._return()

    def _keep(self) -> None:
        need = largest_peak()
        free = available()
        if free is not None and free < need:
            self._glibc = None
            return
        self._limit = _MORE * need
        self._glibc.mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        self._glibc.mallopt(_TRIM_THRESHOLD, _KEPT_AT_END)

    def _return(self) -> None:
        self._glibc.mallopt(_MMAP_THRESHOLD, RETURNED)
        self._glibc.mallopt(_TRIM_THRESHOLD, _DEFAULT_AT_END)
        self._glibc.malloc_trim(0)
        self._glibc = None


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_largest = 0
"""The largest peak that `take_peak` has returned."""


def largest_peak() -> int:
    """Peak resident bytes of this process since its start."""
    return max(_largest, _numbers(Path("/proc/self/status"))["VmHWM"] * 1024)


def take_peak() -> int:
    """Peak resident bytes of this process since the last call; since its start if the kernel cannot
    reset it (proc(5): VmHWM, and 5 in clear_refs)."""
    global _largest
    peak = _numbers(Path("/proc/self/status"))["VmHWM"] * 1024
    _largest = max(_largest, peak)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak


def killed() -> dict[str, int]:
    """Processes that the out-of-memory killer has ended: counts by the file that holds them."""
    names = ("memory.events", "memory.oom_control")
    files = [folder / name for folder in _control_groups() for name in names]
    counts = {str(file): _numbers(file) for file in (*files, _ROOT / "proc/vmstat")}
    return {file: count["oom_kill"] for file, count in counts.items() if "oom_kill" in count}


def killed_since(before: dict[str, int]) -> bool:
    """Whether the out-of-memory killer has ended a process of this node or group since `before`."""
    return any(count > before.get(file, count) for file, count in killed().items())


def _control_groups() -> Iterator[Path]:
    """This process's memory control group and its parents (version 2 or 1)."""
    with contextlib.suppress(OSError):
        for line in (_ROOT / "proc/self/cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            if "memory" in names.split(","):
                mounts = [_ROOT / "sys/fs/cgroup/memory"]
            elif number == "0" and not names:
                mounts = [_ROOT / "sys/fs/cgroup", _ROOT / "sys/fs/cgroup/unified"]
            else:
                continue
            for mount in mounts:
                folder = mount / path.lstrip("/")
                for group in (folder, *folder.parents):
                    if group.is_relative_to(mount) and group.is_dir():
                        yield group
