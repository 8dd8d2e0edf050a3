"""Wraps blocks whose activations are recomputed in the backward pass, or offloaded to the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def recomputation_changes_state(block: nn.Module) -> bool:
    """Whether recomputation would update running statistics twice (BatchNorm)."""
    return any(
        isinstance(module, _NormBase) and module.track_running_stats for module in block.modules()
    )


def is_checkpointed(block: nn.Module) -> bool:
    """Whether `checkpoint_blocks` wrapped it."""
    return isinstance(block, CheckpointWrapper)


def checkpoint_blocks(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    *,
    mode: str,
    every_n_blocks: int,
    offload_to_cpu: bool,
    pin_memory: bool,
) -> dict[str, nn.Module]:
    """Wraps every n-th block (the first, the n+1-th, ...) and returns all blocks as they are now.

    Blocks with BatchNorm are not wrapped: recomputation would update its statistics twice.
    """
    result: dict[str, nn.Module] = {}
    for index, (name, block) in enumerate(blocks.items()):
        if index % every_n_blocks or recomputation_changes_state(block):
            result[name] = block
            continue
        extra: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}
        wrapped: nn.Module = checkpoint_wrapper(block, **extra)
        if offload_to_cpu:
            wrapped.forward = partial(_forward_saving_on_cpu, wrapped.forward, pin_memory)
        model.set_submodule(name, wrapped)
        result[name] = wrapped
    return result


def _forward_saving_on_cpu(
    forward: Callable[..., Any], pin_memory: bool, *args: Any, **kwargs: Any
) -> Any:
    with save_on_cpu(pin_memory=pin_memory):
        return forward(*args, **kwargs)


def kept_operations() -> set[Any]:
    """Attention operations of this torch version whose outputs selective checkpointing keeps."""
    names = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    kept = {
        getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)
    }
    # Attention of packed documents (launcher/models/attention.py), if its module is imported
    if hasattr(torch.ops.torch_attn, "_varlen_attn"):
        kept.add(torch.ops.torch_attn._varlen_attn.default)
    return kept


def _selective_contexts() -> Any:
    """Keep attention and every other matrix product, recompute the rest.

    Forward pass and recomputation count matrix products separately, so both make the same choice.
    """
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    kept = kept_operations()
    seen = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in kept:
            return CheckpointPolicy.MUST_SAVE
        if operation in products:
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
