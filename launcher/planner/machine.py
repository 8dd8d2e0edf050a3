"""Machines to plan for: devices, their memory, and the rates that training achieves.

The rates rank configurations; they do not promise a speed. `launcher doctor out=FILE` measures
the rates of a real machine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.distributed.hardware import GPUS, Gpu, find_gpu
from launcher.errors import RecipeError
from launcher.reliability.json_files import Json

# Shares of the data sheet's rates that training achieves
PRODUCTS = {"A100": 0.78, "B200": 0.65}
"""Matrix products. A100: 90 % of the best shape's 86 % (Bekman, Machine Learning Engineering).
B200: 64 to 69 % in a 7B model (arXiv 2604.23466)."""
OTHER_PRODUCTS = 0.70
"""H100 and H200: 720 of 989 TFLOPS (SemiAnalysis, MI300X vs H100 vs H200). Others: assumed."""
MEMORY = 0.88
"""Memory bandwidth; a copy reaches 90 %."""
NVLINK = 0.78
"""Large all-gathers in nccl-tests: 235 of 300 GB/s (A100), 360 of 450 GB/s (H100)."""
PCIE = 0.75
"""Copies from pinned memory in one direction. An estimate."""
PCIE_COLLECTIVE = 0.4
"""Collectives, which cross the host's root complex both ways. An estimate."""
INTER_NODE = 0.8
"""The network adapters of a node. An estimate."""

NETWORK = 50e9
"""Bytes a second of each GPU's network adapter, on nodes with NVLink, as in NVIDIA's DGX H100."""
SHARED_NETWORK = 12.5e9
"""Bytes a second of the network adapter that all GPUs share, on nodes without NVLink. Assumed."""
HOST_MEMORY = 300e9
"""Bytes a second of a node's host memory: half of 16 channels of DDR5-4800."""
DISK = 3e9
"""Bytes a second that a node's NVMe drive reads and writes together. Assumed."""
ADAMW_BYTES = 28
"""Bytes that AdamW moves for a parameter: four float32 numbers are read, three written."""
CPU_CORES, CPU_FLOPS, CPU_NETWORK, CPU_MEMORY = 32, 1e12, 10e9, 100e9
"""A server with so many cores: operations, bytes between ranks, bytes of memory a second.
Assumed."""
_UNUSUAL = ("A800", "H800", "H20", "MI", "V100", "T4")
"""GPUs that are not assumed where only the size of the memory is known (H200 is)."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that a rank achieves, per second."""

    half_flops: float
    """Operations of matrix products in bfloat16 or float16."""
    float32_flops: float
    """Operations of matrix products in float32 (TF32 where run.float32_matmul allows it)."""
    memory_bandwidth: float
    """Bytes read and written in the device's memory."""
    intra_node_bandwidth: float
    """Bytes that a rank sends and receives in a collective within a node."""
    inter_node_bandwidth: float
    """Bytes that a rank sends and receives in a collective across nodes."""
    host_bandwidth: float
    """Bytes copied between host and device in one direction, while all ranks of a node copy."""
    host_adamw: float
    """Parameters that fused AdamW updates on a rank's share of the host's cores."""
    source: str
    """Where the figures come from."""


RATES = tuple(field.name for field in dataclasses.fields(Rates))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes with equal devices. Sizes that are None are not known."""

    name: str
    """Name of the device, such as H100 or CPU."""
    device: Literal["cuda", "cpu"]
    nodes: int
    gpus_per_node: int
    """Ranks per node."""
    memory: int | None
    """Bytes of one device."""
    host_memory: int | None
    """Bytes of one node's host memory."""
    rates: Rates

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.gpus_per_node


