"""Is this node fit to train? What can be asked of it without peers, in a second or so, each answer a finding.

Standard library only: torch is asked in a process of its own, as a GPU that hangs would hang who asks it. What looks at
the machine are the functions of the first part; the second part judges what they found.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launcher.distributed import host_memory as memory_here
from launcher.metrics.console import bytes_as_text

GIB = 1024**3
TORCH_SECONDS = 90
"""That torch may take to start and name the GPUs it sees; a node that takes longer hangs."""
SHARED_SECONDS = 10
"""That writing and reading a small file in the shared folder may take."""

ALL_NODES = "all nodes"
"""Host of a finding that belongs to no single node."""

State = Literal["good", "note", "warning", "bad"]


def host_name() -> str:
    """As Slurm knows this node, so that it can be told to leave it out; without Slurm the host's own name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    """bad: not fit to train; warning: it may train, slower or not for long; note: worth knowing."""
    text: str
    host: str = field(default_factory=host_name)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What nvidia-smi says of one GPU; None where it does not know."""

    index: int
    uuid: str
    name: str
    driver: str
    memory: int
    used: int
    uncorrected_errors: int | None = None
    """Since the driver was loaded."""
    remap_pending: bool | None = None
    """A broken row of memory waits for a reset of the GPU to be replaced."""
    remap_failed: bool | None = None
    thermal_slowdown: bool | None = None
    power_brake: bool | None = None
    temperature: int | None = None
    processes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found on a machine, and how fast it is."""

    findings: list[Finding]
    device: str
    nodes: int
    ranks_per_node: int
    versions: dict[str, Any]
    rates: dict[str, Any] | None = None
    """As `machine.Rates`, None where one could not be measured; None: nothing was."""
    within_node: dict[str, float] | None = None
    """Bytes a second that a rank sends, by collective, among the ranks of a node."""
    across_nodes: dict[str, float] | None = None
    """The same among all ranks of several nodes."""
    links: dict[str, float] | None = None
    """Bytes a second that a rank swaps with its like on a neighbouring node, by host: the better neighbour, the slowest rank."""

    @property
    def fit(self) -> bool:
        """Whether nothing is bad."""
        return not any(finding.state == "bad" for finding in self.findings)

    @property
    def bad_nodes(self) -> list[str]:
        """Hosts that something bad belongs to."""
        return sorted({finding.host for finding in self.findings if finding.state == "bad"} - {ALL_NODES})


FIGURES = {
    "half_flops": ("products of matrices, bfloat16", "FLOP/s"),
    "float32_flops": ("products of matrices, float32", "FLOP/s"),
    "memory_bandwidth": ("memory, read and written", "B/s"),
    "host_bandwidth": ("between host and device", "B/s"),
    "host_adamw": ("AdamW in host memory", "parameters/s"),
}
"""Of `machine.Rates`, those that a rank measures alone, in words."""


def rate_in_words(rate: float, unit: str) -> str:
    """`652 TFLOP/s`, `2.61 TB/s`, `0.38 billion parameters/s`."""
    if unit == "parameters/s":
        return f"{rate / 1e9:.3g} billion {unit}"
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= size:
            return f"{rate / size:.3g} {prefix}{unit}"
    return f"{rate:.3g} {unit}"


# What looks at the machine


def ask(command: Sequence[str], *, seconds: float) -> str | None:
    """What a command prints; None: there is no such command, or it failed. Raises TimeoutError where it takes longer."""
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} did not answer within {seconds:.0f} s") from None
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def nvidia_smi(*arguments: str) -> str | None:
    """What nvidia-smi prints. Raises TimeoutError where the driver does not answer."""
    return ask(["nvidia-smi", *arguments, "--format=csv,noheader,nounits"], seconds=30)


_TORCH = """
import json, torch
told = {"torch": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip, "nccl": None, "gpus": [], "error": None}
try:
    if torch.cuda.is_available():
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        for index in range(torch.cuda.device_count()):
            told["gpus"].append(torch.cuda.get_device_properties(index).name)
            torch.ones(8, device=f"cuda:{index}").sum().item()
except Exception as error:
    told["error"] = str(error).splitlines()[0]
print(json.dumps(told))
"""


def torch_sees() -> dict[str, Any]:
    """torch, cuda, rocm, nccl: versions; gpus: names of those that computed something; error: what went wrong, or None."""
    try:
        printed = ask([sys.executable, "-c", _TORCH], seconds=TORCH_SECONDS)
    except TimeoutError:
        return {"torch": None, "gpus": [], "error": f"torch did not start within {TORCH_SECONDS} s: a GPU or the file system hangs"}
    if printed is None:
        return {"torch": None, "gpus": [], "error": "torch cannot be imported"}
    told: dict[str, Any] = json.loads(printed)
    return told


