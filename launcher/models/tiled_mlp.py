"""MLPs that compute some tokens at a time (`model.mlp_tile`).

An MLP keeps several activations of the intermediate size for each token until its backward pass. With
tiles it keeps its input only. The backward pass computes each tile again, and its gradients at once, so
that the intermediate activations of one tile exist at a time (TiledMLP: Bekman et al., 2025, arXiv
2506.13996, section 3.1.2). The results are the same up to rounding: an MLP sees each token for itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from launcher.errors import RecipeError
from launcher.libraries.families import MLPS
from launcher.models.experts import find_experts

KEY = "model.mlp_tile"


def tile_mlps(model: nn.Module, blocks: Mapping[str, nn.Module], tile: int) -> None:
    """Makes the MLP of each block compute `tile` tokens at a time. Raises RecipeError if blocks have no
    MLP that can do so."""
    name = type(model).__name__
    if find_experts(model):
        raise RecipeError(f"{KEY}: the blocks of {name} have experts; set it to null")
    found = [child for block in blocks.values() for child in _mlps(block)]
    if not found:
        what = f"the blocks of {name} have no module named {' or '.join(MLPS)}"
        raise RecipeError(f"{KEY}: {what}; set it to null")
    for mlp in found:
        if len(inspect.signature(mlp.forward).parameters) > 1:
            what = f"the MLPs of {name} compute with more than one tensor"
            raise RecipeError(f"{KEY}: {what}; set it to null")
        if any(map(_drops, mlp.modules())):
            what = f"the MLPs of {name} have dropout, and a tile would draw other numbers again"
            raise RecipeError(f"{KEY}: {what}; set the dropout to 0, or {KEY} to null")
        if not isinstance(mlp, TiledMLP):
            own = type(mlp)
            mlp.__class__ = type(own.__name__, (TiledMLP, own), {})
        assert isinstance(mlp, TiledMLP)
        mlp.tile = tile


def _mlps(block: nn.Module) -> list[nn.Module]:
    return [child for name, child in block.named_children() if name in MLPS]


def _drops(module: nn.Module) -> bool:
    """Whether it has dropout: it is one, or has the rate for a function (Starcoder 2, Seed-OSS)."""
    if isinstance(module, nn.Dropout):
        return module.p > 0
    rates = (value for name, value in vars(module).items() if "dropout" in name)
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


class TiledMLP(nn.Module):
    """Mixed into the class of an MLP."""

    tile: int
    """Tokens of a tile."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (..., features). Returns as many features of as many tokens."""
        tokens = hidden.numel() // hidden.shape[-1]
        if tokens <= self.tile:
            whole: torch.Tensor = super().forward(hidden)
            return whole
        out: torch.Tensor = _computed_in_tiles(self, hidden)
        return out


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="a backward pass that computes a tile again"
)
def _computed_in_tiles(mlp: TiledMLP, hidden: torch.Tensor) -> torch.Tensor:
    names, parameters = zip(*mlp.named_parameters(), strict=True)
    out: torch.Tensor = _Tiled.apply(  # type: ignore[no-untyped-call]
        mlp, names, hidden.reshape(-1, hidden.shape[-1]), *parameters
    )
    return out.view(*hidden.shape[:-1], -1)


def _tiles(tensor: torch.Tensor, tile: int) -> list[torch.Tensor]:
    return [tensor[start : start + tile] for start in range(0, len(tensor), tile)]


class _Tiled(torch.autograd.Function):
    """The parameters are inputs, so that FSDP and DDP find their gradients as those of other layers, and
    the backward pass computes with the ones of the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, mlp: TiledMLP, names: tuple[str, ...], hidden: torch.Tensor, *parameters: Any
    ) -> torch.Tensor:
        ctx.mlp, ctx.names = mlp, names
        kind = hidden.device.type
        ctx.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        ctx.save_for_backward(hidden, *parameters)
        whole = super(TiledMLP, mlp).forward
        out: torch.Tensor | None = None
        for number, part in enumerate(_tiles(hidden, mlp.tile)):
            found, start = whole(part), number * mlp.tile
            if out is None:  # not all parts and their concatenation
                out = found.new_empty(len(hidden), found.shape[-1])
            out[start : start + len(part)] = found
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, *parameters = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        own = {
            name: each.detach().requires_grad_(wants)
            for name, each, wants in zip(ctx.names, parameters, wanted, strict=True)
        }
        trained = [each for each in own.values() if each.requires_grad]
        # In float32: a sum of many tiles in 16 bits would be rounded after each
        sums = [torch.zeros_like(each, dtype=torch.float32) for each in trained]
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[2] else None
        parts, of_parts = (_tiles(each, ctx.mlp.tile) for each in (hidden, gradient))
        for number, (part, of_part) in enumerate(zip(parts, of_parts, strict=True)):
            inputs = part.detach().requires_grad_(of_hidden is not None)
            with torch.enable_grad(), _autocast(hidden.device.type, *ctx.autocast):
                out = functional_call(ctx.mlp, own, (inputs,))
            asked = [*([inputs] if of_hidden is not None else []), *trained]
            found = list(torch.autograd.grad(out, asked, of_part))
            if of_hidden is not None:
                start = number * ctx.mlp.tile
                of_hidden[start : start + len(part)] = found.pop(0)
            for total, each in zip(sums, found, strict=True):
                total += each
        made = iter(sums)
        of_parameters = [
            next(made).to(each.dtype) if each.requires_grad else None for each in own.values()
        ]
        return None, None, of_hidden, *of_parameters


def _autocast(device: str, enabled: bool, dtype: torch.dtype) -> AbstractContextManager[object]:
    return torch.autocast(device, dtype=dtype, enabled=enabled)
