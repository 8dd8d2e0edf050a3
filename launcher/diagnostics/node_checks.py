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
from typing import TypedDict, Unpack

from launcher.console import bytes_as_text
from launcher.diagnostics import gpus
from launcher.diagnostics.findings import Finding, Versions
from launcher.diagnostics.gpus import GIB
from launcher.distributed import host_memory
from launcher.distributed.open_files import (
    FILES_OF_RANK,
    open_files_needed,
    too_few_open_files,
)
from launcher.files import write_file

_FEW_FILES = 4096
_SHARED_SECONDS = 10
"""A file in the shared folder must be written and read again within this time."""


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    folder = folder.absolute()
    return shutil.disk_usage(next(f for f in (folder, *folder.parents) if f.exists())).free


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


def _write_and_read(folder: Path) -> Finding:
    started = time.monotonic()
    file = folder / f".launcher-doctor-{uuid.uuid4().hex}"
    try:
        write_file(file, file.name.encode())
        same = file.read_text() == file.name
    except OSError as error:
        return Finding("shared folder", "bad", f"{folder}: {error.strerror or error}")
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
    seconds = time.monotonic() - started
    what = "read again" if same else "read as other bytes"
    good = same and seconds <= _SHARED_SECONDS
    text = f"{folder}: a file written and {what} in {seconds:.3g} s"
    return Finding("shared folder", "good" if good else "bad", text)


def _rated(name: str, value: float, text: str, *, bad: float, warning: float) -> Finding:
    """A finding that is bad, or a warning, if the value is below these limits."""
    return Finding(name, "bad" if value < bad else "warning" if value < warning else "good", text)


def _open_files(ranks: int) -> Finding:
    """The limit of open files. The launcher raises the soft limit of its processes to the hard one."""
    if (problem := too_few_open_files(ranks)) is not None:
        return Finding("open files", "bad", problem)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return Finding("open files", "good", "no limit")
    text = f"a process may have {most:,} open (ulimit -Hn)"
    if most < _FEW_FILES:
        return Finding("open files", "warning", f"{text}; 65,536 is usual")
    enough = (most - open_files_needed(0)) // FILES_OF_RANK
    return Finding("open files", "good", f"{text}, enough for {enough:,} ranks")


def host_findings(*, ranks: int | None, all_ranks: int | None = None) -> Iterator[Finding]:
    """Memory, cores, shared memory and limits. ranks: of this node. all_ranks: of all nodes."""
    whole, available = host_memory.allowed() or 0, host_memory.available() or 0
    text = f"{bytes_as_text(available)} of {bytes_as_text(whole)} available"
    yield _rated("host memory", available, text, bad=GIB, warning=whole // 4)
    cores, ranks = len(os.sched_getaffinity(0)), ranks or 0
    text = f"{cores}, fewer than {ranks} ranks" if cores < ranks else str(cores)
    yield _rated("cores", cores, text, bad=0, warning=ranks)
    shared = free_bytes(Path("/dev/shm")) if Path("/dev/shm").is_dir() else 0
    text = f"{bytes_as_text(shared)} free"
    if shared < GIB:
        text += ": loader processes pass batches through it; "
        text += "in a container start with --ipc=host or --shm-size=8g"
    yield _rated("/dev/shm", shared, text, bad=60 * 1024**2, warning=GIB)
    yield _open_files(all_ranks or ranks)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
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
        text = f"{bytes_as_text(temporary)} free: compilers and torchrun write there"
        yield Finding("temporary disk", "warning", text)
    if shared is not None:
        yield _write_and_read(shared)
    problem = can_listen(port)
    good = f"port {port} is free" if port else "the host reaches itself by its name"
    yield Finding("network", "bad" if problem else "good", problem or good)


class Checks(TypedDict):
    """The arguments of `examine`."""

    expected_gpus: int | None
    ranks: int | None
    """Of this node."""
    all_ranks: int | None
    """Of all nodes."""
    runs: Path
    shared: Path | None
    port: int
    visible: str | None


def examine(**checks: Unpack[Checks]) -> tuple[list[Finding], Versions]:
    """All findings of this node, and its `gpus.versions`."""
    nvml, torch = gpus.query()

    findings = [
        *gpus.gpu_findings(
            nvml, torch, visible=checks["visible"], expected=checks["expected_gpus"]
        ),
        *host_findings(ranks=checks["ranks"], all_ranks=checks["all_ranks"]),
        *place_findings(runs=checks["runs"], shared=checks["shared"], port=checks["port"]),
    ]
    return findings, gpus.versions(nvml, torch)
