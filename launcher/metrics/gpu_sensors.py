"""Power, temperature and utilization of this rank's GPU, read beside training."""

from __future__ import annotations

import math
import threading

import torch

SECONDS = 5.0
"""Between two readings."""


class GpuSensors:
    """A thread asks NVML (nvidia-ml-py). Training only takes the last values."""

    def __init__(self, device: torch.device) -> None:
        self.values = (math.nan, math.nan, math.nan)
        """Watts, degrees Celsius, share of the time that a kernel ran; NaN: not known."""
        if device.type == "cuda" and torch.version.hip is None:
            name = "GPU sensors"
            threading.Thread(target=self._read, args=(device,), name=name, daemon=True).start()

    def _read(self, device: torch.device) -> None:
        pause = threading.Event()
        while not pause.wait(SECONDS):
            try:
                watts = torch.cuda.power_draw(device) / 1000
                celsius = float(torch.cuda.temperature(device))
                busy = torch.cuda.utilization(device) / 100
            except Exception:  # no library, no permission, or a part of a GPU (MIG)
                return
            self.values = (watts, celsius, busy)
