"""A replacement for nvidia-ml-py with the same names. Its data is the JSON in FAKE_NVML.

FAKE_NVML: {"driver": ..., "gpus": [{...}], "error": code of nvmlInit, "hang": true}. A GPU has a
key for each query that it supports. With `lost`, access to the GPU fails with this error code.
"""

import json
import os
import time
from types import SimpleNamespace

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 3, 4
NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_GPU_IS_LOST = 9, 12, 15
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU = 1, 0, 0
nvmlMemory_v2 = 0x02000028  # noqa: N816
nvmlClocksThrottleReasonHwThermalSlowdown = 0x40  # noqa: N816
nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80  # noqa: N816


class NVMLError(Exception):
    def __init__(self, value):
        self.value = value

    def __str__(self):
        return {15: "GPU is lost", 18: "RM has detected an NVML/RM version mismatch."}[self.value]


_node = {}


def nvmlInit():  # noqa: N802
    _node.clear()
    _node.update(json.loads(os.environ["FAKE_NVML"]))
    if _node.get("hang"):
        time.sleep(60)
    if "error" in _node:
        raise NVMLError(_node["error"])


def nvmlSystemGetDriverVersion():  # noqa: N802
    return _node["driver"]


def nvmlDeviceGetCount():  # noqa: N802
    return len(_node["gpus"])


def nvmlDeviceGetHandleByIndex(index):  # noqa: N802
    gpu = _node["gpus"][index]
    if "lost" in gpu:
        raise NVMLError(gpu["lost"])
    return gpu


def nvmlSystemGetProcessName(pid):  # noqa: N802
    return f"/usr/bin/python{pid}"


def _answer(key, convert=lambda value: value):
    def function(handle, *arguments, version=None):
        if key not in handle or (version is not None and handle.get("old")):
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return convert(handle[key])

    return function


nvmlDeviceGetUUID = _answer("uuid")  # noqa: N816
nvmlDeviceGetName = _answer("name")  # noqa: N816
nvmlDeviceGetMemoryInfo = _answer("memory", lambda m: SimpleNamespace(total=m[0], used=m[1]))  # noqa: N816
nvmlDeviceGetTotalEccErrors = _answer("ecc")  # noqa: N816
nvmlDeviceGetRemappedRows = _answer("rows")  # noqa: N816
nvmlDeviceGetCurrentClocksEventReasons = _answer("clocks")  # noqa: N816
nvmlDeviceGetTemperature = _answer("temperature")  # noqa: N816
nvmlDeviceGetComputeRunningProcesses = _answer(  # noqa: N816
    "processes", lambda pids: [SimpleNamespace(pid=pid) for pid in pids]
)
