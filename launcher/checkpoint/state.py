"""Content of a checkpoint: tensors of model and optimizer, and each rank's own tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from launcher.libraries.private import non_persistent_buffers, version_of
from launcher.models.names import clean_name
from launcher.models.safetensors_files import Tensors

AVERAGE = "ema"
"""Name of the moving average of the weights in the optimizer state of a parameter."""


def model_and_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Tensors of model and optimizer, to be saved or to be loaded in place.

    `model.NAME` is a parameter (a tied one once), `optimizer.NAME.KEY` its optimizer state (such as
    `exp_avg`), and `buffer.NAME` a persistent buffer, by clean names. Frozen parameters are not
    saved: a resume loads them from model.path again.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            tensors[f"model.{clean_name(name)}"] = parameter.detach()
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors | _persistent_buffers(module)


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers, as `buffer.NAME`; a shared buffer appears once."""
    kept = dict(module.named_buffers())
    return {
        f"buffer.{clean_name(full)}": kept[full]
        for prefix, part in module.named_modules()
        for name in part._buffers
        if name not in non_persistent_buffers(part)
        and (full := f"{prefix}.{name}" if prefix else name) in kept
    }


def rank_state(module: nn.Module, device: torch.device) -> Tensors:
    """Each rank's own state: random generators, and persistent buffers, which may differ between
    ranks (BatchNorm's statistics under `ddp`)."""
    _, python, gauss = random.getstate()
    gauss = float("nan") if gauss is None else gauss
    numpy: Any = np.random.get_state()
    _, key, position, has_gauss, numpy_gauss = numpy
    state = {
        "rng.cpu": torch.get_rng_state(),
        "rng.python": torch.tensor(python, dtype=torch.int64),
        "rng.numpy": torch.tensor([*key.tolist(), position, has_gauss], dtype=torch.int64),
        "rng.gauss": torch.tensor([gauss, numpy_gauss], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state(device)
    buffers = _persistent_buffers(module)
    return state | {name: buffer.clone() for name, buffer in buffers.items()}


class BeforeStep:
    """What the forward passes of a step change, as it was before the step: random generators and
    persistent buffers."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device, self._buffers = device, list(_persistent_buffers(module).values())
        self._copies = [buffer.clone() for buffer in self._buffers]
        self._versions = list(map(version_of, self._buffers))
        self.take()

    def take(self) -> None:
        """Copies them: of the buffers those that were written since the last call. Does not wait for
        the device."""
        self._cpu, self._python = torch.get_rng_state(), random.getstate()
        self._numpy: Any = np.random.get_state()
        if self._device.type == "cuda":
            self._cuda = torch.cuda.get_rng_state(self._device)
        for index, buffer in enumerate(self._buffers):
            if version_of(buffer) != self._versions[index]:
                self._copies[index].copy_(buffer)
        self._versions = list(map(version_of, self._buffers))

    @torch.no_grad()
    def restore(self) -> None:
        """Restores them."""
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._cuda, self._device)
        for buffer, copied in zip(self._buffers, self._copies, strict=True):
            buffer.copy_(copied)


@torch.no_grad()
def restore_rank_state(state: Tensors, module: nn.Module, device: torch.device) -> None:
    """Restores what `rank_state` returned, on the same number of ranks."""
    torch.set_rng_state(state["rng.cpu"])
    python_gauss, numpy_gauss = state["rng.gauss"].tolist()
    gauss = None if python_gauss != python_gauss else python_gauss
    random.setstate((3, tuple(state["rng.python"].tolist()), gauss))
    *key, position, has_gauss = state["rng.numpy"].tolist()
    numpy = ("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, numpy_gauss)
    np.random.set_state(numpy)
    if device.type == "cuda" and "rng.cuda" in state:
        torch.cuda.set_rng_state(state["rng.cuda"], device)
    for name, buffer in _persistent_buffers(module).items():
        buffer.copy_(state[name])
