"""Machines that are not here: what known GPUs really get, from their data sheets and shares of them that were measured.

A plan needs rates to rank strategies, not to promise a speed. `launcher doctor --json FILE` measures those of a machine that is at hand.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import RecipeError
from launcher.planner.hardware import GPUS, Gpu, find_gpu
from launcher.planner.machine import Machine, Rates

PRODUCTS = {"A100": 0.78, "B200": 0.65}
"""Share of peak products that matrices of a language model's shapes get, by the beginning of a GPU's name.

A100: 86 % at the best shape (Bekman, Machine Learning Engineering, table of maximum achievable matmul FLOPS), nine
tenths of it at others. B200: 64 to 69 % for the matrices of a 7B model (arXiv 2604.23466, cuBLAS).
"""
OTHER_PRODUCTS = 0.70
"""H100 and H200: 720 of 989 TFLOPS (SemiAnalysis, MI300X vs H100 vs H200, part 1), 80 % at the best shape (Bekman). Taken for
GPUs too that nobody published figures of."""
MEMORY = 0.88
"""Of the memory's bandwidth: a copy reaches nine tenths."""
NVLINK = 0.78
"""Of NVLink one way: nccl-tests' bus bandwidth of large all-gathers is about 235 of 300 GB/s (A100) and 360 of 450 GB/s (H100)."""
PCIE = 0.75
"""Of PCIe one way, from page-locked memory."""
PCIE_COLLECTIVE = 0.4
"""Of PCIe one way for collectives without NVLink: each byte goes out and comes in through the host's root complex."""
INTER_NODE = 0.8
"""Of the network cards. Rings of a collective over all ranks enter and leave a node over all of its cards together, so a rank
sends as much as they do, up to what its links inside the node carry."""
NETWORK = 50e9
"""Bytes a second of each GPU's own network card, where nodes are built for it (NVLink): 400 Gb/s InfiniBand, as in NVIDIA's DGX H100."""
SHARED_NETWORK = 12.5e9
"""Of all GPUs of a node together otherwise: 100 Gb/s."""
HOST_MEMORY = 300e9
"""Bytes a second of a node's host memory: half of what two sockets of eight channels DDR5-4800 have (614e9)."""
ADAMW_BYTES = 28
"""That AdamW reads and writes a parameter: weight, gradient, two moments in, weight and moments out, float32."""


_UNUSUAL = ("A800", "H800", "H20", "MI", "V100", "T4")
"""Names of GPUs that one of which only the memory is known is not taken for."""


def known_machine(
    gpu: str | None,
    *,
    nodes: int,
    gpus_per_node: int,
    memory: int | None = None,
    host_memory: int | None = None,
    overrides: Mapping[str, float | str] | None = None,
) -> Machine:
    """Nodes of a GPU that the table knows, or `cpu`.

    gpu: as people or CUDA call it (`h100`, `a100-40gb`, `NVIDIA A100-SXM4-80GB`); None: any of that `memory`, with the rates
    of the one in the table whose memory is nearest. memory, host_memory: bytes; None: the table's, and not known.
    overrides: of `Rates`, by field, such as `read_rates` gives them.
    Raises RecipeError where the GPU is not known, naming all that are, unless memory and all rates are given.
    """
    if gpu is not None and gpu.strip().lower() == "cpu":
        machine = cpu_machine(nodes=nodes, ranks_per_node=gpus_per_node, host_memory=host_memory)
        return dataclasses.replace(machine, memory=memory, rates=_overridden(machine.rates, overrides))
    found = find_gpu(gpu, memory=memory) if gpu is not None else None
    if found is None and (gpu is None or overrides) and memory is not None:
        usual = [known for known in GPUS if not known.name.startswith(_UNUSUAL) or known.name.startswith("H200")]
        found = min(usual, key=lambda known: (abs(known.memory * 2**30 - memory), -known.nvlink))
        name = gpu or f"GPU of {memory / 2**30:.0f} GiB"
    elif found is None:
        known = ", ".join(known.name.lower().replace(" ", "-") for known in GPUS)
        what = "no GPU given" if gpu is None else f"gpu={gpu}: is not known"
        raise RecipeError(f"command line: {what}; give one of {known}, cpu, or another with gpu_memory=80GiB rates=FILE (launcher doctor)")
    else:
        name = found.name
    rates = _overridden(_rates(found, nodes=nodes, gpus_per_node=gpus_per_node), overrides)
    return Machine(
        name=name,
        device="cuda",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        memory=memory if memory is not None else int(found.memory * 2**30),
        host_memory=host_memory,
        rates=rates,
    )