def host_memory() -> tuple[int, int]:
    """Bytes: all that may be used here, and of it available."""
    return memory_here.allowed() or 0, memory_here.available() or 0


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def open_files() -> int:
    """How many files a process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def locked_memory() -> int | None:
    """Bytes that a process may lock in memory; None: as many as it likes."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def has_infiniband() -> bool:
    """Whether there is a network adapter that writes to memory by itself."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def driver() -> str | None:
    """Version of the GPUs' driver; None: there is none, or it does not answer."""
    with contextlib.suppress(TimeoutError):
        rows = _rows(nvidia_smi("--query-gpu=driver_version"))
        return rows[0][0] if rows else None
    return None


def free_bytes(folder: Path) -> int:
    """On the disk of a folder, or of the nearest one above it that there is."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def can_listen(port: int) -> str | None:
    """None: this host can be reached by its own name at this port (0: any); else what went wrong."""
    with socket.socket() as server:
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", port))
            server.listen()
        except OSError as error:
            return f"port {port} cannot be listened on: {error.strerror}"
        try:
            socket.create_connection((socket.gethostname(), server.getsockname()[1]), timeout=5).close()
        except OSError as error:
            return f"the host cannot reach itself as {socket.gethostname()}: {error.strerror or error}"
    return None


def write_and_read(folder: Path) -> float:
    """Seconds that a small file takes to be written to disk and read again. Raises OSError."""
    started = time.monotonic()
    file = folder / f".launcher-doctor-{uuid.uuid4().hex}"
    try:
        with file.open("w") as out:
            out.write(file.name)
            out.flush()
            os.fsync(out.fileno())
        if file.read_text() != file.name:
            raise OSError(f"{file}: what was written is not what is read")
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
    return time.monotonic() - started


# What is made of it


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _yes(text: str) -> bool | None:
    return {"yes": True, "active": True, "no": False, "not active": False}.get(text.strip().lower())


def _rows(text: str | None) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader((text or "").splitlines()) if row]


def read_gpus(visible: str | None) -> list[Gpu]:
    """The GPUs of this node, by nvidia-smi; empty without it. Raises TimeoutError where the driver does not answer.

    visible: CUDA_VISIBLE_DEVICES: indices or the beginnings of UUIDs; None: all.
    """
    basic = _rows(nvidia_smi("--query-gpu=index,uuid,name,driver_version,memory.total,memory.used"))
    if not basic:
        return []
    by_index: dict[int, dict[str, Any]] = {}
    for row in basic:
        index = _number(row[0])
        if index is not None and len(row) == 6:
            memory, used = ((_number(cell) or 0) * 1024**2 for cell in row[4:])
            by_index[index] = {"uuid": row[1], "name": row[2], "driver": row[3], "memory": memory, "used": used}
    # An old driver or a small GPU does not know all of these, and then answers nothing at all: one at a time
    queries: dict[str, tuple[tuple[str, ...], Any]] = {
        "uncorrected_errors": (("ecc.errors.uncorrected.volatile.total",), _number),
        "remap_pending": (("remapped_rows.pending",), _yes),
        "remap_failed": (("remapped_rows.failure",), _yes),
        "thermal_slowdown": (("clocks_event_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.hw_thermal_slowdown"), _yes),
        "power_brake": (("clocks_event_reasons.hw_power_brake_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown"), _yes),
        "temperature": (("temperature.gpu",), _number),
    }
    for name, (spellings, read) in queries.items():
        for spelling in spellings:
            answer = _rows(nvidia_smi(f"--query-gpu=index,{spelling}"))
            for row in answer:
                index = _number(row[0])
                if index in by_index and len(row) == 2:
                    by_index[index][name] = read(row[1])
            if answer:
                break
    running: dict[str, list[str]] = {}
    for row in _rows(nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name")):
        if len(row) == 3:
            running.setdefault(row[0], []).append(f"{Path(row[2]).name} (pid {row[1]})")
    gpus = [Gpu(index=i, processes=tuple(running.get(known["uuid"], ())), **known) for i, known in sorted(by_index.items())]
    if visible is None:
        return gpus
    # A part of a GPU (MIG-...) matches none: what is said of the whole GPU would be of others' parts too
    wanted = [word.strip() for word in visible.split(",") if word.strip()]
    return [
        gpu for gpu in gpus if any(word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word)) for word in wanted)
    ]


def gpu_findings(gpus: Sequence[Gpu], *, expected: int | None, seen: Sequence[str] = (), rocm: str | None = None) -> Iterator[Finding]:
    """Whether they are all there, free and healthy. seen: names of those that torch sees, which is all there is to go by
    where nvidia-smi is missing (a container without it), where a rank has a part of a GPU (MIG), and on AMD GPUs.
    rocm: version that torch is built for."""
    there = len(gpus) or len(seen)
    if expected is not None and there < expected:
        yield Finding(name="GPUs", state="bad", text=f"{there} of {expected} are there")
    elif seen and not gpus:
        parts = ", ".join(sorted(set(seen)))
        if rocm is not None:
            # The JSON of amd-smi differs between versions of ROCm, and there was no AMD GPU to test against
            why = "AMD GPUs are not examined; amd-smi process and amd-smi metric --ecc show"
            text = f"{there} x {parts}, ROCm {rocm}; {why} whether they are free and healthy"
        else:
            text = f"{there} x {parts}; nvidia-smi says nothing of them: whether they are free and healthy is not known"
        yield Finding(name="GPUs", state="note", text=text)
    elif not gpus:
        yield Finding(name="GPUs", state="note", text="none: training computes on the CPU; a torch built for GPUs asks for run.device=cpu")
    if gpus:
        names = sorted({gpu.name for gpu in gpus})
        mixed = len(names) > 1 or len({gpu.memory for gpu in gpus}) > 1
        text = f"{len(gpus)} x {', '.join(names)} of {bytes_as_text(min(gpu.memory for gpu in gpus))}, driver {gpus[0].driver}"
        yield Finding(name="GPUs", state="warning" if mixed else "good", text=text + ("; not all alike" if mixed else ""))
    troubled = False
    for gpu in gpus:
        for state, text in _troubles(gpu):
            troubled = True
            yield Finding(name=f"GPU {gpu.index}", state=state, text=text)
    if gpus and not troubled:
        hottest = max((gpu.temperature for gpu in gpus if gpu.temperature is not None), default=None)
        heat = "" if hottest is None else f", at most {hottest} C"
        yield Finding(name="GPUs free", state="good", text=f"nobody computes on them, no memory errors, none throttled{heat}")


def _troubles(gpu: Gpu) -> Iterator[tuple[State, str]]:
    # The driver itself may hold some hundred MiB, and more on large GPUs with error correction
    if gpu.processes or gpu.used > max(GIB, gpu.memory // 50):
        who = ", ".join(gpu.processes) or "no process that can be seen from here"
        yield "bad", f"not free: {bytes_as_text(gpu.used)} of {bytes_as_text(gpu.memory)} in use, by {who}"
    if gpu.uncorrected_errors:
        yield "bad", f"{gpu.uncorrected_errors} uncorrected memory errors since its driver was loaded: reset or replace it"
    if gpu.remap_failed:
        yield "bad", "a broken row of its memory could not be remapped: replace it"
    if gpu.remap_pending:
        yield "bad", "a broken row of its memory waits to be remapped: reset it"
    if gpu.thermal_slowdown:
        heat = "" if gpu.temperature is None else f" at {gpu.temperature} C"
        yield "bad", f"slowed down by heat{heat}: every rank would wait for it"
    if gpu.power_brake:
        yield "warning", "slowed down by its power supply"


def software_findings(torch: dict[str, Any], gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Whether torch starts and computes on all GPUs that there are."""
    if torch["error"]:
        yield Finding(name="torch", state="bad", text=torch["error"])
    elif len(torch["gpus"]) < len(gpus):
        why = "this torch is built without CUDA" if torch["cuda"] is None else "a driver too old for it, or a GPU that fell off the bus"
        yield Finding(name="torch", state="bad", text=f"{torch['torch']} computes on {len(torch['gpus'])} of {len(gpus)} GPUs: {why}")
    else:
        more = "".join(f", {label} {torch[key]}" for key, label in (("cuda", "CUDA"), ("rocm", "ROCm"), ("nccl", "NCCL")) if torch.get(key))
        yield Finding(name="torch", state="good", text=f"{torch['torch']}{more}, Python {platform.python_version()}")


