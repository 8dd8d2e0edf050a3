"""The interface of a strategy to the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from launcher.distributed.rank_layout import RankLayout
from launcher.libraries.private import foreach_norm
from launcher.recipe import schema

InitFn = Callable[[nn.Module, torch.device, torch.device], None]
"""Initialises a meta model: init_fn(model, device of parameters, device of buffers)."""


class WrappedModel(ABC):
    """A model distributed over its ranks. `model` is the wrapper, which is called; `module` is the
    wrapped model, with its parameters, names and config."""

    optimizer_mesh: DeviceMesh | None = None
    """Mesh of the ranks that shard the optimizer state while parameters are replicated (ZeRO-1)."""
    measures_waits = True
    """Whether all waits of compute for communication are inside of `waiting`."""

    def __init__(self, model: nn.Module, *, module: nn.Module, ranks: RankLayout) -> None:
        self.model, self.module, self.waiting = model, module, ranks.waiting
        self.autocast_dtype: torch.dtype | None = None
        """Forward passes run under autocast with this dtype; None: without."""
        self._device_type = ranks.device.type
        self._parameters = [p for p in module.parameters() if p.requires_grad]

    @abstractmethod
    def description(self) -> str:
        """Describes precision and sharding of the wrapped model."""

    def forward_context(self) -> AbstractContextManager[object]:
        """Context that sets the precision of forward passes."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self.autocast_dtype)

    @abstractmethod
    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Context around the forward and backward pass of a micro-batch, which sets whether
        gradients are reduced. `last` is true for the last micro-batch of the step."""

    def reshard(self) -> None:  # noqa: B027 (nothing to do without sharding)
        """Frees unsharded weights, after forward passes without a backward pass."""

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """2-norm of all gradients over all ranks, including any loss scale: a scalar tensor, equal
        on every rank. Does not synchronize with the device."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        return joint_norm(local)


def joint_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """2-norm of all tensors together, which are on one device: a scalar tensor.

    On a CPU torch adds the squares of a float32 tensor in float32 and in order, so the norm of 66
    million numbers was too small by 0.6 %. So norms are computed by rows there.

    Raises RuntimeError if there are no tensors: no gradient has been reduced."""
    if not tensors:
        raise RuntimeError("No parameter has a gradient: the backward pass has reduced none")
    norm: torch.Tensor
    if tensors[0].device.type == "cpu":
        rows = [torch.linalg.vector_norm(tensor, dim=-1).flatten() for tensor in tensors]
        norm = torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64).float()
    else:
        norm = torch.linalg.vector_norm(torch.stack(foreach_norm(tensors)))
    return norm


def compute_dtype(strategy: schema.Strategy) -> torch.dtype:
    """The dtype of forward and backward passes."""
    precision = strategy.mixed_precision
    dtype: torch.dtype = getattr(torch, "float32" if precision is None else precision.param_dtype)
    return dtype


def offloads_parameters(cpu_offload: schema.CpuOffload | None) -> bool:
    """Whether parameters and gradients are in host memory, where the optimizer's step runs."""
    return cpu_offload is not None and cpu_offload.what == "all"


def dtype_name(dtype: torch.dtype) -> str:
    """The name that a recipe gives to a dtype."""
    return str(dtype).removeprefix("torch.")


def units_without(
    units: Iterable[nn.Module], parameters: Collection[nn.Parameter]
) -> list[nn.Module]:
    """The units of FSDP that have none of these parameters. A unit with a parameter in float32 is a
    part of the root instead."""
    kept = set(parameters)
    return [unit for unit in units if kept.isdisjoint(unit.parameters())]
