"""Peak rates of GPUs, a table of data-sheet figures, and what a CPU can. Does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_CPU = Path("/proc/cpuinfo")
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of CPUs with instructions for bfloat16, of x86 and Arm."""


def computes_in_bfloat16() -> bool:
    """Whether this machine's CPU has instructions for bfloat16; true if it does not say."""
    try:
        text = _CPU.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    flags = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return not flags or not _BFLOAT16.isdisjoint(flags[0].split())


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet. Rates are dense: half of the figure with sparsity."""

    name: str
    gib: float
    """GiB that CUDA reports, rounded down."""
    half_tflops: float
    """Matrix products in bfloat16 with float32 sums; in float16 without bfloat16 (T4, V100)."""
    tf32_tflops: float
    """Matrix products in TF32; in float32 if the GPU has no TF32."""
    memory_tb_s: float
    nvlink_gb_s: float
    """Bandwidth to all other GPUs of a node together, per direction (data sheets give the sum of
    both directions); 0: PCIe only."""
    pcie_gb_s: float
    """Bandwidth to the host, per direction: 16 with PCIe 3 x16, 32 with PCIe 4, 64 with PCIe 5;
    more with NVLink-C2C."""
    float8: bool = True
    """Whether it multiplies matrices in float8: Nvidia's from compute capability 8.9, AMD's from
    the MI300."""
    flash: bool = True
    """Whether FlashAttention has kernels for it: Nvidia's from compute capability 8.0."""

    @property
    def memory(self) -> int:
        """Bytes that CUDA reports."""
        return int(self.gib * 2**30)


# An H100 without suffix is the SXM version. NVLink bridges are not counted.
# name, GiB, TFLOPS in half precision and TF32, memory TB/s, NVLink and PCIe GB/s per direction
GPUS = (
    Gpu("A100 40GB PCIe", 39.3, 312, 156, 1.555, 0, 32, float8=False),
    Gpu("A100 40GB", 39.3, 312, 156, 1.555, 300, 32, float8=False),
    Gpu("A100 80GB PCIe", 79.1, 312, 156, 1.935, 0, 32, float8=False),
    Gpu("A100 80GB", 79.1, 312, 156, 2.039, 300, 32, float8=False),
    Gpu("H100 PCIe", 79.1, 756, 378, 2, 0, 64),
    Gpu("H100 NVL", 93.1, 835, 417, 3.9, 0, 64),
    Gpu("H100", 79.1, 989, 494, 3.35, 450, 64),
    Gpu("H200 NVL", 139.7, 835, 417, 4.8, 450, 64),
    Gpu("H200", 139.7, 989, 494, 4.8, 450, 64),
    Gpu("B200", 178.3, 2250, 1100, 7.7, 900, 64),  # an eighth of the HGX B200's
    Gpu("L40S", 44.4, 362, 183, 0.864, 0, 32),
    Gpu("L4", 22, 121, 60, 0.3, 0, 32),
    Gpu("A10G", 22, 70, 35, 0.6, 0, 32, float8=False),
    Gpu("RTX 4090", 23.5, 165, 82.6, 1.008, 0, 32),  # architecture paper, appendix A
    Gpu("RTX 3090", 23.5, 71, 35.6, 0.936, 0, 32, float8=False),  # architecture paper, appendix A
    Gpu("A800 40GB", 39.3, 312, 156, 1.555, 0, 32, float8=False),
    Gpu("A800 80GB PCIe", 79.1, 312, 156, 1.935, 0, 32, float8=False),
    Gpu(
        "A800 80GB", 79.1, 312, 156, 2.039, 200, 32, float8=False
    ),  # an A100 with 400 GB/s of NVLink
    Gpu("H800 PCIe", 79.1, 756, 378, 2, 0, 64),
    Gpu("H800", 79.1, 989, 494, 3.35, 200, 64),  # an H100 with 400 GB/s of NVLink
    Gpu("H20", 95, 148, 74, 4, 450, 64),  # as server vendors publish it
    Gpu("GH200 480GB", 94.5, 989, 494, 4, 450, 450),  # 96 GB HBM3 (480 GB are the CPU's)
    Gpu("GH200 144G", 139, 989, 494, 4.9, 450, 450),  # 144 GB HBM3e
    Gpu("GB200", 183, 2500, 1250, 8, 900, 225),  # two GPUs share NVLink-C2C
    Gpu("B300", 267, 2250, 1125, 8, 900, 64),  # an eighth of the HGX B300's
    Gpu("V100 32GB PCIe", 31.7, 112, 14, 0.9, 0, 16, float8=False, flash=False),
    Gpu("V100 16GB PCIe", 15.7, 112, 14, 0.9, 0, 16, float8=False, flash=False),
    Gpu("V100 32GB", 31.7, 125, 15.7, 0.9, 150, 16, float8=False, flash=False),
    Gpu("V100 16GB", 15.7, 125, 15.7, 0.9, 150, 16, float8=False, flash=False),
    Gpu("T4", 14.5, 65, 8.1, 0.3, 0, 16, float8=False, flash=False),
    Gpu("A10", 22, 125, 62.5, 0.6, 0, 32, float8=False),
    Gpu("A30", 23.5, 165, 82, 0.933, 0, 32, float8=False),
    Gpu("A40", 44.3, 149.7, 74.8, 0.696, 0, 32, float8=False),
    Gpu(
        "A6000", 47.4, 154.8, 77.4, 0.768, 0, 32, float8=False
    ),  # with the GA102 architecture paper
    Gpu("L40", 44.3, 181, 90.5, 0.864, 0, 32),
    Gpu("RTX 5090", 31.3, 209.5, 104.8, 1.792, 0, 64),  # architecture paper, appendix A
    Gpu("RTX PRO 6000 Server", 94.9, 480, 240, 1.597, 0, 64),  # tensor cores: 4 x float32
    Gpu("RTX PRO 6000", 94.9, 500, 250, 1.792, 0, 64),  # tensor cores: 4 x float32
    Gpu("MI250X", 63.9, 191.5, 23.9, 1.6, 200, 32, float8=False),  # one of its two dies
    Gpu("MI300X", 191.6, 1307.4, 653.7, 5.3, 448, 64),
    Gpu("MI325X", 255.6, 1307.4, 653.7, 6, 448, 64),
    Gpu("MI355X", 287.6, 2516.6, 157.3, 8, 537, 64),  # TF32 is emulated
)

