"""The GPUs of this node, as NVML and torch see them.

A driver that hangs blocks the process that queries it. Therefore another process,
`python -m launcher.diagnostics.gpus`, prints two lines of JSON: of NVML and of torch.
"""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

from launcher.console import bytes_as_text
from launcher.diagnostics.findings import Finding, State, Versions
from launcher.errors import first_line

GIB = 1024**3
ANSWER_SECONDS = 90
"""Time for NVML and torch to answer: importing torch from a busy network disk takes long."""
COMMAND = (sys.executable, "-m", "launcher.diagnostics.gpus")


class Gpu(TypedDict):
    """What NVML reports of a GPU."""

    index: int
    uuid: str
    name: str
    memory: int
    """Bytes."""
    problems: list[tuple[State, str]]


class Nvml(TypedDict):
    """What NVML reports."""

    driver: str | None
    gpus: list[Gpu]
    error: str | None
    """Of NVML as a whole; a missing NVIDIA driver is not an error."""


class Torch(TypedDict):
    """What torch reports."""

    torch: str | None
    cuda: str | None
    rocm: str | None
    nccl: str | None
    error: str | None
    python: str
    gpus: list[str]
    """Their names."""


def _no_nvml(error: str | None = None) -> Nvml:
    return {"driver": None, "gpus": [], "error": error}


def _no_torch(error: str | None = None) -> Torch:
    python = platform.python_version()
    return {
        "torch": None,
        "cuda": None,
        "rocm": None,
        "nccl": None,
        "error": error,
        "python": python,
        "gpus": [],
    }


def query_nvml() -> Nvml:
    """Returns what NVML reports."""
    answer = _no_nvml()
    try:
        import pynvml as nvml
    except ImportError:
        return answer
    try:
        nvml.nvmlInit()
        answer["driver"] = nvml.nvmlSystemGetDriverVersion()
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu: Gpu = {"index": index, "uuid": "", "name": "", "memory": 0, "problems": []}
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpu["uuid"] = nvml.nvmlDeviceGetUUID(handle)
                gpu["name"] = nvml.nvmlDeviceGetName(handle)
                gpu["memory"] = nvml.nvmlDeviceGetMemoryInfo(handle).total
                gpu["problems"] = list(_problems(nvml, handle))
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_NO_PERMISSION:  # a GPU of another job
                    continue
                gpu["problems"] = [("bad", f"NVML does not answer for it: {error}")]
            answer["gpus"].append(gpu)
    except nvml.NVMLError as error:
        no_driver = (
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,  # a library that is not NVIDIA's
        )
        answer["error"] = None if error.value in no_driver else str(error)
    return answer


