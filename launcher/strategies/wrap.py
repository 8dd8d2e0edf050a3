"""Wraps a model for training: activation checkpointing, then compile, then the strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.units import PartialGradients, Unit
from launcher.libraries.private import mark_dynamic
from launcher.recipe import schema
from launcher.strategies.activation_checkpointing import Kept, Recomputation, checkpoint_blocks
from launcher.strategies.activation_offload import ActivationOffload
from launcher.strategies.base import InitFn, WrappedModel, compute_dtype, units_without
from launcher.strategies.compilation import prepare_compile
from launcher.strategies.ddp import Ddp
from launcher.strategies.fsdp import Fsdp, FsdpPolicy
from launcher.strategies.one_rank import OneRank


@dataclass(frozen=True)
class Wrappers:
    """Classes that cannot run on fake tensors, so that a trace gives others."""

    data_parallel: Callable[..., nn.Module] = DistributedDataParallel
    activation_offload: Callable[[], ActivationOffload] = ActivationOffload


REAL = Wrappers()


@dataclass(frozen=True)
class Parts:
    """The modules of a model that are wrapped on their own."""

    blocks: dict[str, nn.Module]
    """The blocks by name (from `find_blocks`), not yet wrapped."""
    units: Sequence[Unit] = ()
    """The units of FSDP beside the blocks, the inner ones first."""
    partial: Sequence[PartialGradients] = ()
    """Ranks that compute the same tokens together."""
    kept: dict[str, Kept] | None = None
    """What the budget of activation checkpointing keeps of each block; None without a budget."""
    in_float32: Collection[nn.Parameter] = ()
    """The parameters that forward passes use in float32, whatever their dtype of computation."""
    mixes_dtypes: bool = False
    """Whether forward passes in 16 bits need autocast (`models.precision.mixes_dtypes`)."""
    tower: dict[str, nn.Module] = field(default_factory=dict)
    """The blocks of towers, and layers of multi-token prediction, by name."""
    recomputation: Recomputation | None = None
    """The context in which a checkpointed block is computed again (`checkpoint_blocks`)."""


def wrap(
    model: nn.Module,
    parts: Parts,
    *,
    strategy: schema.Strategy,
    checkpointing: schema.ActivationCheckpointing | None,
    compile: bool = False,
    one_rank: bool = False,
    ranks: RankLayout,
    init_fn: InitFn,
    wrappers: Wrappers = REAL,
) -> WrappedModel:
    """Wraps a meta model and initializes its weights. `one_rank`: see
    `Recipe.uses_one_rank`."""
    blocks, tower = parts.blocks, parts.tower
    if checkpointing is not None:
        blocks = checkpoint_blocks(
            model,
            blocks,
            checkpointing,
            parts.kept,
            offload=wrappers.activation_offload(),
            recomputation=parts.recomputation,
        )
        # A frozen tower keeps no activations. A budget is about the blocks of text
        if any(p.requires_grad for block in tower.values() for p in block.parameters()):
            mode = "full" if checkpointing.budget is not None else checkpointing.mode
            tower = checkpoint_blocks(
                model,
                tower,
                replace(checkpointing, mode=mode, budget=None, offload_to_cpu=False),
                recomputation=parts.recomputation,
            )
    if compile:
        prepare_compile(ranks.device)
        model.register_forward_pre_hook(_mark_documents, with_kwargs=True)
        # In a tower the number of patches is dynamic from the second micro-batch with another one on
        for block in (*tower.values(), *blocks.values()):
            block.compile()
    param_dtype, precision = compute_dtype(strategy), strategy.mixed_precision
    autocast_dtype = param_dtype if parts.mixes_dtypes else None
    if one_rank:
        alone = OneRank(
            model,
            [
                *blocks.values(),
                *tower.values(),
                *units_without(
                    [m for unit in parts.units if unit.called for m in unit.modules],
                    parts.in_float32,
                ),
            ],
            [m for unit in parts.units if not unit.called for m in unit.modules],
            parts.in_float32,
            param_dtype=param_dtype,
            ranks=ranks,
            init_fn=init_fn,
        )
        alone.autocast_dtype = autocast_dtype
        return alone
    if strategy.kind == "ddp":
        return Ddp(
            model,
            param_dtype=param_dtype,
            shard_optimizer=strategy.shard_optimizer,
            sync_every_micro_batch=strategy.syncs_every_micro_batch,
            ranks=ranks,
            init_fn=init_fn,
            data_parallel=wrappers.data_parallel,
        )
    reduce_dtype = "float32" if precision is None else precision.reduce_dtype
    policy = FsdpPolicy(
        param_dtype=param_dtype,
        reduce_dtype=getattr(torch, reduce_dtype),
        reshard_after_forward=strategy.reshards_after_forward,
        reshard_after_backward=strategy.reshard_after_backward,
        cpu_offload=strategy.cpu_offload,
        sync_every_micro_batch=strategy.syncs_every_micro_batch,
    )
    sharded = Fsdp(
        model,
        [*tower.values(), *blocks.values()],
        parts.units,
        parts.partial,
        parts.in_float32,
        policy=policy,
        ranks=ranks,
        init_fn=init_fn,
    )
    sharded.autocast_dtype = autocast_dtype
    return sharded


def _mark_documents(model: nn.Module, args: object, kwargs: Mapping[str, torch.Tensor]) -> None:
    """Marks the number of documents as dynamic. Otherwise blocks are compiled for the number in the
    first batch, and again when it changes."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in kwargs:
            mark_dynamic(kwargs[name], 0)
