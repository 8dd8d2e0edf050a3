"""A linear layer, such as a head, applied to a chunk of its rows at a time, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from launcher.models import tracing


def linear_gradients(
    ctx: Any,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    of_chunk: Callable[[slice], torch.Tensor],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of `inputs` (in float32), `weight` and `bias` that autograd's `ctx` needs, from
    those of the logits of each chunk."""
    of_inputs, of_weight, of_bias, *_ = ctx.needs_input_grad
    # A sum over the chunks is kept in float32; rows of the weight's gradient are written once
    d_inputs = torch.zeros_like(inputs, dtype=torch.float32) if of_inputs else None
    d_weight = torch.empty_like(weight) if of_weight else None
    d_bias = torch.empty_like(bias) if of_bias and bias is not None else None
    with torch.autocast(inputs.device.type, enabled=False):
        chunks = chunks_of(weight, ctx.chunking.width)
        if tracing.current() is not None:  # all but a narrower last chunk take the same memory
            chunks = chunks[:1] + chunks[1:][-2:]
        for chunk in chunks:
            d_logits = of_chunk(chunk)
            if d_inputs is not None:
                d_inputs += d_logits @ weight[chunk].to(inputs.dtype)
            if d_weight is not None and d_weight.dtype == d_logits.dtype:
                torch.mm(d_logits.T, inputs, out=d_weight[chunk])
            elif d_weight is not None:
                d_weight[chunk] = d_logits.T @ inputs
            if d_bias is not None:
                d_bias[chunk] = d_logits.sum(0)
            del d_logits  # so that it is not held beside the next chunk's logits
    return d_inputs, d_weight, d_bias


def chunks_of(weight: torch.Tensor, width: int) -> list[slice]:
    """The rows of each chunk."""
    size = len(weight)
    return [slice(begin, min(begin + width, size)) for begin in range(0, size, width)]


def logits_of(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk: slice
) -> torch.Tensor:
    """(tokens, width of the chunk), in the dtype of the inputs."""
    logits = inputs @ weight[chunk].to(inputs.dtype).T
    if bias is not None:
        logits += bias[chunk].to(inputs.dtype)
    return logits
