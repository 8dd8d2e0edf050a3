"""Dropout whose masks do not depend on how texts are divided into micro-batches and ranks.

torch draws the mask of a whole tensor from a generator. Here whether a number is dropped is a hash of
the step's seed, the text, the position in the text, the layer and the feature: a counter in the place of
a state (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). So the mask is also the
same in a second forward pass and whatever the padding. Dropout that attention applies to its weights is
not replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

_MASK = 0xFFFFFFFF


@dataclass
class SampleDropout:
    """What the dropout layers of a model share."""

    layers: dict[nn.Module, int] = field(default_factory=dict)
    """The number of each layer."""
    keys: torch.Tensor | None = None
    """(rows, tokens): of the micro-batch that is computed. It stays until the next one: activation
    checkpointing computes the same layers again in the backward pass, on another thread on a GPU."""

    @property
    def active(self) -> bool:
        """Whether a layer drops anything in training."""
        return any(float(layer.p) > 0 for layer in self.layers)  # type: ignore[arg-type]

    def drop(self, layer: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """The forward pass of a layer: drops numbers of (rows, tokens, features). Of tensors of other
        shapes it drops as torch does."""
        share, keys = float(layer.p), self.keys  # type: ignore[arg-type]
        if not layer.training or share == 0.0:
            return inputs
        if keys is None or inputs.ndim != 3 or inputs.shape[:2] != keys.shape:
            return nn.functional.dropout(inputs, share, True)
        of_layer = mix(keys ^ (self.layers[layer] * 0x9E3779B1 & _MASK))
        features = mix(torch.arange(1, inputs.shape[-1] + 1, device=inputs.device))
        kept = mix(of_layer[..., None] ^ features) >= int(share * 2**32)
        return inputs * (kept.to(inputs.dtype) / (1 - share))


def mix(value: torch.Tensor) -> torch.Tensor:
    """A hash of numbers below 2^32 (the function lowbias32 of C. Wellons), int64."""
    value = (value ^ (value >> 16)) * 0x7FEB352D & _MASK
    value = (value ^ (value >> 15)) * 0x846CA68B & _MASK
    return value ^ (value >> 16)


def keys_of(seed: torch.Tensor, texts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A number for each position of each text, int64. seed: (1,). texts: numbers of the texts."""
    return mix(mix(mix(seed & _MASK) ^ (texts & _MASK)) ^ (positions & _MASK))


def use_sample_dropout(model: nn.Module) -> SampleDropout:
    """Replaces the forward methods of the dropout layers of a model."""
    shared = SampleDropout()
    for layer in model.modules():
        if type(layer) is nn.Dropout:
            shared.layers[layer] = len(shared.layers) + 1
            layer.forward = _Forward(shared, layer)  # type: ignore[assignment, method-assign]
    return shared


@dataclass
class _Forward:
    """A forward method that a copy of the model can have, too."""

    shared: SampleDropout
    layer: nn.Module

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.shared.drop(self.layer, inputs)