def known_machine(
    gpu: str | None,
    *,
    nodes: int,
    gpus_per_node: int,
    memory: int | None = None,
    host_memory: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    cores: int | None = None,
    others: str = ", cpu, or gpu_memory=80GiB",
) -> Machine:
    """A machine with a GPU of the table, or with `cpu`.

    `gpu` is a name as users or CUDA call it (`h100`, `NVIDIA A100-SXM4-80GB`); a GPU that is not in
    the table gets the rates of the GPU with the nearest memory size. `overrides` are rates that
    replace those of the table, `cores` is the number of cores of a node without GPUs, and `others`
    is what a message names besides the GPUs of the table. Raises RecipeError if neither the GPU nor
    `memory` is known.
    """
    device: Literal["cuda", "cpu"] = "cuda"
    if gpu is not None and gpu.strip().lower() == "cpu":
        name, device, rates = "CPU", "cpu", _cpu_rates(gpus_per_node, cores)
    else:
        listed = find_gpu(gpu, memory=memory) if gpu is not None else None
        if listed is None and memory is None:
            known = ", ".join(listed.name.lower().replace(" ", "-") for listed in GPUS)
            problem = "no GPU given" if gpu is None else f"gpu={gpu}: is not known"
            raise RecipeError(f"command line: {problem}; give one of {known}{others}")
        name = gpu or f"GPU of {(memory or 0) / 2**30:.0f} GiB"
        if listed is not None:
            name, memory = listed.name, memory or listed.memory
        listed = listed or _nearest(memory or 0)
        rates = _gpu_rates(listed, nodes=nodes, gpus_per_node=gpus_per_node)
    return Machine(
        name=name,
        device=device,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        memory=memory,
        host_memory=host_memory,
        rates=dataclasses.replace(rates, **(overrides or {})),
    )


def _nearest(memory: int) -> Gpu:
    usual = [gpu for gpu in GPUS if not gpu.name.startswith(_UNUSUAL) or "H200" in gpu.name]
    return min(usual, key=lambda gpu: (abs(gpu.memory - memory), -gpu.nvlink_gb_s))


def _gpu_rates(gpu: Gpu, *, nodes: int, gpus_per_node: int) -> Rates:
    shares = (share for prefix, share in PRODUCTS.items() if gpu.name.startswith(prefix))
    share = next(shares, OTHER_PRODUCTS)
    if gpu.nvlink_gb_s:
        link_share, links = NVLINK, gpu.nvlink_gb_s * 1e9
        network, each = NETWORK * gpus_per_node, "50 GB/s a GPU"
    else:
        link_share, links = PCIE_COLLECTIVE, gpu.pcie_gb_s * 1e9
        network, each = SHARED_NETWORK, "12.5 GB/s a node"
    return Rates(
        half_flops=share * gpu.half_tflops * 1e12,
        float32_flops=share * gpu.tf32_tflops * 1e12,
        memory_bandwidth=MEMORY * gpu.memory_tb_s * 1e12,
        intra_node_bandwidth=link_share * links,
        inter_node_bandwidth=min(link_share * links, INTER_NODE * network),
        host_bandwidth=min(PCIE * gpu.pcie_gb_s * 1e9, HOST_MEMORY / gpus_per_node),
        host_adamw=HOST_MEMORY / ADAMW_BYTES / gpus_per_node,
        source=f"{gpu.name} data sheet: {share:.0%} of its products, {MEMORY:.0%} of its memory "
        f"bandwidth, {link_share:.0%} of its links"
        + (f"; network assumed: {each}" if nodes > 1 else ""),
    )


def _cpu_rates(ranks_per_node: int, cores: int | None) -> Rates:
    """cores: of a node; None: CPU_CORES."""
    share = (cores or CPU_CORES) / CPU_CORES / ranks_per_node
    flops, memory, network = share * CPU_FLOPS, share * CPU_MEMORY, share * CPU_NETWORK
    what = f"{CPU_CORES} cores" if cores is None else f"{cores} of {CPU_CORES} cores"
    return Rates(
        half_flops=flops,
        float32_flops=flops,
        memory_bandwidth=memory,
        intra_node_bandwidth=network,
        inter_node_bandwidth=network / 10,
        host_bandwidth=memory,
        host_adamw=memory / ADAMW_BYTES,
        source=f"a server with {what}, assumed",
    )


def read_rates(file: Path) -> Json:
    """Rates that `launcher doctor out=FILE` measured: fields of `Rates`, without those that are
    null. Raises RecipeError if the file cannot be read or holds something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content = content.get("rates", content)
        given = {name: content[name] for name in RATES if content.get(name) is not None}
        if not given or not all(size > 0 for name, size in given.items() if name != "source"):
            raise ValueError(f"it must have numbers above 0 for some of {', '.join(RATES)}")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        hint = "`launcher doctor out=FILE` writes such a file"
        problem = f"command line: rates={file}: cannot be read: {error}; {hint}"
        raise RecipeError(problem) from None
    return {"source": str(file)} | given
