"""Wraps blocks for activation checkpointing, with optional offload of their inputs to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from launcher.libraries.private import (
    ATTENTION_OPERATORS,
    FLOAT8_PRODUCT,
    BatchNormBase,
    CheckpointWrapper,
    OpOverload,
    argument_names,
    checkpoint_wrapper,
    is_tracing_graph,
    varlen_operator,
)
from launcher.recipe import schema
from launcher.strategies.activation_offload import ActivationOffload

_aten = torch.ops.aten
Recomputation = Callable[[], AbstractContextManager[None]]
Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
ATTENTION = {*ATTENTION_OPERATORS, varlen_operator()}
PRODUCTS = {_aten.mm.default, _aten.addmm.default, FLOAT8_PRODUCT}


class Kept(NamedTuple):
    """Operators of a block whose results are kept."""

    attention: bool
    calls: frozenset[tuple[OpOverload, int]]
    """An operator, and the number of a call, from 0, among the block's calls of this operator."""


ATTENTION_ALONE = Kept(attention=True, calls=frozenset())
NOTHING = Kept(attention=False, calls=frozenset())


def recomputation_changes_state(block: nn.Module) -> bool:
    """Whether recomputation would update running statistics twice (BatchNorm)."""
    return any(
        isinstance(module, BatchNormBase) and module.track_running_stats
        for module in block.modules()
    )


def is_checkpointed(block: nn.Module) -> bool:
    """Whether `checkpoint_blocks` wrapped a block."""
    return isinstance(block, CheckpointWrapper)


def checkpoint_blocks(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    checkpointing: schema.ActivationCheckpointing,
    kept: dict[str, Kept] | None = None,
    *,
    offload: ActivationOffload | None = None,
    recomputation: Recomputation | None = None,
) -> dict[str, nn.Module]:
    """Wraps every n-th block (the first, the n+1-th, ...), except blocks with BatchNorm.

    `kept` is what mode selective keeps of each block, by default attention and every other matrix
    product; all_but_attention keeps attention. `offload` moves the inputs of blocks, if the mode does. `recomputation` is called in the
    forward pass of each block, and returns the context in which it is computed again. Returns all
    blocks, wrapped or not, by name.
    """
    result = dict(blocks)
    offload = offload or ActivationOffload()
    for index, (name, block) in enumerate(blocks.items()):
        if index % checkpointing.every_n_blocks or recomputation_changes_state(block):
            continue
        contexts: Contexts | None = None
        if checkpointing.mode != "full":
            chosen = ATTENTION_ALONE if checkpointing.mode == "all_but_attention" else None
            contexts = partial(_contexts, kept[name] if kept else chosen)
        if recomputation is not None:
            contexts = partial(_within, recomputation, contexts)
        extra: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
        wrapped: nn.Module = checkpoint_wrapper(block, **extra)
        if checkpointing.offload_to_cpu:
            wrapped.forward = partial(offload.forward, wrapped.forward)
        model.set_submodule(name, wrapped)
        result[name] = wrapped
    return result


def is_random(operation: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call draws random numbers. If its result was kept, recomputation would not draw
    them, and random numbers drawn later in the block would differ."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    names = argument_names(operation)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p"))


def _within(
    recomputation: Recomputation, inner: Contexts | None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a forward pass and of its recomputation, the second one in `recomputation`.

    Without `recomputation` in a graph of `torch.compile`, which takes modes of dispatch alone and
    serves all micro-batches: it holds nothing that depends on the call, because layers that do are
    not compiled, and a block with such a layer is checkpointed outside of graphs.
    """
    if is_tracing_graph():
        return inner() if inner is not None else _contexts(NOTHING)
    forward, again = (nullcontext(), nullcontext()) if inner is None else inner()
    return forward, _Both(recomputation(), again)


class _Both(AbstractContextManager[None]):
    """Two contexts, the second one inside of the first. Like them, it may be entered several times."""

    def __init__(
        self, outer: AbstractContextManager[None], inner: AbstractContextManager[None]
    ) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


def _contexts(chosen: Kept | None) -> Any:
    # Forward pass and recomputation count calls separately, so both make the same choice
    seen: dict[bool, Counter[OpOverload]] = {False: Counter(), True: Counter()}

    def policy(
        context: SelectiveCheckpointContext, operation: OpOverload, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        calls = seen[context.is_recompute]
        if operation in ATTENTION:
            keep = (chosen is None or chosen.attention) and not is_random(operation, args, kwargs)
        elif chosen is None:
            keep = operation in PRODUCTS and sum(calls[each] for each in PRODUCTS) % 2 == 0
        else:
            keep = (operation, calls[operation]) in chosen.calls
        calls[operation] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
