"""Whether blocks can be compiled, and where their graphs were split (`model.compile`)."""

from __future__ import annotations

import torch

from launcher.distributed.triton_support import missing_for_triton


def why_eager(device: torch.device | str, *, here: bool = False) -> str | None:
    """Why `model.compile: auto` is off on this kind of device; None: it is on. `here` also checks
    that this machine has what Triton needs to compile for its GPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return "the ranks compute on CPUs, where it takes minutes and needs g++"
    return missing_for_triton(device) if here else None


def graph_breaks() -> list[str]:
    """The reasons of all graph breaks that dynamo has recorded so far, each once."""
    from torch._dynamo.utils import counters

    texts = [[line.strip() for line in reason.splitlines()] for reason in counters["graph_break"]]
    return list(dict.fromkeys(". ".join(lines[:2]) for lines in texts))


def graphs() -> tuple[int, int]:
    """The number of graphs that were compiled so far, and how many came from the cache."""
    from torch._dynamo.utils import counters

    cached = counters["aot_autograd"]["autograd_cache_hit"]
    return counters["stats"]["unique_graphs"], cached
