"""Checks of one node that take about a second and need no other node. No torch in this process."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.diagnostics import gpus
from launcher.diagnostics.gpus import GIB
from launcher.diagnostics.report import Finding, State
from launcher.distributed import host_memory as memory
from launcher.metrics.console import bytes_as_text

SHARED_SECONDS = 10
"""Time to write and read a small file in the shared folder."""


def host_memory() -> tuple[int, int]:
    """Bytes that processes here may use, and how many of them are available."""
    return memory.allowed() or 0, memory.available() or 0


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def open_files() -> int:
    """How many files a process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def locked_memory() -> int | None:
    """Bytes that a process may lock in memory; None: no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def has_infiniband() -> bool:
    """Whether this node has an InfiniBand or RoCE adapter."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def can_listen(port: int) -> str | None:
    """None if this host can connect to its own name at this port (0: any); else why not."""
    with socket.socket() as server:
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", port))
            server.listen()
        except OSError as error:
            return f"port {port} cannot be listened on: {error.strerror}"
        name = socket.gethostname()
        try:
            socket.create_connection((name, server.getsockname()[1]), timeout=5).close()
        except OSError as error:
            return f"the host cannot reach itself as {name}: {error.strerror or error}"
    return None


def write_and_read(folder: Path) -> float:
    """Seconds to write a small file to disk and read it again. Raises OSError."""
    started = time.monotonic()
    file = folder / f".launcher-doctor-{uuid.uuid4().hex}"
    try:
        with file.open("w") as out:
            out.write(file.name)
            out.flush()
            os.fsync(out.fileno())
        if file.read_text() != file.name:
            raise OSError(f"{file}: the bytes read are not those that were written")
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
    return time.monotonic() - started


def _rated(name: str, value: float, text: str, *, bad: float, warning: float) -> Finding:
    """A finding that is bad, or a warning, where the value is below these limits."""
    state: State = "bad" if value < bad else "warning" if value < warning else "good"
    return Finding(name, state, text)


def host_findings(*, ranks: int | None) -> Iterator[Finding]:
    """Memory, cores, shared memory and limits."""
    whole, available = host_memory()
    text = f"{bytes_as_text(available)} of {bytes_as_text(whole)} available"
    yield _rated("host memory", available, text, bad=GIB, warning=whole // 4)
    count = cores()
    text = f"{count}, fewer than {ranks} ranks" if count < (ranks or 0) else str(count)
    yield _rated("cores", count, text, bad=0, warning=ranks or 0)
    shared = free_bytes(Path("/dev/shm")) if Path("/dev/shm").is_dir() else 0
    text = f"{bytes_as_text(shared)} free"
    if shared < GIB:
        text += ": loader processes pass batches through it; "
        text += "in a container start with --ipc=host or --shm-size=8g"
    yield _rated("/dev/shm", shared, text, bad=60 * 1024**2, warning=GIB)
    files = open_files()
    if files < 4096:
        text = f"a process may have {files:,} open: ulimit -n 65536"
        yield _rated("open files", files, text, bad=256, warning=4096)
    locked = locked_memory()
    if locked is not None and has_infiniband():
        text = f"a process may lock {bytes_as_text(locked)}, but InfiniBand locks all that it "
        text += "sends: ulimit -l unlimited"
        yield _rated("locked memory", locked, text, bad=64 * 1024**2, warning=float("inf"))


def place_findings(*, runs: Path, shared: Path | None, port: int) -> Iterator[Finding]:
    """Disks and ports."""
    free = free_bytes(runs)
    text = f"{bytes_as_text(free)} free for {runs}"
    yield _rated("disk of runs", free, text, bad=GIB, warning=20 * GIB)
    temporary = free_bytes(Path(os.environ.get("TMPDIR", "/tmp")))
    if temporary < GIB:
        text = f"{bytes_as_text(temporary)} free: compiled kernels are written there"
        yield Finding("temporary disk", "warning", text)
    if shared is not None:
        try:
            seconds = write_and_read(shared)
            text = f"{shared}: a file written and read again in {seconds:.3g} s"
            state: State = "bad" if seconds > SHARED_SECONDS else "good"
        except OSError as error:
            state, text = "bad", f"{shared}: {error.strerror or error}"
        yield Finding("shared folder", state, text)
    problem = can_listen(port)
    good = f"port {port} is free" if port else "the host reaches itself by its name"
    yield Finding("network", "bad" if problem else "good", problem or good)


def examine(
    *,
    expected_gpus: int | None,
    ranks: int | None,
    runs: Path,
    shared: Path | None,
    port: int,
    visible: str | None,
) -> tuple[list[Finding], dict[str, Any]]:
    """All findings of this node; its versions (python, torch, cuda, rocm, nccl, driver; None: it
    has none), and `gpus`, the number of GPUs that torch computes on."""
    nvml, torch = gpus.query()
    findings = [
        *gpus.gpu_findings(nvml, torch, visible=visible, expected=expected_gpus),
        *gpus.torch_findings(torch, gpus.visible_gpus(nvml, visible)),
        *host_findings(ranks=ranks),
        *place_findings(runs=runs, shared=shared, port=port),
    ]
    return findings, gpus.versions(nvml, torch)