_SIZES = {"16gb", "32gb", "40gb", "80gb", "480gb", "144g"}
_OTHER_PARTS = re.compile(r"\d{4} ?d\b|\b(laptop|mobile|max-q|mig|\d+g\.\d+gb|[al]\d+-\d+[abcq])\b")
"""Slower variants and slices: laptops, `RTX 4090 D`, Max-Q, MIG, virtual GPUs (`A40-8Q`)."""


def find_gpu(name: str, *, memory: int | None = None) -> Gpu | None:
    """The GPU that users (`a100-40gb`) or CUDA (`NVIDIA A100-SXM4-40GB`) call by this name; None if
    it is not in the table. Of several variants (A100), the one with these bytes of memory is
    returned, or the largest."""
    if _OTHER_PARTS.search(name.lower()):
        return None
    spaced = name.lower().replace("rtx", "rtx ")
    given = set(re.findall(r"[a-z]+\d+[a-z]*|\d+gb|\d+g|\d+|[a-z]+", spaced))
    words = {gpu: set(gpu.name.lower().split()) for gpu in GPUS}
    matching = [gpu for gpu in GPUS if words[gpu] - _SIZES <= given | {"rtx"}]
    longest = max((len(words[gpu] - _SIZES) for gpu in matching), default=0)
    variants = [gpu for gpu in matching if len(words[gpu] - _SIZES) == longest]
    if memory is not None:
        return min(variants, key=lambda gpu: abs(gpu.memory - memory), default=None)
    sized = [gpu for gpu in variants if words[gpu] & given & _SIZES]
    return max(sized or variants, key=lambda gpu: gpu.memory, default=None)


def peak_flops(device_name: str) -> float | None:
    """Peak dense bfloat16 FLOPS of a GPU, by its CUDA name; None if the GPU is not known."""
    gpu = find_gpu(device_name)
    return None if gpu is None else gpu.half_tflops * 1e12
