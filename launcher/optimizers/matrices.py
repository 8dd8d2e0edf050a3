"""Which parameters are matrices: weight decay and Muon are for them.

The shape does not tell. Experts have their biases stacked in two dimensions, a norm over heads has a
row for each head, and a state-space model has a matrix of decay rates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from launcher.models.names import clean_name

_VECTORS = re.compile(r"(?i:bias|norm\d*$|^(A_log|dt_bias|scale|gamma)$)|^[AD]$")
"""Parts of names: of the parameter, and of its module unless that is a linear layer. `a` and `d`
may be matrices, as in `a @ b`."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def decayed_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters with weight decay, by clean name: weights of linear layers, embeddings,
    experts and convolutions over channels. All others scale or shift single features: biases,
    norms, kernels of depthwise convolutions, and the rates of state-space models."""
    return {name: p for name, p, module in _parameters(model) if _is_decayed(name, p, module)}


def orthogonalized_parameters(
    model: nn.Module, blocks: Iterable[nn.Module]
) -> dict[str, torch.Tensor]:
    """The parameters that Muon orthogonalizes, by clean name: matrices of the blocks, and experts
    as one matrix each."""
    inside = {id(p) for block in blocks for p in block.parameters()}
    return {
        name: p
        for name, p, module in _parameters(model)
        if id(p) in inside
        and _is_decayed(name, p, module)
        and not isinstance(module, _CONVOLUTIONS)
        and p.ndim in (2, 3)
        and min(p.shape[-2:]) > 1
    }


def _parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, nn.Module]]:
    modules: dict[str, Any] = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter, modules[name.rpartition(".")[0]]


def _is_decayed(name: str, parameter: torch.Tensor, module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    *_, owner, last = f".{name}".split(".")
    if parameter.ndim < 2 or _VECTORS.search(last):
        return False
    if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
        return "bias" not in owner  # a table of biases of attention is an embedding
    if "norm" in type(module).__name__.lower() or _VECTORS.search(owner):
        return False
    if isinstance(module, _CONVOLUTIONS) and parameter.shape[1] == 1:
        return False
    return sum(size > 1 for size in parameter.shape) > 1
