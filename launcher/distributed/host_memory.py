"""Host memory by the kernel's files; a missing one is skipped. Standard library only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def available(root: Path = Path("/")) -> int | None:
    """Bytes left on this node and in this process's control groups; None if unknown."""
    left = [max(0, limit - used) for limit, used in _limits(root)]
    return min([*_meminfo(root, "MemAvailable:"), *left], default=None)


def allowed(root: Path = Path("/")) -> int | None:
    """Bytes that the node and this process's control groups allow; None if unknown."""
    limits = [limit for limit, _ in _limits(root)]
    return min([*_meminfo(root, "MemTotal:"), *limits], default=None)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of this process's control groups."""
    for folder in _control_groups(root):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):  # memory.max is `max` without a limit
                yield int((folder / limit).read_text()), int((folder / used).read_text())


def _meminfo(root: Path, name: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith(name):
                yield int(line.split()[1]) * 1024


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def take_peak() -> int:
    """Peak resident bytes of this process since the last call; since its start if the kernel cannot
    reset it (proc(5): VmHWM, and 5 in clear_refs)."""
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return int(peak.split()[1]) * 1024


def killed(root: Path = Path("/")) -> dict[str, int]:
    """Processes that the out-of-memory killer has ended, by the file that counts them."""
    names = ("memory.events", "memory.oom_control")
    files = [folder / name for folder in _control_groups(root) for name in names]
    counts: dict[str, int] = {}
    for file in (*files, root / "proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    counts[str(file)] = int(count)
    return counts


def killed_since(before: dict[str, int], root: Path = Path("/")) -> bool:
    """Whether the out-of-memory killer has ended a process here since `before`."""
    return any(count > before.get(file, count) for file, count in killed(root).items())


def _control_groups(root: Path) -> Iterator[Path]:
    """This process's memory control group and its parents (version 2 or 1)."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            if "memory" in names.split(","):
                mounts = [root / "sys/fs/cgroup/memory"]
            elif number == "0" and not names:
                mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            else:
                continue
            for mount in mounts:
                here = mount / path.lstrip("/")
                while here.is_relative_to(mount):
                    if here.is_dir():
                        yield here
                    here = here.parent
