"""Wraps a model for training: activation checkpointing, then compile, then the strategy."""

from __future__ import annotations

import torch
from torch import nn

from launcher.distributed.process_group import DataParallel
from launcher.recipe import schema
from launcher.strategies.base import Fill, WrappedModel


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

        sync = (
            False if strategy.sync_every_micro_batch == "auto" else strategy.sync_every_micro_batch
        )
        return Ddp(
            model, ranks=ranks, param_dtype=param_dtype, sync_every_micro_batch=sync, fill=fill
        )
    from launcher.strategies.fsdp import Fsdp

    return Fsdp(
        model,
        blocks=list(wrapped.values()),
        ranks=ranks,
        param_dtype=param_dtype,
        reduce_dtype=getattr(torch, precision.reduce_dtype)
        if precision is not None
        else torch.float32,
        reshard_after_forward=strategy.reshard_after_forward,
        reshard_after_backward=strategy.reshard_after_backward,
        replicate=strategy.replicate,
        cpu_offload=strategy.cpu_offload is not None,
        pin_memory=strategy.cpu_offload is not None and strategy.cpu_offload.pin_memory,
        sync_every_micro_batch=strategy.sync_every_micro_batch is not False,
        fill=fill,
    )