def host_findings(*, ranks: int | None) -> Iterator[Finding]:
    """Memory, cores, shared memory and limits."""
    whole, available = host_memory()
    state: State = "bad" if available < GIB else "warning" if available < whole // 4 else "good"
    yield Finding(name="host memory", state=state, text=f"{bytes_as_text(available)} of {bytes_as_text(whole)} available")
    here = cores()
    few = ranks is not None and here < ranks
    yield Finding(name="cores", state="warning" if few else "good", text=f"{here}" + (f", fewer than {ranks} ranks" if few else ""))
    shared = free_bytes(Path("/dev/shm")) if Path("/dev/shm").is_dir() else 0
    state = "bad" if shared < 60 * 1024**2 else "warning" if shared < GIB else "good"
    mend = "" if state == "good" else ": loader processes pass batches through it; in a container start with --ipc=host or --shm-size=8g"
    yield Finding(name="/dev/shm", state=state, text=f"{bytes_as_text(shared)} free{mend}")
    files = open_files()
    if files < 4096:
        text = f"a process may have {files:,} open: ulimit -n 65536"
        yield Finding(name="open files", state="bad" if files < 256 else "warning", text=text)
    locked = locked_memory()
    if locked is not None and has_infiniband():
        text = f"a process may lock {bytes_as_text(locked)}, but InfiniBand needs all that is sent locked: ulimit -l unlimited"
        yield Finding(name="locked memory", state="bad" if locked < 64 * 1024**2 else "warning", text=text)


