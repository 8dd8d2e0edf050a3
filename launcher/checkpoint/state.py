"""Content of a checkpoint: tensors of model and optimizer, and each rank's own tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from launcher.models.initialization import clean_name

Tensors = dict[str, torch.Tensor]
"""By name. A plain tensor is the same on every rank; others are DTensors."""


def model_and_optimizer(module: nn.Module, optimizer: torch.optim.AdamW) -> Tensors:
    """Tensors of model and optimizer, to be saved, or loaded into in place.

    `model.NAME` is a parameter (a tied one once), `optimizer.NAME.step`, `.exp_avg` and
    `.exp_avg_sq` its optimizer state, and `buffer.NAME` a persistent buffer. NAME is the clean
    name. Frozen parameters are not saved: a resume loads them from model.path again. Missing
    optimizer state is created, with zeros.
    """
    tensors: Tensors = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            name = clean_name(name)
            tensors[f"model.{name}"] = parameter.detach()
            for key, value in _optimizer_state(optimizer, parameter).items():
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors | {f"buffer.{name}": buffer for name, buffer in _persistent_buffers(module)}


def _optimizer_state(
    optimizer: torch.optim.AdamW, parameter: torch.Tensor
) -> Mapping[str, torch.Tensor]:
    """State of one parameter, created as the fused AdamW does in its first step."""
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if (
                buffer is not None
                and name not in part._non_persistent_buffers_set
                and id(buffer) not in seen
            ):
                seen.add(id(buffer))
                yield clean_name(f"{prefix}.{name}" if prefix else name), buffer


def rank_state(module: nn.Module, device: torch.device) -> Tensors:
    """Each rank's own state: random generators (torch on CPU and GPU, Python, NumPy) and persistent
    buffers, which may differ between ranks (BatchNorm's statistics under `ddp`)."""
    import numpy as np

    version, python, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert version == 3
    assert isinstance(legacy, dict)
    assert legacy["bit_generator"] == "MT19937"
    state = {
        "rng.cpu": torch.get_rng_state(),
        "rng.python": torch.tensor(python, dtype=torch.int64),
        "rng.python_gauss": torch.tensor(
            [float("nan") if gauss is None else gauss], dtype=torch.float64
        ),
        "rng.numpy": torch.tensor(
            [*legacy["state"]["key"].tolist(), legacy["state"]["pos"], legacy["has_gauss"]],
            dtype=torch.int64,
        ),
        "rng.numpy_gauss": torch.tensor([legacy["gauss"]], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state(device)
    return state | {f"buffer.{name}": buffer for name, buffer in _persistent_buffers(module)}


@torch.no_grad()
def restore_rank_state(
    state: Mapping[str, torch.Tensor], module: nn.Module, device: torch.device
) -> None:
    """Restores what `rank_state` returned. The number of ranks must be the same."""
    import numpy as np

    torch.set_rng_state(state["rng.cpu"])
    gauss = state["rng.python_gauss"].item()
    random.setstate((3, tuple(state["rng.python"].tolist()), None if gauss != gauss else gauss))
    *key, position, has_gauss = state["rng.numpy"].tolist()
    np.random.set_state(
        (
            "MT19937",
            np.array(key, dtype=np.uint32),
            position,
            has_gauss,
            state["rng.numpy_gauss"].item(),
        )
    )
    if device.type == "cuda" and "rng.cuda" in state:
        torch.cuda.set_rng_state(state["rng.cuda"], device)
    for name, buffer in _persistent_buffers(module):
        buffer.copy_(state[f"buffer.{name}"])


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Size of a checkpoint of these tensors over all ranks."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
