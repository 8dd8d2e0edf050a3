"""Context parallelism: the ranks of a group compute parts of the same rows.

Each rank has a part of the tokens of every row. In attention, the ranks exchange tokens against
heads: each computes attention of all tokens for its share of the heads (Ulysses: Jacobs et al.,
2023, arXiv 2309.14509). All other layers see each token for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.errors import RecipeError
from launcher.libraries.private import attention_implementation
from launcher.models.attention import (
    DIVIDED_ROWS,
    VARLEN,
    has_sinks,
    refuse_other_layers,
    set_text_attention,
    varlen_attention,
)
from launcher.models.micro_batch import RowPart
from launcher.models.predictions import logits
from launcher.models.record import record_of
from launcher.sources.layouts import ATTACHMENTS, nouns_of, with_article

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "strategy.context_parallel_size"
_whole_rows = ContextVar("whole_rows", default=False)
"""Whether each rank computes whole rows for now, without the others."""


def check_rows(
    model: PreTrainedModel,
    size: int,
    *,
    sequence_length: int,
    tensor_parallel_size: int = 1,
    missing_for_varlen: str | None = None,
) -> None:
    """Raises RecipeError if this number of ranks cannot compute parts of the model's rows. Each rank
    has the heads of one of `tensor_parallel_size` parts of the layers. `missing_for_varlen` is the
    result of the function of this name, for the message."""
    name, towers = type(model).__name__, record_of(model).towers
    if towers is not None and (towers.both_ways or not towers.inputs_known):
        kind, nouns = next(iter(towers.kinds)), nouns_of(towers.kinds)
        why = f"does not say which features of {with_article(kind)} belong to a part of a row"
        if towers.both_ways:
            why = f"attends to {nouns} in both directions, with masks that cannot be divided"
        without = " ".join(f"{ATTACHMENTS[kind]}=null" for kind in towers.kinds)
        raise RecipeError(f"{KEY}: {name} {why}; use 1, or set {without} for rows of text")
    refuse_other_layers(model, sequence_length, key=KEY, instead="use 1")
    config = model.config.get_text_config(decoder=True)
    if attention_implementation(model) != VARLEN:
        why = f"packed rows need {missing_for_varlen}; use it, data.packing=false, or"
        if attention_implementation(model) != "sdpa":
            why = "it needs model.attention=sdpa; use it, or"
        elif missing_for_varlen is None:
            why = "it is not plain causal attention (biases, caps, wide heads or other masks); use"
        raise RecipeError(f"{KEY}: the attention of {name} cannot be divided: {why} 1")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(value) for value in _values(rope) if value in ("dynamic", "longrope")}
    if kinds:
        what = f"{name} scales rotary positions ({', '.join(kinds)}) by the longest row it sees"
        raise RecipeError(f"{KEY}: {what}, and each rank sees a part; use 1")
    heads = config.num_attention_heads
    if heads % (size * tensor_parallel_size):
        product = f"{size} x {tensor_parallel_size} (strategy.tensor_parallel_size)"
        divisors = [n for n in range(1, heads + 1) if heads % (n * tensor_parallel_size) == 0]
        raise RecipeError(
            f"{KEY}: {size if tensor_parallel_size == 1 else product} does not divide the {heads} "
            f"attention heads of {name}; "
            f"use {'one of ' * bool(divisors)}{', '.join(map(str, divisors)) or 1}"
        )


def divide_rows(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Divides the rows of a model over the ranks of the group: its attention becomes
    `context_parallel_attention`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # The table is that of the process, and another model may have another group
    attention = f"{DIVIDED_ROWS}_{group.group_name}"
    ALL_ATTENTION_FUNCTIONS.register(attention, partial(context_parallel_attention, group))
    set_text_attention(model, attention)


def _values(parameters: Any) -> Iterator[Any]:
    """The values of nested dicts: some models have rotary positions for each kind of layer."""
    for value in parameters.values():
        if isinstance(value, dict):
            yield from _values(value)
        elif isinstance(value, str):
            yield value


@contextmanager
def whole_rows() -> Iterator[None]:
    """In this context each rank computes whole rows by itself."""
    token = _whole_rows.set(True)
    try:
        yield
    finally:
        _whole_rows.reset(token)


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="collectives between the ranks of a row"
)
def context_parallel_attention(
    group: dist.ProcessGroup,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`varlen_attention` of rows whose tokens are divided over the group, in order.

    query, key and value are (batch, heads, tokens of this rank, head size); the bounds of documents
    are those of the whole rows. Returns (batch, tokens of this rank, heads, head size).
    """
    if _whole_rows.get():
        return varlen_attention(module, query, key, value, attention_mask, **options)
    size, query_heads, key_heads = group.size(), query.shape[1], key.shape[1]
    if key_heads % size:
        # A rank needs the key heads of its query heads: the fewest copies that divide
        copies = (size if size % key_heads == 0 else query_heads) // key_heads
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    # (batch, heads of this rank, all tokens, head size)
    query, key, value = (_exchange(tensor, group) for tensor in (query, key, value))
    if has_sinks(options):
        options["s_aux"] = options["s_aux"].chunk(size)[group.rank()]
    out, _ = varlen_attention(module, query, key, value, attention_mask, **options)
    return _exchange(out, group), None


def _exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Divides dimension 1 over the ranks of the group, and joins what they send along dimension
    2."""
    parts = torch.stack(tensor.chunk(group.size(), 1))
    received: torch.Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return torch.cat(received.unbind(), 2)


class _AllToAll(torch.autograd.Function):
    """Exchanges the parts along dimension 0, one for each rank of the group."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


@torch.no_grad()
def check_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup,
    part: RowPart,
    *,
    name: str,
    vocabulary: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raises RecipeError unless context parallel ranks compute the logits of the whole row: a layer
    besides attention may mix tokens.

    Every rank must call this. name is that of the model's class. dtype is that of the computation;
    differences within its rounding error are accepted, since kernels may add in another order.
    """
    width = 8 * part.parts
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(vocabulary, (1, width), generator=generator).to(device)
    positions = torch.arange(width, device=device).unsqueeze(0)
    training = model.training
    model.eval()
    try:
        with whole_rows():
            whole = logits(model, {"input_ids": row, "position_ids": positions})
        mine = part.of(width)
        inputs = {"input_ids": row[:, mine], "position_ids": positions[:, mine]}
        shared = logits(model, inputs)
        whole = whole[:, mine].float()
        largest = whole.abs().max().clamp(min=torch.finfo(torch.float32).tiny)  # all may be 0
        difference = (shared.float() - whole).abs().max() / largest
    finally:
        model.train(training)
    dist.all_reduce(difference, op=dist.ReduceOp.MAX, group=group)
    if not float(difference) < max(1e-4, 4 * torch.finfo(dtype).eps):
        raise RecipeError(
            f"{KEY}: {name} computes other logits for a part of a row than for the whole row (they "
            f"differ by {float(difference):.1e}), so a layer besides attention mixes tokens; use 1"
        )
