"""An exponential moving average (EMA) of the trained weights.

It is a part of the optimizer's state, sharded like the weights: `ema` of each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from launcher.checkpoint.state import AVERAGE
from launcher.models.shards import local_rows


def create_averages(optimizer: torch.optim.Optimizer) -> None:
    """Starts an average with the present weights."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter][AVERAGE] = parameter.detach().clone()


def _local_parts(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's rows of each average and of its weights."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            average = optimizer.state[parameter][AVERAGE]
            yield local_rows(average)[0], local_rows(parameter.detach())[0]


@torch.no_grad()
def update_averages(optimizer: Any, decay: float) -> None:  # with `found_inf`, as torch sets it
    """After a step of the optimizer: the averages become decay * average + (1 - decay) * weights. A
    skipped step does not change them."""
    share = (1 - decay) * (1 - optimizer.found_inf)
    for average, weights in _local_parts(optimizer):
        average.lerp_(weights, share)


@contextmanager
def averages_in_place(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Swaps the weights with their averages."""
    _swap(optimizer)
    try:
        yield
    finally:
        _swap(optimizer)


@torch.no_grad()
def _swap(optimizer: torch.optim.Optimizer) -> None:
    for average, weights in _local_parts(optimizer):
        kept = weights.clone()
        weights.copy_(average)
        average.copy_(kept)
