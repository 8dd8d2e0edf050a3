"""Whether Triton can compile kernels for a GPU of this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch


def missing_for_triton(device: torch.device) -> str | None:
    """Why Triton cannot compile kernels for this GPU; None if it can. Triton first compiles a small
    C module for Python."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or more"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc, clang, or the variable CC)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.is_file() else f"{header} is missing (package python3-dev)"


def runs_own_kernels(device: torch.device) -> bool:
    """Whether this is an Nvidia GPU on which the launcher's Triton kernels are used, if nothing is
    missing: compute capability 8.0, for bfloat16."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
