"""The collectives of layers that ranks divide, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from launcher.distributed.process_group import all_gather_single


def copied(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same values; the gradients of all ranks are summed."""
    out: torch.Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks, all of which must use it in the same way."""
    total: torch.Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def gathered(x: torch.Tensor, group: dist.ProcessGroup, widths: Sequence[int]) -> torch.Tensor:
    """The last dimensions of all ranks, which have these widths, joined. All ranks must use the
    result in the same way."""
    whole: torch.Tensor = _Gather.apply(x, group, widths)  # type: ignore[no-untyped-call]
    return whole


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, widths: Sequence[int]
    ) -> torch.Tensor:
        ctx.widths, ctx.rank = list(widths), group.rank()
        padded = functional.pad(x, (0, widths[0] - x.shape[-1])).contiguous()
        parts = padded.new_empty(len(widths) * padded.numel())
        all_gather_single(parts, padded.view(-1), group=group)
        parts = parts.view(len(widths), *padded.shape)
        return torch.cat([p[..., :width] for p, width in zip(parts, widths, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.split(gradient, ctx.widths, -1)[ctx.rank], None, None
