"""DoRA (Liu et al., 2024): adapters that also train the norm of each row of a weight.

A row of the weight is m * v / ||v||, where v is the row of W + scale * B A, and the magnitude m is
trained. ||v|| counts as a constant in the backward pass, as in the paper and in peft.
"""

from __future__ import annotations

from typing import Any

import torch

from launcher.models.nf4 import unpacked, without_autocast

_TINY = torch.finfo(torch.float32).tiny


class Dora:
    """Takes the place of peft's forward pass, which makes a matrix of the size of the weight and
    another of its inputs squared."""

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        """The output of a layer, from its inputs and from the `result` without the adapter."""
        base, scale = module.base_layer, module.scaling[active_adapter]
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        magnitude = module.lora_magnitude_vector[active_adapter].weight
        change = up(down(module.lora_dropout[active_adapter](x))) * scale
        weight = unpacked(base.weight, result.dtype)
        norms = _row_norms(weight, down.weight, up.weight, scale)
        # Of what the layer computes, a small part: so it keeps its precision in 16 bits. Rounded
        # like the magnitudes, equal norms cancel
        growth = magnitude.float() / norms.to(magnitude.dtype).float() - 1
        bias = base.bias
        product = (result if bias is None else result - bias) + change
        product = product.to(result.dtype)
        grown: torch.Tensor = torch.addcmul(product, product, growth.to(product.dtype))
        return grown if bias is None else grown + bias


@torch.no_grad()
def _row_norms(
    weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    """The norms of the rows of weight + scale * up @ down, in float32, without that sum."""
    with without_autocast(weight):
        down, up = down.float(), up.float()
        norms: torch.Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
        squares = norms.square()
        mixed = (weight @ down.T.to(weight.dtype)).float()
        squares += scale * (up * (2 * mixed + scale * (up @ (down @ down.T)))).sum(1)
        return squares.clamp(min=_TINY).sqrt()
