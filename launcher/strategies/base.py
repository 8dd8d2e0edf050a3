"""What every strategy gives the training loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

Fill = Callable[[nn.Module, torch.device, torch.device], None]
"""Gives a meta model its weights: fill(model, device of parameters, device of buffers)."""


class WrappedModel(Protocol):
    """A model on its ranks, ready to train."""

    model: nn.Module
    """Call this."""
    module: nn.Module
    """The model inside of it, for its parameters, names and config."""

    def description(self) -> str:
        """What was really done, as seen on the wrapped model."""

    def forward_context(self) -> AbstractContextManager[object]:
        """The precision that forward passes run in."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch: decides whether gradients are reduced in it."""

    def reshard(self) -> None:
        """After forward passes that no backward pass followed: frees what they left gathered."""

    def grad_norm(self) -> torch.Tensor:
        """2-norm of the gradients over all parameters and ranks: a scalar, the same on every rank, not yet computed
        when this returns. Gradients are read as they are, so a loss scale is still in it."""