def _problems(nvml: ModuleType, handle: object) -> Iterator[tuple[State, str]]:
    def ask(name: str, *arguments: object, **options: object) -> Any:
        """None where the GPU or its driver does not support the query."""
        with contextlib.suppress(nvml.NVMLError):
            return getattr(nvml, name)(*arguments, **options)
        return None

    users = []
    for process in ask("nvmlDeviceGetComputeRunningProcesses", handle) or ():
        path = ask("nvmlSystemGetProcessName", process.pid) or "a process"
        users.append(f"{Path(path).name} (pid {process.pid})")
    # Version 2 does not count what the driver reserves as used. Some drivers still count several
    # hundred MiB of their own
    memory = ask("nvmlDeviceGetMemoryInfo", handle, version=nvml.nvmlMemory_v2)
    memory = memory or nvml.nvmlDeviceGetMemoryInfo(handle)
    if users or memory.used > max(GIB, memory.total // 50):
        names = ", ".join(users) or "no process that can be seen from here"
        used = f"{bytes_as_text(memory.used)} of {bytes_as_text(memory.total)}"
        yield "bad", f"not free: {used} in use, by {names}"
    counter = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    if errors := ask("nvmlDeviceGetTotalEccErrors", handle, *counter):
        text = f"{errors} uncorrected memory errors since its driver was loaded"
        yield "bad", f"{text}: reset or replace it"
    *_, pending, failed = ask("nvmlDeviceGetRemappedRows", handle) or (False, False)
    if failed:
        yield "bad", "a bad row of its memory could not be remapped: replace it"
    if pending:
        yield "bad", "a bad row of its memory waits to be remapped: reset it"
    slowed = ask("nvmlDeviceGetCurrentClocksEventReasons", handle) or 0
    if slowed & nvml.nvmlClocksThrottleReasonHwThermalSlowdown:
        yield "bad", "slowed down by heat: every rank would wait for it"
    if slowed & nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown:
        yield "warning", "slowed down by its power supply"


def query_torch(*, compute: bool = True) -> Torch:
    """Returns what torch reports. compute: also computes something on each GPU."""
    answer = _no_torch()
    try:
        import torch

        answer["torch"], answer["cuda"] = torch.__version__, torch.version.cuda
        answer["rocm"] = torch.version.hip
        if torch.cuda.is_available():
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            answer["nccl"] = ".".join(map(str, version))
            for index in range(torch.cuda.device_count()):
                answer["gpus"].append(torch.cuda.get_device_properties(index).name)
                if compute:
                    torch.ones(8, device=f"cuda:{index}").sum().item()
    except Exception as error:  # a broken installation or GPU raises many classes
        cannot = "torch cannot be imported: " if answer["torch"] is None else ""
        answer["error"] = cannot + first_line(error)
    return answer


def query(*, seconds: float = ANSWER_SECONDS) -> tuple[Nvml, Torch]:
    """`query_nvml` and `query_torch` in another process, within this time."""
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        printed, how = process.communicate(timeout=seconds)[0], "ended without an answer"
    except subprocess.TimeoutExpired as expired:
        process.kill()  # without waiting: a process in a hanging driver call does not end
        printed, how = expired.output or b"", f"did not answer within {seconds:.0f} s"
    answers = [json.loads(line) for line in printed.splitlines() if line.startswith(b"{")]
    answers += [
        _no_nvml(f"NVML {how}: reboot the node"),
        _no_torch(f"torch {how}: a GPU or a file system hangs"),
    ][len(answers) :]
    return answers[0], answers[1]


def versions(nvml: Nvml, torch: Torch) -> Versions:
    """The versions on this node."""
    return {
        "torch": torch["torch"],
        "cuda": torch["cuda"],
        "rocm": torch["rocm"],
        "nccl": torch["nccl"],
        "python": torch["python"],
        "gpus": len(torch["gpus"]),
        "driver": nvml["driver"],
    }


def visible_gpus(nvml: Nvml, visible: str | None) -> list[Gpu]:
    """The GPUs of `query_nvml` that this process may use.

    visible: CUDA_VISIBLE_DEVICES, indices or the beginnings of UUIDs; None: all. A part of a GPU
    (MIG-...) matches none.
    """
    gpus = nvml["gpus"]
    if visible is None:
        return gpus
    names = [name.strip() for name in visible.split(",")]
    uuids = tuple(name for name in names if name.startswith("GPU-"))
    return [gpu for gpu in gpus if str(gpu["index"]) in names or gpu["uuid"].startswith(uuids)]


def gpu_findings(
    nvml: Nvml, torch: Torch, *, visible: str | None, expected: int | None
) -> Iterator[Finding]:
    """Whether the GPUs are there, free and healthy, and torch computes on all of them."""
    gpus, names = visible_gpus(nvml, visible), torch["gpus"]
    there = len(gpus) or len(names)
    if nvml["error"]:
        yield Finding("GPUs", "bad", nvml["error"])
    elif expected is not None and there < expected:
        yield Finding("GPUs", "bad", f"{there} of {expected} found")
    elif names and not gpus:  # parts of GPUs (MIG), AMD's, a container without NVML
        text = "NVML does not answer: whether they are free and healthy is not known"
        text = f"{len(names)} x {', '.join(sorted(set(names)))}; {text}"
        yield Finding("GPUs", "note", text)
    elif not gpus:
        text = "none: training computes on the CPU; a torch built for GPUs needs run.device=cpu"
        yield Finding("GPUs", "note", text)
    else:
        models, sizes = {gpu["name"] for gpu in gpus}, {gpu["memory"] for gpu in gpus}
        mixed = len(models) > 1 or len(sizes) > 1
        text = f"{len(gpus)} x {', '.join(sorted(models))} of {bytes_as_text(min(sizes))}"
        text += f", driver {nvml['driver']}" + ("; not all alike" if mixed else "")
        yield Finding("GPUs", "warning" if mixed else "good", text)
    for gpu in gpus:
        for state, text in gpu["problems"]:
            yield Finding(f"GPU {gpu['index']}", state, text)
    if gpus and not any(gpu["problems"] for gpu in gpus):
        yield Finding("GPUs free", "good", "no other processes, no memory errors, none throttled")
    if torch["error"]:
        yield Finding("torch", "bad", torch["error"])
    elif len(names) < len(gpus):
        why = "the driver is too old for it, or a GPU fell off the bus"
        why = "this torch is built without CUDA" if torch["cuda"] is None else why
        text = f"{torch['torch']} computes on {len(names)} of {len(gpus)} GPUs: {why}"
        yield Finding("torch", "bad", text)
    else:
        cuda, rocm, nccl = torch["cuda"], torch["rocm"], torch["nccl"]
        found = {"CUDA": cuda, "ROCm": rocm, "NCCL": nccl, "Python": torch["python"]}
        numbers = [f"{label} {number}" for label, number in found.items() if number]
        yield Finding("torch", "good", ", ".join([str(torch["torch"]), *numbers]))


if __name__ == "__main__":
    print(json.dumps(query_nvml()), flush=True)
    print(json.dumps(query_torch()), flush=True)
