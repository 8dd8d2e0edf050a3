"""The interface of a strategy to the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from launcher.recipe import schema

InitFn = Callable[[nn.Module, torch.device, torch.device], None]
"""Initialises a meta model: init_fn(model, device of parameters, device of buffers)."""


class WrappedModel(ABC):
    """A model distributed over its ranks. model: to call. module: the model inside, with its
    parameters, names and config."""

    optimizer_mesh: DeviceMesh | None = None
    """Ranks over which the optimizer shards its state although parameters are whole (ZeRO-1)."""

    cpu_offload: schema.CpuOffload | None = None

    def __init__(self, model: nn.Module, *, module: nn.Module) -> None:
        self.model, self.module = model, module
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered where compute waits for communication between ranks; a run sets its timer."""
        self._parameters = [p for p in module.parameters() if p.requires_grad]

    @abstractmethod
    def description(self) -> str:
        """Precision and sharding, read off the wrapped model."""

    def forward_context(self) -> AbstractContextManager[object]:
        """The precision of forward passes."""
        return nullcontext()

    @abstractmethod
    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch. Decides whether it reduces gradients."""

    def reshard(self) -> None:  # noqa: B027 (nothing to do without sharding)
        """Frees unsharded weights, after forward passes without a backward pass."""

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """2-norm of all gradients, with any loss scale, over all ranks: a scalar, the same on every
        rank. Does not wait for the device."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(local)))
        return norm


def compute_dtype(strategy: schema.Strategy) -> torch.dtype:
    """The dtype of forward and backward passes."""
    precision = strategy.mixed_precision
    dtype: torch.dtype = getattr(torch, "float32" if precision is None else precision.param_dtype)
    return dtype


def offloads_parameters(offload: schema.CpuOffload | None) -> bool:
    """Whether parameters and gradients are in host memory, where the optimizer's step runs."""
    return offload is not None and offload.what == "all"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
