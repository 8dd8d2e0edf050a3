"""What GPUs can do at best: one table."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU by its data sheet. Products are dense: half of a sheet's figure with sparsity. Bandwidths are bytes a second."""

    name: str
    memory: float
    """GiB that CUDA reports, rounded down: a little less than its name says, 7 % less where GDDR6 corrects errors."""
    half: float
    """Products a second in bfloat16, summed in float32."""
    tf32: float
    float32: float
    bandwidth: float
    """Of its memory."""
    nvlink: float
    """One way, to all other GPUs of the node at once (half of what the sheet calls the total); 0: only over PCIe."""
    pcie: float
    """One way, 16 lanes: generation 4 has 32e9, generation 5 has 64e9."""
    source: str


GPUS = (
    Gpu(
        name="A100 40GB PCIe", memory=39.3, half=312e12, tf32=156e12, float32=19.5e12, bandwidth=1.555e12, nvlink=0, pcie=32e9,
        source="NVIDIA A100 data sheet",
    ),
    Gpu(
        name="A100 40GB", memory=39.3, half=312e12, tf32=156e12, float32=19.5e12, bandwidth=1.555e12, nvlink=300e9, pcie=32e9,
        source="NVIDIA A100 data sheet, SXM",
    ),
    Gpu(
        name="A100 80GB PCIe", memory=79.1, half=312e12, tf32=156e12, float32=19.5e12, bandwidth=1.935e12, nvlink=0, pcie=32e9,
        source="NVIDIA A100 80GB data sheet, PCIe",
    ),
    Gpu(
        name="A100 80GB", memory=79.1, half=312e12, tf32=156e12, float32=19.5e12, bandwidth=2.039e12, nvlink=300e9, pcie=32e9,
        source="NVIDIA A100 80GB data sheet, SXM",
    ),
    Gpu(
        name="H100 PCIe", memory=79.1, half=756e12, tf32=378e12, float32=51e12, bandwidth=2.0e12, nvlink=0, pcie=64e9,
        source="NVIDIA H100 data sheet, PCIe",
    ),
    Gpu(
        name="H100 NVL", memory=93.1, half=835e12, tf32=417e12, float32=60e12, bandwidth=3.9e12, nvlink=0, pcie=64e9,
        source="NVIDIA H100 data sheet, NVL",
    ),
    Gpu(
        name="H100", memory=79.1, half=989e12, tf32=494e12, float32=67e12, bandwidth=3.35e12, nvlink=450e9, pcie=64e9,
        source="NVIDIA H100 data sheet, SXM",
    ),
    Gpu(
        name="H200 NVL", memory=139.7, half=835e12, tf32=417e12, float32=60e12, bandwidth=4.8e12, nvlink=450e9, pcie=64e9,
        source="NVIDIA H200 data sheet, NVL",
    ),
    Gpu(
        name="H200", memory=139.7, half=989e12, tf32=494e12, float32=67e12, bandwidth=4.8e12, nvlink=450e9, pcie=64e9,
        source="NVIDIA H200 data sheet, SXM",
    ),
    Gpu(
        name="B200", memory=178.3, half=2250e12, tf32=1100e12, float32=75e12, bandwidth=7.7e12, nvlink=900e9, pcie=64e9,
        source="NVIDIA HGX B200 data sheet",
    ),
    Gpu(
        name="L40S", memory=44.4, half=362e12, tf32=183e12, float32=91.6e12, bandwidth=0.864e12, nvlink=0, pcie=32e9,
        source="NVIDIA L40S data sheet",
    ),
    Gpu(
        name="L4", memory=22.0, half=121e12, tf32=60e12, float32=30.3e12, bandwidth=0.3e12, nvlink=0, pcie=32e9,
        source="NVIDIA L4 data sheet",
    ),
    Gpu(
        name="A10G", memory=22.0, half=70e12, tf32=35e12, float32=31.5e12, bandwidth=0.6e12, nvlink=0, pcie=32e9,
        source="NVIDIA A10G data sheet",
    ),
    Gpu(
        name="RTX 4090", memory=23.5, half=165e12, tf32=82.6e12, float32=82.6e12, bandwidth=1.008e12, nvlink=0, pcie=32e9,
        source="NVIDIA Ada architecture paper, appendix A",
    ),
    Gpu(
        name="RTX 3090", memory=23.5, half=71e12, tf32=35.6e12, float32=35.6e12, bandwidth=0.936e12, nvlink=0, pcie=32e9,
        source="NVIDIA GA102 architecture paper, appendix A",
    ),
)  # fmt: skip
"""The more particular name first: an H100 PCIe is no H100 (SXM). Bridges between two or four PCIe cards are left out."""


_SIZES = {"40gb", "80gb"}


def find_gpu(name: str, *, memory: int | None = None) -> Gpu | None:
    """The GPU that people (`h100`, `a100-40gb`) or CUDA (`NVIDIA A100-SXM4-40GB`) call so; None where it is not known.

    memory: bytes, which decides where the name does not (A100); the larger where that is not known either.
    """
    spoken = set(re.findall(r"[a-z]+\d+[a-z]*|\d+gb|\d+|[a-z]+", name.lower().replace("rtx", "rtx ")))
    named = {gpu: _words(gpu.name) - _SIZES for gpu in GPUS}
    found = [gpu for gpu in GPUS if named[gpu] <= spoken | {"rtx"}]
    if not found:
        return None
    found = [gpu for gpu in found if len(named[gpu]) == max(len(named[one]) for one in found)]
    if memory is not None:
        return min(found, key=lambda gpu: abs(gpu.memory * 2**30 - memory))
    sized = [gpu for gpu in found if _words(gpu.name) & spoken & _SIZES]
    return max(sized or found, key=lambda gpu: gpu.memory)


def _words(name: str) -> set[str]:
    return set(name.lower().split())


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 products a second of a GPU by the name CUDA gives it; None where it is not known, as on the CPU."""
    gpu = find_gpu(device_name)
    return None if gpu is None else gpu.half
