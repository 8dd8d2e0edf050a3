"""Whether blocks can be compiled, and where their graphs were split (`model.compile`)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch

RECOMPILE_LIMIT = 64
"""Variants of a function that are compiled; further ones run eager. All blocks share a function, so
kinds of layers x training or evaluation x packed rows or not x fixed or variable sizes may occur.
torch's own limit is 8."""


def allow_variants() -> None:
    """Sets the limit for this process, if it is not higher."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)


def why_eager(device: torch.device | str, *, here: bool = False) -> str | None:
    """Why `model.compile: auto` is off on this kind of device; None: it is on. `here` also checks
    that this machine has what Triton needs to compile for its GPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return "the ranks compute on CPUs, where it takes minutes and needs g++"
    return missing_for_triton(device) if here else None


def missing_for_triton(device: torch.device) -> str | None:
    """What Triton lacks on this machine, where it compiles a small C module for Python; None if it
    can compile kernels for this GPU."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or more"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc, clang, or the variable CC)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.is_file() else f"{header} is missing (package python3-dev)"


def graph_breaks() -> list[str]:
    """The reasons of all graph breaks that dynamo has recorded so far, each once."""
    return _reasons("graph_break")


def eager_functions() -> list[str]:
    """Why dynamo has left functions eager so far, each reason once; that `RECOMPILE_LIMIT` was
    exceeded is one."""
    return _reasons("unimplemented")


def _reasons(category: str) -> list[str]:
    from torch._dynamo.utils import counters

    texts = [[line.strip() for line in reason.splitlines()] for reason in counters[category]]
    return list(dict.fromkeys(". ".join(lines[:2]) for lines in texts))


def graphs() -> tuple[int, int]:
    """The number of graphs that were compiled so far, and how many came from the cache."""
    from torch._dynamo.utils import counters

    cached = counters["aot_autograd"]["autograd_cache_hit"]
    return counters["stats"]["unique_graphs"], cached
