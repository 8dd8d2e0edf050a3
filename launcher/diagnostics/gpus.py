"""The GPUs of this node, as NVML and torch see them.

A driver that hangs blocks the process that queries it, so a separate process does:
`python -m launcher.diagnostics.gpus` prints what NVML reports as a line of JSON, then torch.
"""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.diagnostics.report import Finding, State
from launcher.errors import first_line
from launcher.metrics.console import bytes_as_text

GIB = 1024**3
ANSWER_SECONDS = 90
"""Time for NVML and torch to answer: importing torch from a busy network disk takes long."""
COMMAND = (sys.executable, "-m", "launcher.diagnostics.gpus")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What NVML reports about a GPU; None: the GPU does not support the query."""

    index: int
    uuid: str = ""
    name: str = ""
    memory: int = 0
    """Bytes."""
    used: int = 0
    """Bytes, without those that the driver reserves."""
    uncorrected_errors: int | None = None
    """Memory errors since the driver was loaded."""
    remap_pending: bool | None = None
    """A bad row of memory will be replaced when the GPU is reset."""
    remap_failed: bool | None = None
    thermal_slowdown: bool | None = None
    power_brake: bool | None = None
    temperature: int | None = None
    """Degrees Celsius."""
    processes: Sequence[str] = ()
    error: str | None = None
    """Why NVML reports nothing about this GPU."""


def query_nvml() -> dict[str, Any]:
    """driver: its version; gpus: fields of `Gpu` of each; error: of NVML as a whole, or None. A
    machine without NVIDIA's driver has no GPUs, which is no error."""
    found: dict[str, Any] = {"driver": None, "gpus": [], "error": None}
    try:
        import pynvml as nvml
    except ImportError:
        return found
    try:
        nvml.nvmlInit()
        found["driver"] = nvml.nvmlSystemGetDriverVersion()
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                found["gpus"].append({"index": index} | _query_gpu(nvml, index))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NO_PERMISSION:  # a GPU of another job
                    found["gpus"].append({"index": index, "error": str(error)})
    except nvml.NVMLError as error:
        none = (
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,  # a library that is not NVIDIA's
        )
        found["error"] = None if error.value in none else str(error)
    return found


def _query_gpu(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: Any, **options: Any) -> Any:
        """None where the GPU or its driver does not support the query."""
        with contextlib.suppress(nvml.NVMLError):
            return getattr(nvml, name)(handle, *arguments, **options)
        return None

    memory = ask("nvmlDeviceGetMemoryInfo", version=nvml.nvmlMemory_v2)
    memory = memory or nvml.nvmlDeviceGetMemoryInfo(handle)
    *_, pending, failed = ask("nvmlDeviceGetRemappedRows") or (None, None)
    slowed = ask("nvmlDeviceGetCurrentClocksEventReasons")
    heat, brake = (
        nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    )
    processes = []
    for process in ask("nvmlDeviceGetComputeRunningProcesses") or ():
        name = "a process"
        with contextlib.suppress(nvml.NVMLError):
            name = Path(nvml.nvmlSystemGetProcessName(process.pid)).name
        processes.append(f"{name} (pid {process.pid})")
    counter = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return {
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "name": nvml.nvmlDeviceGetName(handle),
        "memory": memory.total,
        "used": memory.used,
        "uncorrected_errors": ask("nvmlDeviceGetTotalEccErrors", *counter),
        "remap_pending": None if pending is None else bool(pending),
        "remap_failed": None if failed is None else bool(failed),
        "thermal_slowdown": None if slowed is None else bool(slowed & heat),
        "power_brake": None if slowed is None else bool(slowed & brake),
        "temperature": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "processes": processes,
    }


def query_torch(*, compute: bool = True) -> dict[str, Any]:
    """python, torch, cuda, rocm, nccl: versions; gpus: their names; error: or None.

    compute: also computes something on each GPU.
    """
    found: dict[str, Any] = dict.fromkeys(("torch", "cuda", "rocm", "nccl", "error"))
    found |= {"python": platform.python_version(), "gpus": []}
    try:
        import torch

        found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
        found["rocm"] = torch.version.hip
        if torch.cuda.is_available():
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            found["nccl"] = ".".join(map(str, version))
            for index in range(torch.cuda.device_count()):
                found["gpus"].append(torch.cuda.get_device_properties(index).name)
                if compute:
                    torch.ones(8, device=f"cuda:{index}").sum().item()
    except Exception as error:
        cannot = "torch cannot be imported: " if found["torch"] is None else ""
        found["error"] = cannot + first_line(error)
    return found


