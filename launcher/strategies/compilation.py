"""Whether blocks can be compiled, and where their graphs were split (`model.compile`)."""

from __future__ import annotations

import torch

from launcher.distributed.triton_support import missing_for_triton
from launcher.libraries.private import (
    compile_counters,
    draw_each_number_alone,
    raise_recompile_limit,
)

RECOMPILE_LIMIT = 64
"""Variants of a function that are compiled; further ones run eager. All blocks share a function, so
kinds of layers x training or evaluation x packed rows or not x fixed or variable sizes may occur.
torch's own limit is 8."""


def prepare_compile(device: torch.device) -> None:
    """Sets up `torch.compile` in this process: the limit of variants, if it is not higher, and on a
    GPU the random numbers of kernels."""
    raise_recompile_limit(RECOMPILE_LIMIT)
    if device.type == "cuda":
        draw_each_number_alone()


def why_eager(device: torch.device | str, *, check_triton: bool = False) -> str | None:
    """Why `model.compile: auto` is off on this kind of device; None: it is on. `check_triton` also checks
    that this machine has what Triton needs to compile for its GPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return "the ranks compute on CPUs, where it takes minutes and needs g++"
    return missing_for_triton(device) if check_triton else None


def graph_breaks() -> list[str]:
    """The reasons of all graph breaks that dynamo has recorded so far, each once."""
    return _reasons("graph_break")


def eager_functions() -> list[str]:
    """The reasons why dynamo has not compiled functions so far, each once. One possible reason is
    that `RECOMPILE_LIMIT` was exceeded."""
    return _reasons("unimplemented")


def _reasons(category: str) -> list[str]:
    texts = [
        [line.strip() for line in reason.splitlines()] for reason in compile_counters()[category]
    ]
    return list(dict.fromkeys(". ".join(lines[:2]) for lines in texts))


def graphs() -> tuple[int, int]:
    """The number of graphs that were compiled so far, and how many came from the cache."""
    counters = compile_counters()
    cached = counters["aot_autograd"]["autograd_cache_hit"]
    return counters["stats"]["unique_graphs"], cached