def place_findings(*, runs: Path, shared: Path | None, port: int) -> Iterator[Finding]:
    """Disks and ports."""
    free = free_bytes(runs)
    state: State = "bad" if free < GIB else "warning" if free < 20 * GIB else "good"
    yield Finding(name="disk of runs", state=state, text=f"{bytes_as_text(free)} free for {runs}")
    temporary = free_bytes(Path(os.environ.get("TMPDIR", "/tmp")))
    if temporary < GIB:
        yield Finding(name="temporary disk", state="warning", text=f"{bytes_as_text(temporary)} free: compiled kernels go there")
    if shared is not None:
        try:
            seconds = write_and_read(shared)
        except OSError as error:
            yield Finding(name="shared folder", state="bad", text=f"{shared}: {error.strerror or error}")
        else:
            slow = seconds > SHARED_SECONDS
            text = f"{shared}: a file written and read again in {seconds:.3g} s"
            yield Finding(name="shared folder", state="bad" if slow else "good", text=text)
    problem = can_listen(port)
    said = f"port {port} is free" if port else "the host reaches itself by its name"
    yield Finding(name="network", state="bad" if problem else "good", text=problem or said)


def examine(
    *, expected_gpus: int | None, ranks: int | None, runs: Path, shared: Path | None, port: int, visible: str | None
) -> tuple[list[Finding], dict[str, Any]]:
    """All findings of this node, and its versions: python, torch, cuda, nccl, driver (None: there is none)."""
    findings: list[Finding] = []
    gpus: list[Gpu] = []
    torch = torch_sees()
    try:
        gpus = read_gpus(visible)
    except TimeoutError as error:
        findings.append(Finding(name="GPUs", state="bad", text=f"{error}: the driver hangs, reboot the node"))
    else:
        findings += gpu_findings(gpus, expected=expected_gpus, seen=torch["gpus"], rocm=torch.get("rocm"))
    findings += software_findings(torch, gpus)
    findings += host_findings(ranks=ranks)
    findings += place_findings(runs=runs, shared=shared, port=port)
    versions = {"python": platform.python_version(), **{key: torch.get(key) for key in ("torch", "cuda", "rocm", "nccl")}}
    return findings, versions | {"driver": gpus[0].driver if gpus else None, "gpus": len(torch["gpus"])}


def unlike(versions: dict[str, dict[str, Any]]) -> list[Finding]:
    """What hosts do not have as most others do. versions: by host."""
    findings = []
    for name in next(iter(versions.values()), {}):
        counts = Counter(told[name] for told in versions.values())
        most, count = counts.most_common(1)[0]
        if 2 * count <= len(versions):  # no majority, none that is out of line
            text = (
                f"{name} " + ", ".join(f"{value} on {count}" for value, count in counts.most_common()) + " nodes: should be the same on all"
            )
            findings.append(Finding(name="versions", state="bad", text=text, host=ALL_NODES))
            continue
        for host, told in versions.items():
            if told[name] != most:
                text = f"{name} {told[name]}, but {most} on {count} of {len(versions)} nodes"
                findings.append(Finding(name="versions", state="bad", text=text, host=host))
    return findings