def query(*, seconds: float = ANSWER_SECONDS) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `query_nvml` and `query_torch` return in another process within this time. `error` says
    which of them did not answer."""
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        printed, late = process.communicate(timeout=seconds)[0], False
    except subprocess.TimeoutExpired as expired:
        process.kill()  # without waiting: a process in a hanging driver call does not end
        printed, late = expired.output or b"", True
    answers = []
    for line in printed.splitlines():
        with contextlib.suppress(ValueError):
            answers.append(json.loads(line))
    within = f"did not answer within {seconds:.0f} s" if late else "ended without an answer"
    if not answers:
        answers.append({"driver": None, "gpus": [], "error": f"NVML {within}: reboot the node"})
    if len(answers) == 1:
        why = f"torch {within}: a GPU or a file system hangs" if late else f"torch {within}"
        nothing = dict.fromkeys(("torch", "cuda", "rocm", "nccl"))
        answers.append(nothing | {"python": platform.python_version(), "gpus": [], "error": why})
    return answers[0], answers[1]


def versions(nvml: dict[str, Any], torch: dict[str, Any]) -> dict[str, Any]:
    """Versions of this node, None for what it has not; and `gpus`, how many torch sees."""
    names = ("python", "torch", "cuda", "rocm", "nccl")
    numbers = {"driver": nvml["driver"], "gpus": len(torch["gpus"])}
    return {name: torch.get(name) for name in names} | numbers


def visible_gpus(nvml: dict[str, Any], visible: str | None) -> list[Gpu]:
    """The GPUs of `query_nvml` that this process may use.

    visible: CUDA_VISIBLE_DEVICES: indices or the beginnings of UUIDs; None: all. A part of a GPU
    (MIG-...) matches none: NVML reports about the whole GPU.
    """
    gpus = [Gpu(**fields) for fields in nvml["gpus"]]
    if visible is None:
        return gpus
    words = [word.strip() for word in visible.split(",") if word.strip()]
    uuids = tuple(word for word in words if word.startswith("GPU-"))
    return [
        gpu for gpu in gpus if str(gpu.index) in words or (uuids and gpu.uuid.startswith(uuids))
    ]


def gpu_findings(
    nvml: dict[str, Any], torch: dict[str, Any], *, visible: str | None, expected: int | None
) -> Iterator[Finding]:
    """Whether the GPUs are there, free and healthy. expected: how many there must be."""
    gpus, names = visible_gpus(nvml, visible), torch["gpus"]
    if nvml["error"]:
        yield Finding("GPUs", "bad", nvml["error"])
    elif expected is not None and (len(gpus) or len(names)) < expected:
        text = f"{len(gpus) or len(names)} of {expected} are there"
        yield Finding("GPUs", "bad", text)
    elif not gpus:
        yield Finding("GPUs", "note", _without_nvml(torch))
    working = [gpu for gpu in gpus if gpu.error is None]
    if working:
        models = sorted({gpu.name for gpu in working})
        mixed = len(models) > 1 or len({gpu.memory for gpu in working}) > 1
        memory = bytes_as_text(min(gpu.memory for gpu in working))
        text = f"{len(working)} x {', '.join(models)} of {memory}, driver {nvml['driver']}"
        text += "; not all alike" if mixed else ""
        yield Finding("GPUs", "warning" if mixed else "good", text)
    problems = [(gpu.index, *problem) for gpu in gpus for problem in _problems(gpu)]
    for index, state, text in problems:
        yield Finding(f"GPU {index}", state, text)
    if working and not problems:
        hottest = max((gpu.temperature for gpu in working if gpu.temperature), default=None)
        heat = "" if hottest is None else f", at most {hottest} C"
        text = f"no other processes, no memory errors, none throttled{heat}"
        yield Finding("GPUs free", "good", text)


def _without_nvml(torch: dict[str, Any]) -> str:
    """Text for GPUs that NVML does not know: in a container without it, parts (MIG), and AMD's."""
    if not torch["gpus"]:
        return "none: training computes on the CPU; a torch built for GPUs needs run.device=cpu"
    names = f"{len(torch['gpus'])} x {', '.join(sorted(set(torch['gpus'])))}"
    if torch["rocm"] is None:
        return f"{names}; NVML does not answer: whether they are free and healthy is not known"
    commands = "amd-smi process and amd-smi metric --ecc show whether they are free and healthy"
    return f"{names}, ROCm {torch['rocm']}; AMD GPUs are not examined; {commands}"


def _problems(gpu: Gpu) -> Iterator[tuple[State, str]]:
    if gpu.error is not None:
        yield "bad", f"NVML does not answer for it: {gpu.error}"
    # Some drivers count several hundred MiB of their own
    if gpu.processes or gpu.used > max(GIB, gpu.memory // 50):
        names = ", ".join(gpu.processes) or "no process that can be seen from here"
        memory = f"{bytes_as_text(gpu.used)} of {bytes_as_text(gpu.memory)}"
        yield "bad", f"not free: {memory} in use, by {names}"
    if gpu.uncorrected_errors:
        errors = f"{gpu.uncorrected_errors} uncorrected memory errors since its driver was loaded"
        yield "bad", f"{errors}: reset or replace it"
    if gpu.remap_failed:
        yield "bad", "a bad row of its memory could not be remapped: replace it"
    if gpu.remap_pending:
        yield "bad", "a bad row of its memory waits to be remapped: reset it"
    if gpu.thermal_slowdown:
        heat = "" if gpu.temperature is None else f" at {gpu.temperature} C"
        yield "bad", f"slowed down by heat{heat}: every rank would wait for it"
    if gpu.power_brake:
        yield "warning", "slowed down by its power supply"


def torch_findings(torch: dict[str, Any], gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Whether torch computes on all of these GPUs."""
    if torch["error"]:
        yield Finding("torch", "bad", torch["error"])
    elif len(torch["gpus"]) < len(gpus):
        why = "the driver is too old for it, or a GPU fell off the bus"
        why = "this torch is built without CUDA" if torch["cuda"] is None else why
        text = f"{torch['torch']} computes on {len(torch['gpus'])} of {len(gpus)} GPUs: {why}"
        yield Finding("torch", "bad", text)
    else:
        keys = (("cuda", "CUDA"), ("rocm", "ROCm"), ("nccl", "NCCL"), ("python", "Python"))
        versions = [f"{label} {torch[key]}" for key, label in keys if torch.get(key)]
        yield Finding("torch", "good", ", ".join([torch["torch"], *versions]))


if __name__ == "__main__":
    print(json.dumps(query_nvml()), flush=True)
    print(json.dumps(query_torch()), flush=True)
