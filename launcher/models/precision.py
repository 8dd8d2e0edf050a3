"""Parameters that stay in float32 where the others have 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from launcher.libraries.families import MIXED_DTYPES, STATE_PARAMETERS
from launcher.libraries.private import names_in_float32
from launcher.models.adapted import adapter_parameters
from launcher.models.names import clean_name

if TYPE_CHECKING:
    from launcher.models.load import ModelCheckpoint


def stored_in_float32(source: ModelCheckpoint | None) -> frozenset[str]:
    """Clean names of the parameters that a checkpoint has in float32 while most of it has fewer
    bits, because they are sensitive to rounding, as routers of experts are."""
    if source is None or source.stored.dtype() == torch.float32:
        return frozenset()
    loaded = source.loaded_dtypes.items()
    return frozenset(name for name, dtype in loaded if dtype == torch.float32)


def kept_in_float32(
    model: nn.Module, dtype: torch.dtype, source: ModelCheckpoint | None
) -> frozenset[str]:
    """Clean names of the parameters that are not rounded to this dtype: those that transformers
    keeps in float32, those of recurrent states, and those of `stored_in_float32`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return frozenset()
    parts = names_in_float32(model, dtype)
    stored, kept = stored_in_float32(source), set[str]()
    for name, _ in model.named_parameters(remove_duplicate=False):
        name = clean_name(name)
        recurrent = name.rpartition(".")[2] in STATE_PARAMETERS
        if recurrent or name in stored or any(part in name for part in parts):
            kept.add(name)
    return frozenset(kept)


def computes_in_float32(model: nn.Module, dtype: torch.dtype) -> frozenset[nn.Parameter]:
    """The parameters that forward passes in this dtype use in float32: those that transformers
    keeps in float32, and those of recurrent states. The code of their models expects both dtypes.

    What is merely stored in float32 is not among them: transformers rounds it when it loads a
    model. Adapters are not either: peft casts their inputs to their dtype.
    """
    kept = kept_in_float32(model, dtype, None) - adapter_parameters(model)
    return frozenset(
        parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if clean_name(name) in kept and parameter.dtype == torch.float32
    )


def mixes_dtypes(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether forward passes with weights in this dtype need autocast."""
    names = {type(module).__name__ for module in model.modules()}
    return dtype in (torch.bfloat16, torch.float16) and not MIXED_DTYPES.isdisjoint(names)
