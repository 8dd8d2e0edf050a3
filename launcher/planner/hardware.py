"""What GPUs can do at best: one table of data-sheet figures. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet. Rates are dense: half of the figure with sparsity."""

    name: str
    gib: float
    """GiB that CUDA reports, rounded down: less than the name says, 7 % less with GDDR6 and ECC."""
    half_tflops: float
    """Matrix products in bfloat16 with float32 sums; in float16 without bfloat16 (T4, V100)."""
    tf32_tflops: float
    """As float32 where the GPU has no TF32."""
    float32_tflops: float
    memory_tb_s: float
    nvlink_gb_s: float
    """One way, to all other GPUs of a node together: half of the sheet's figure; 0: PCIe only."""
    pcie_gb_s: float
    """One way to the host; 16 lanes of PCIe 3 have 16, of 4 32, of 5 64; NVLink-C2C has more."""
    source: str

    @property
    def memory(self) -> int:
        """Bytes."""
        return int(self.gib * 2**30)


# name, GiB, TFLOPS in half precision, TF32 and float32, memory TB/s, NVLink and PCIe GB/s one way
GPUS = (
    Gpu("A100 40GB PCIe", 39.3, 312, 156, 19.5, 1.555, 0, 32, "NVIDIA A100 data sheet"),
    Gpu("A100 40GB", 39.3, 312, 156, 19.5, 1.555, 300, 32, "NVIDIA A100 data sheet, SXM"),
    Gpu("A100 80GB PCIe", 79.1, 312, 156, 19.5, 1.935, 0, 32, "NVIDIA A100 80GB data sheet, PCIe"),
    Gpu("A100 80GB", 79.1, 312, 156, 19.5, 2.039, 300, 32, "NVIDIA A100 80GB data sheet, SXM"),
    Gpu("H100 PCIe", 79.1, 756, 378, 51, 2, 0, 64, "NVIDIA H100 data sheet, PCIe"),
    Gpu("H100 NVL", 93.1, 835, 417, 60, 3.9, 0, 64, "NVIDIA H100 data sheet, NVL"),
    Gpu("H100", 79.1, 989, 494, 67, 3.35, 450, 64, "NVIDIA H100 data sheet, SXM"),
    Gpu("H200 NVL", 139.7, 835, 417, 60, 4.8, 450, 64, "NVIDIA H200 data sheet, NVL"),
    Gpu("H200", 139.7, 989, 494, 67, 4.8, 450, 64, "NVIDIA H200 data sheet, SXM"),
    Gpu("B200", 178.3, 2250, 1100, 75, 7.7, 900, 64, "NVIDIA HGX B200 data sheet"),
    Gpu("L40S", 44.4, 362, 183, 91.6, 0.864, 0, 32, "NVIDIA L40S data sheet"),
    Gpu("L4", 22, 121, 60, 30.3, 0.3, 0, 32, "NVIDIA L4 data sheet"),
    Gpu("A10G", 22, 70, 35, 31.5, 0.6, 0, 32, "NVIDIA A10G data sheet"),
    Gpu("RTX 4090", 23.5, 165, 82.6, 82.6, 1.008, 0, 32,
        "NVIDIA Ada architecture paper, appendix A"),
    Gpu("RTX 3090", 23.5, 71, 35.6, 35.6, 0.936, 0, 32,
        "NVIDIA GA102 architecture paper, appendix A"),
    Gpu("A800 40GB", 39.3, 312, 156, 19.5, 1.555, 0, 32, "NVIDIA A800 40GB Active data sheet"),
    Gpu("A800 80GB PCIe", 79.1, 312, 156, 19.5, 1.935, 0, 32, "NVIDIA A800 data sheet, PCIe"),
    Gpu("A800 80GB", 79.1, 312, 156, 19.5, 2.039, 200, 32,
        "NVIDIA A800 data sheet, SXM: an A100 with 400 GB/s of NVLink"),
    Gpu("H800 PCIe", 79.1, 756, 378, 51, 2, 0, 64, "NVIDIA H800 data sheet, PCIe"),
    Gpu("H800", 79.1, 989, 494, 67, 3.35, 200, 64,
        "NVIDIA H800 data sheet, SXM: an H100 with 400 GB/s of NVLink"),
    Gpu("H20", 95, 148, 74, 44, 4, 450, 64,
        "NVIDIA H20 specification as published by server vendors; NVIDIA has no public data sheet"),
    Gpu("GH200 480GB", 94.5, 989, 494, 67, 4, 450, 450,
        "NVIDIA GH200 data sheet, 96 GB HBM3 (480GB are the CPU's)"),
    Gpu("GH200 144G", 139, 989, 494, 67, 4.9, 450, 450, "NVIDIA GH200 data sheet, 144 GB HBM3e"),
    Gpu("GB200", 183, 2500, 1250, 80, 8, 900, 225,
        "NVIDIA GB200 NVL72 data sheet, a 72nd; NVLink-C2C shared by two GPUs"),
    Gpu("B300", 267, 2250, 1125, 75, 8, 900, 64, "NVIDIA HGX B300 specification, an eighth"),
    Gpu("V100 32GB PCIe", 31.7, 112, 14, 14, 0.9, 0, 16, "NVIDIA V100 data sheet, PCIe"),
    Gpu("V100 16GB PCIe", 15.7, 112, 14, 14, 0.9, 0, 16, "NVIDIA V100 data sheet, PCIe"),
    Gpu("V100 32GB", 31.7, 125, 15.7, 15.7, 0.9, 150, 16, "NVIDIA V100 data sheet, SXM2"),
    Gpu("V100 16GB", 15.7, 125, 15.7, 15.7, 0.9, 150, 16, "NVIDIA V100 data sheet, SXM2"),
    Gpu("T4", 14.5, 65, 8.1, 8.1, 0.3, 0, 16, "NVIDIA T4 data sheet"),
    Gpu("A10", 22, 125, 62.5, 31.2, 0.6, 0, 32, "NVIDIA A10 data sheet"),
    Gpu("A30", 23.5, 165, 82, 10.3, 0.933, 0, 32, "NVIDIA A30 data sheet"),
    Gpu("A40", 44.3, 149.7, 74.8, 37.4, 0.696, 0, 32, "NVIDIA A40 data sheet"),
    Gpu("A6000", 47.4, 154.8, 77.4, 38.7, 0.768, 0, 32,
        "NVIDIA RTX A6000 data sheet; GA102 architecture paper"),
    Gpu("L40", 44.3, 181, 90.5, 90.5, 0.864, 0, 32, "NVIDIA L40 data sheet"),
    Gpu("RTX 5090", 31.3, 209.5, 104.8, 104.8, 1.792, 0, 64,
        "NVIDIA RTX Blackwell architecture paper, appendix A"),
    Gpu("RTX PRO 6000 Server", 94.9, 480, 240, 120, 1.597, 0, 64,
        "NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet; tensor cores 4 x float32"),
    Gpu("RTX PRO 6000", 94.9, 500, 250, 125, 1.792, 0, 64,
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition data sheet; tensor cores 4 x float32"),
    Gpu("MI250X", 63.9, 191.5, 23.9, 23.9, 1.6, 200, 32,
        "AMD Instinct MI250X data sheet, half of it: each of its two dies is a device"),
    Gpu("MI300X", 191.6, 1307.4, 653.7, 163.4, 5.3, 448, 64, "AMD Instinct MI300X data sheet"),
    Gpu("MI325X", 255.6, 1307.4, 653.7, 163.4, 6, 448, 64, "AMD Instinct MI325X data sheet"),
    Gpu("MI355X", 287.6, 2516.6, 157.3, 157.3, 8, 537, 64,
        "AMD Instinct MI355X data sheet; TF32 is emulated"),
)  # fmt: skip
"""The more particular name first: an H100 PCIe is not an H100 (SXM). NVLink bridges between two or
four PCIe cards are left out."""


_SIZES = {"16gb", "32gb", "40gb", "80gb", "480gb", "144g"}
_OTHER_PARTS = re.compile(r"\d{4} ?d\b|\b(laptop|mobile|max-q|mig|\d+g\.\d+gb|[al]\d+-\d+[abcq])\b")
"""Slower parts and slices of a GPU, which must not get its figures: laptops (`RTX 4090 Laptop`),
parts for China (`RTX 4090 D`), Max-Q, MIG slices and virtual GPUs (`A40-8Q`)."""


def find_gpu(name: str, *, memory: int | None = None) -> Gpu | None:
    """The GPU that users (`a100-40gb`) or CUDA (`NVIDIA A100-SXM4-40GB`) call by this name.

    memory: bytes, which decides between variants (A100); without it the larger is taken.
    Returns None if the GPU is not in the table.
    """
    if _OTHER_PARTS.search(name.lower()):
        return None
    spaced = name.lower().replace("rtx", "rtx ")
    spoken = set(re.findall(r"[a-z]+\d+[a-z]*|\d+gb|\d+g|\d+|[a-z]+", spaced))
    named = {gpu: _words(gpu.name) - _SIZES for gpu in GPUS}
    found = [gpu for gpu in GPUS if named[gpu] <= spoken | {"rtx"}]
    if not found:
        return None
    found = [gpu for gpu in found if len(named[gpu]) == max(len(named[one]) for one in found)]
    if memory is not None:
        return min(found, key=lambda gpu: abs(gpu.memory - memory))
    sized = [gpu for gpu in found if _words(gpu.name) & spoken & _SIZES]
    return max(sized or found, key=lambda gpu: gpu.memory)


def _words(name: str) -> set[str]:
    return set(name.lower().split())


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations a second of a GPU by its CUDA name; None if it is not known."""
    gpu = find_gpu(device_name)
    return None if gpu is None else gpu.half_tflops * 1e12
