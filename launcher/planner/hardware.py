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
    """Products a second in bfloat16, summed in float32; in float16 where the GPU has no bfloat16 (T4, V100)."""
    tf32: float
    """The same as float32 where the GPU has no TF32."""
    float32: float
    bandwidth: float
    """Of its memory."""
    nvlink: float
    """One way, to all other GPUs of the node at once (half of what the sheet calls the total); 0: only over PCIe."""
    pcie: float
    """One way to the host. PCIe of 16 lanes: generation 3 has 16e9, 4 has 32e9, 5 has 64e9. NVLink-C2C (GH200, GB200) has more."""
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
    Gpu(
        name="A800 40GB", memory=39.3, half=312e12, tf32=156e12, float32=19.5e12, bandwidth=1.555e12, nvlink=0, pcie=32e9,
        source="NVIDIA A800 40GB Active data sheet",
    ),
    Gpu(
        name="A800 80GB PCIe", memory=79.1, half=312e12, tf32=156e12, float32=19.5e12, bandwidth=1.935e12, nvlink=0, pcie=32e9,
        source="NVIDIA A800 data sheet, PCIe",
    ),
    Gpu(
        name="A800 80GB", memory=79.1, half=312e12, tf32=156e12, float32=19.5e12, bandwidth=2.039e12, nvlink=200e9, pcie=32e9,
        source="NVIDIA A800 data sheet, SXM: an A100 with 400 GB/s of NVLink",
    ),
    Gpu(
        name="H800 PCIe", memory=79.1, half=756e12, tf32=378e12, float32=51e12, bandwidth=2.0e12, nvlink=0, pcie=64e9,
        source="NVIDIA H800 data sheet, PCIe",
    ),
    Gpu(
        name="H800", memory=79.1, half=989e12, tf32=494e12, float32=67e12, bandwidth=3.35e12, nvlink=200e9, pcie=64e9,
        source="NVIDIA H800 data sheet, SXM: an H100 with 400 GB/s of NVLink",
    ),
    Gpu(
        name="H20", memory=95.0, half=148e12, tf32=74e12, float32=44e12, bandwidth=4.0e12, nvlink=450e9, pcie=64e9,
        source="NVIDIA H20 specification as published by server vendors; NVIDIA has no public data sheet",
    ),
    Gpu(
        name="GH200 480GB", memory=94.5, half=989e12, tf32=494e12, float32=67e12, bandwidth=4.0e12, nvlink=450e9, pcie=450e9,
        source="NVIDIA GH200 data sheet, 96 GB HBM3 (480GB are the CPU's)",
    ),
    Gpu(
        name="GH200 144G", memory=139.0, half=989e12, tf32=494e12, float32=67e12, bandwidth=4.9e12, nvlink=450e9, pcie=450e9,
        source="NVIDIA GH200 data sheet, 144 GB HBM3e",
    ),
    Gpu(
        name="GB200", memory=183.0, half=2500e12, tf32=1250e12, float32=80e12, bandwidth=8.0e12, nvlink=900e9, pcie=225e9,
        source="NVIDIA GB200 NVL72 data sheet, a 72nd; NVLink-C2C shared by two GPUs",
    ),
    Gpu(
        name="B300", memory=267.0, half=2250e12, tf32=1125e12, float32=75e12, bandwidth=8.0e12, nvlink=900e9, pcie=64e9,
        source="NVIDIA HGX B300 specification, an eighth",
    ),
    Gpu(
        name="V100 32GB PCIe", memory=31.7, half=112e12, tf32=14e12, float32=14e12, bandwidth=0.9e12, nvlink=0, pcie=16e9,
        source="NVIDIA V100 data sheet, PCIe",
    ),
    Gpu(
        name="V100 16GB PCIe", memory=15.7, half=112e12, tf32=14e12, float32=14e12, bandwidth=0.9e12, nvlink=0, pcie=16e9,
        source="NVIDIA V100 data sheet, PCIe",
    ),
    Gpu(
        name="V100 32GB", memory=31.7, half=125e12, tf32=15.7e12, float32=15.7e12, bandwidth=0.9e12, nvlink=150e9, pcie=16e9,
        source="NVIDIA V100 data sheet, SXM2",
    ),
    Gpu(
        name="V100 16GB", memory=15.7, half=125e12, tf32=15.7e12, float32=15.7e12, bandwidth=0.9e12, nvlink=150e9, pcie=16e9,
        source="NVIDIA V100 data sheet, SXM2",
    ),
    Gpu(
        name="T4", memory=14.5, half=65e12, tf32=8.1e12, float32=8.1e12, bandwidth=0.3e12, nvlink=0, pcie=16e9,
        source="NVIDIA T4 data sheet",
    ),
    Gpu(
        name="A10", memory=22.0, half=125e12, tf32=62.5e12, float32=31.2e12, bandwidth=0.6e12, nvlink=0, pcie=32e9,
        source="NVIDIA A10 data sheet",
    ),
    Gpu(
        name="A30", memory=23.5, half=165e12, tf32=82e12, float32=10.3e12, bandwidth=0.933e12, nvlink=0, pcie=32e9,
        source="NVIDIA A30 data sheet",
    ),
    Gpu(
        name="A40", memory=44.3, half=149.7e12, tf32=74.8e12, float32=37.4e12, bandwidth=0.696e12, nvlink=0, pcie=32e9,
        source="NVIDIA A40 data sheet",
    ),
    Gpu(
        name="A6000", memory=47.4, half=154.8e12, tf32=77.4e12, float32=38.7e12, bandwidth=0.768e12, nvlink=0, pcie=32e9,
        source="NVIDIA RTX A6000 data sheet; GA102 architecture paper",
    ),
    Gpu(
        name="L40", memory=44.3, half=181e12, tf32=90.5e12, float32=90.5e12, bandwidth=0.864e12, nvlink=0, pcie=32e9,
        source="NVIDIA L40 data sheet",
    ),
    Gpu(
        name="RTX 5090", memory=31.3, half=209.5e12, tf32=104.8e12, float32=104.8e12, bandwidth=1.792e12, nvlink=0, pcie=64e9,
        source="NVIDIA RTX Blackwell architecture paper, appendix A",
    ),
    Gpu(
        name="RTX PRO 6000 Server", memory=94.9, half=480e12, tf32=240e12, float32=120e12, bandwidth=1.597e12, nvlink=0, pcie=64e9,
        source="NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet; tensor cores 4 x float32",
    ),
    Gpu(
        name="RTX PRO 6000", memory=94.9, half=500e12, tf32=250e12, float32=125e12, bandwidth=1.792e12, nvlink=0, pcie=64e9,
        source="NVIDIA RTX PRO 6000 Blackwell Workstation Edition data sheet; tensor cores 4 x float32",
    ),
    Gpu(
        name="MI250X", memory=63.9, half=191.5e12, tf32=23.9e12, float32=23.9e12, bandwidth=1.6e12, nvlink=200e9, pcie=32e9,
        source="AMD Instinct MI250X data sheet, half of it: each of its two dies is a device",
    ),
    Gpu(
        name="MI300X", memory=191.6, half=1307.4e12, tf32=653.7e12, float32=163.4e12, bandwidth=5.3e12, nvlink=448e9, pcie=64e9,
        source="AMD Instinct MI300X data sheet",
    ),
    Gpu(
        name="MI325X", memory=255.6, half=1307.4e12, tf32=653.7e12, float32=163.4e12, bandwidth=6.0e12, nvlink=448e9, pcie=64e9,
        source="AMD Instinct MI325X data sheet",
    ),
    Gpu(
        name="MI355X", memory=287.6, half=2516.6e12, tf32=157.3e12, float32=157.3e12, bandwidth=8.0e12, nvlink=537e9, pcie=64e9,
        source="AMD Instinct MI355X data sheet; TF32 is emulated",
    ),
)  # fmt: skip
"""The more particular name first: an H100 PCIe is no H100 (SXM). Bridges between two or four PCIe cards are left out."""


_SIZES = {"16gb", "32gb", "40gb", "80gb", "480gb", "144g"}
_OTHER_PARTS = re.compile(r"\d{4} ?d\b|\b(laptop|mobile|max-q|mig|\d+g\.\d+gb|[al]\d+-\d+[abcq])\b")
"""In the names of slower parts and of parts of a GPU: laptops' (`RTX 4090 Laptop GPU`), those for China (`RTX 4090 D`), less power (Max-Q),
slices (`MIG 1g.10gb`) and shares of virtual machines (`A40-8Q`). They must not get the figures of the part they are named after."""


def find_gpu(name: str, *, memory: int | None = None) -> Gpu | None:
    """The GPU that people (`h100`, `a100-40gb`) or CUDA (`NVIDIA A100-SXM4-40GB`) call so; None where it is not known.

    memory: bytes, which decides where the name does not (A100); the larger where that is not known either.
    """
    if _OTHER_PARTS.search(name.lower()):
        return None
    spoken = set(re.findall(r"[a-z]+\d+[a-z]*|\d+gb|\d+g|\d+|[a-z]+", name.lower().replace("rtx", "rtx ")))
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
