"""Wraps blocks whose activations are recomputed in the backward pass, or offloaded to the host."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from launcher.recipe import schema
from launcher.strategies.activation_offload import ActivationOffload


class Kept(NamedTuple):
    """Operators of a block whose results are kept."""

    attention: bool
    calls: frozenset[tuple[Any, int]]
    """Function, and the number of the call among the block's calls of it (0-based)."""


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
    checkpointing: schema.ActivationCheckpointing,
    kept: dict[str, Kept] | None = None,
) -> dict[str, nn.Module]:
    """Wraps every n-th block (the first, the n+1-th, ...) and returns all blocks as they are now.

    kept: what mode selective keeps of each block; None: attention and every other matrix product.
    Blocks with BatchNorm are not wrapped: recomputation would update its statistics twice.
    """
    result: dict[str, nn.Module] = {}
    offload = ActivationOffload()
    for index, (name, block) in enumerate(blocks.items()):
        if index % checkpointing.every_n_blocks or recomputation_changes_state(block):
            result[name] = block
            continue
        extra: dict[str, Any] = {}
        if checkpointing.mode == "selective":
            extra = {"context_fn": partial(_contexts, kept[name] if kept else None)}
        wrapped: nn.Module = checkpoint_wrapper(block, **extra)
        if checkpointing.offload_to_cpu:
            wrapped.forward = partial(offload.forward, wrapped.forward)
        model.set_submodule(name, wrapped)
        result[name] = wrapped
    return result


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


def is_random(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws random numbers. Its result must not be kept: recomputation would not
    draw them, and what is drawn later would differ."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":  # attention
            given = kwargs.get("dropout_p", argument.default_value)
            return bool(args[position] if position < len(args) else given)
    return True


def _contexts(chosen: Kept | None) -> Any:
    """Keep the chosen operators, or attention and every other matrix product; recompute the rest.

    Forward pass and recomputation count calls separately, so both make the same choice.
    """
    attention = kept_operations()
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    seen: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        calls = seen[context.is_recompute]
        if operation in attention:
            keep = chosen is None or chosen.attention
            keep = keep and not is_random(operation, args, kwargs)
        elif chosen is None:
            keep = operation in products and sum(calls[each] for each in products) % 2 == 0
        else:
            keep = (operation, calls[operation]) in chosen.calls
        calls[operation] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
