"""How a model is spread over the ranks: one small protocol, two kinds, one order of wrapping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from launcher.processes import DataParallel
from launcher.recipe import schema

Fill = Callable[[nn.Module, torch.device, torch.device], None]
"""Gives a meta model its weights: fill(model, device of parameters, device of buffers)."""


class WrappedModel(Protocol):
    """A model on its ranks, ready to train."""

    model: nn.Module
    """Call this."""
    module: nn.Module
    """The model inside of it, for its parameters, names and config."""

    def description(self) -> str:
        """What was really done, as seen on the wrapped model."""

    def forward_context(self) -> AbstractContextManager[object]:
        """The precision that forward passes run in."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch: decides whether gradients are reduced in it."""

    def reshard(self) -> None:
        """After forward passes that no backward pass followed: frees what they left gathered."""

    def grad_norm(self) -> torch.Tensor:
        """2-norm of the gradients over all parameters and ranks: a scalar, the same on every rank, not yet computed
        when this returns. Gradients are read as they are, so a loss scale is still in it."""


def wrap(
    model: nn.Module,
    *,
    strategy: schema.Strategy,
    checkpointing: schema.ActivationCheckpointing | None,
    compile: bool,
    blocks: dict[str, nn.Module],
    ranks: DataParallel,
    fill: Fill,
) -> WrappedModel:
    """Wraps a meta model and fills it: checkpointing, then compile, then the strategy.

    blocks: the model's blocks by name (`find_blocks`); the wrapped ones are found through it.
    """
    assert strategy.kind != "auto"
    wrapped = dict(blocks)
    if checkpointing is not None:
        from launcher.strategies.activation_checkpointing import checkpoint_blocks

        wrapped = checkpoint_blocks(
            model,
            blocks,
            mode=checkpointing.mode,
            every_n_blocks=checkpointing.every_n_blocks,
            offload_to_cpu=checkpointing.offload_to_cpu,
            pin_memory=ranks.device.type == "cuda",
        )
    if compile:
        for block in wrapped.values():
            block.compile()
    precision = strategy.mixed_precision
    param_dtype = getattr(torch, precision.param_dtype) if precision is not None else torch.float32
    if strategy.kind == "ddp":
        from launcher.strategies.ddp import Ddp

        sync = False if strategy.sync_every_micro_batch == "auto" else strategy.sync_every_micro_batch
        return Ddp(model, ranks=ranks, param_dtype=param_dtype, sync_every_micro_batch=sync, fill=fill)
    from launcher.strategies.fsdp import Fsdp

    return Fsdp(
        model,
        blocks=list(wrapped.values()),
        ranks=ranks,
        param_dtype=param_dtype,
        reduce_dtype=getattr(torch, precision.reduce_dtype) if precision is not None else torch.float32,
        reshard_after_forward=strategy.reshard_after_forward,
        reshard_after_backward=strategy.reshard_after_backward,
        replicate=strategy.replicate,
        cpu_offload=strategy.cpu_offload is not None,
        pin_memory=strategy.cpu_offload is not None and strategy.cpu_offload.pin_memory,
        sync_every_micro_batch=strategy.sync_every_micro_batch is not False,
        fill=fill,
    )
