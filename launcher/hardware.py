"""What GPUs can do at best."""

from __future__ import annotations

PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "L4": 121e12,
}
"""Dense bfloat16 products a second, from NVIDIA's data sheets (their figures with sparsity, halved)."""


def peak_flops(device_name: str) -> float | None:
    """The peak of a GPU by the name CUDA gives it; None where it is not known, as on the CPU."""
    return next((peak for name, peak in PEAK_FLOPS.items() if all(word in device_name for word in name.split())), None)
