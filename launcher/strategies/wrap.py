"""Wraps a model for training: activation checkpointing, then compile, then the strategy."""

from __future__ import annotations

from torch import nn

from launcher.distributed.process_group import DataParallel
from launcher.recipe import schema
from launcher.strategies.base import InitFn, WrappedModel


def wrap(
    model: nn.Module,
    *,
    strategy: schema.Strategy,
    checkpointing: schema.ActivationCheckpointing | None,
    compile: bool,
    blocks: dict[str, nn.Module],
    ranks: DataParallel,
    init_fn: InitFn,
) -> WrappedModel:
    """Wraps a meta model and initialises its weights.

    blocks: the model's blocks by name (`find_blocks`), not yet wrapped.
    """
    assert strategy.kind != "auto"
    if checkpointing is not None:
        from launcher.strategies.activation_checkpointing import checkpoint_blocks

        blocks = checkpoint_blocks(
            model,
            blocks,
            mode=checkpointing.mode,
            every_n_blocks=checkpointing.every_n_blocks,
            offload_to_cpu=checkpointing.offload_to_cpu,
            pin_memory=ranks.device.type == "cuda",
        )
    if compile:
        for block in blocks.values():
            block.compile()
    if strategy.kind == "ddp":
        from launcher.strategies.ddp import Ddp

        return Ddp(model, strategy, ranks=ranks, init_fn=init_fn)
    from launcher.strategies.fsdp import Fsdp

    return Fsdp(model, strategy, blocks=list(blocks.values()), ranks=ranks, init_fn=init_fn)