def _rates(gpu: Gpu, *, nodes: int, gpus_per_node: int) -> Rates:
    share = next((share for name, share in PRODUCTS.items() if gpu.name.startswith(name)), OTHER_PRODUCTS)
    network = NETWORK if gpu.nvlink else SHARED_NETWORK / gpus_per_node
    link_share = NVLINK if gpu.nvlink else PCIE_COLLECTIVE
    links = link_share * (gpu.nvlink or gpu.pcie)
    shares = f"{share:.0%} of its products, {MEMORY:.0%} of its memory's bandwidth, {link_share:.0%} of its links"
    each = f"{NETWORK / 1e9:.0f} GB/s a GPU" if gpu.nvlink else f"{SHARED_NETWORK / 1e9:g} GB/s a node"
    return Rates(
        half_flops=share * gpu.half,
        float32_flops=share * gpu.tf32,
        memory_bandwidth=MEMORY * gpu.bandwidth,
        intra_node_bandwidth=links,
        inter_node_bandwidth=min(links, INTER_NODE * network * gpus_per_node),
        host_bandwidth=min(PCIE * gpu.pcie, HOST_MEMORY / gpus_per_node),
        host_adamw=HOST_MEMORY / ADAMW_BYTES / gpus_per_node,
        source=f"{gpu.source}, {shares}" + (f"; network assumed: {each}" if nodes > 1 else ""),
    )


def cpu_machine(*, nodes: int, ranks_per_node: int, host_memory: int | None = None) -> Machine:
    """Nodes without GPUs: the tensors of all ranks are in host memory. Rates of a server of 32 cores, roughly: for a ranking, no more."""
    return Machine(
        name="CPU",
        device="cpu",
        nodes=nodes,
        gpus_per_node=ranks_per_node,
        memory=None,
        host_memory=host_memory,
        rates=Rates(
            half_flops=1e12 / ranks_per_node,
            float32_flops=1e12 / ranks_per_node,
            memory_bandwidth=100e9 / ranks_per_node,
            intra_node_bandwidth=10e9 / ranks_per_node,
            inter_node_bandwidth=1e9 / ranks_per_node,
            host_bandwidth=100e9 / ranks_per_node,
            host_adamw=100e9 / ADAMW_BYTES / ranks_per_node,
            source="a server of 32 cores, roughly",
        ),
    )


def _overridden(rates: Rates, overrides: Mapping[str, float | str] | None) -> Rates:
    if not overrides:
        return rates
    known = [field.name for field in dataclasses.fields(Rates)]
    wrong = [name for name in overrides if name not in known]
    if wrong:
        raise RecipeError(f"rates: {', '.join(wrong)} is no rate; there are {', '.join(known)}")
    given: dict[str, Any] = dict(overrides)
    if "source" not in given:
        given["source"] = f"{rates.source}; as given: {', '.join(given)}"
    return dataclasses.replace(rates, **given)


def read_rates(file: Path) -> dict[str, float | str]:
    """Rates from a file that `launcher doctor --json FILE` wrote: an object with the fields of `Rates`, or one that has it as
    `rates`. What could not be measured there (null) is left out, and stays the table's.

    Raises RecipeError where the file cannot be read or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"command line: rates={file}: {error.strerror or error}") from None
    except ValueError as error:
        raise RecipeError(f"command line: rates={file}: not JSON: {error}; `launcher doctor --json FILE` writes such a file") from None
    if isinstance(content, dict) and "rates" in content:
        content = content["rates"]
    known = [field.name for field in dataclasses.fields(Rates)]
    if not isinstance(content, dict) or not any(name in content for name in known):
        raise RecipeError(f"command line: rates={file}: holds no rates; `launcher doctor --json FILE` writes them: {', '.join(known)}")
    found: dict[str, float | str] = {}
    for name in known:
        value = content.get(name)
        if value is None:
            continue
        if name == "source":
            found[name] = str(value)
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise RecipeError(f"command line: rates={file}: {name} must be a number above 0; got {value!r}")
        else:
            found[name] = float(value)
    found.setdefault("source", str(file))
    return found
