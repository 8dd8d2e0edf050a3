"""The interface of a strategy to the training loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from launcher.recipe import schema

InitFn = Callable[[nn.Module, torch.device, torch.device], None]
"""Initialises a meta model: init_fn(model, device of parameters, device of buffers)."""


class WrappedModel(Protocol):
    """A model distributed over its ranks, ready to train."""

    model: nn.Module
    """Call this one."""
    module: nn.Module
    """The model inside, with its parameters, names and config."""

    def description(self) -> str:
        """Precision and sharding, read off the wrapped model."""

    def forward_context(self) -> AbstractContextManager[object]:
        """The precision of forward passes."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch. Decides whether it reduces gradients."""

    def reshard(self) -> None:
        """Frees unsharded weights, after forward passes without a backward pass."""

    def grad_norm(self) -> torch.Tensor:
        """2-norm of all gradients, with any loss scale, over all ranks: a scalar, the same on every
        rank. Does not wait for the device."""


def compute_dtype(strategy: schema.Strategy) -> torch.dtype:
    """The dtype of forward and backward passes: mixed_precision.param_dtype, or float32."""
    precision = strategy.mixed_precision
    dtype: torch.dtype = getattr(torch, "float32" if precision is None else precision.param_dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
