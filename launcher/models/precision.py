"""Frozen parameters that are held in float32 where the others have 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from launcher.libraries.private import names_in_float32
from launcher.models.initialization import clean_name

if TYPE_CHECKING:
    from launcher.models.load import ModelCheckpoint

_RECURRENT = ("A_log", "dt_bias", "D")
"""Parameters of Mamba and of gated delta networks, of which the decay of a state is computed."""


def kept_in_float32(
    model: nn.Module, dtype: torch.dtype, source: ModelCheckpoint | None
) -> frozenset[str]:
    """Clean names of the parameters that are not rounded to this dtype: those that transformers
    keeps in float32, those of recurrent states, and those that the checkpoint `source` has in
    float32 while most of it has 16 bits."""
    if dtype not in (torch.bfloat16, torch.float16):
        return frozenset()
    parts = names_in_float32(model, dtype)
    loaded = {} if source is None else source.loaded_dtypes
    mostly_float32 = source is None or source.stored.dtype() == torch.float32
    kept = set[str]()
    for name, _ in model.named_parameters(remove_duplicate=False):
        name = clean_name(name)
        stored = not mostly_float32 and loaded.get(name) == torch.float32
        if stored or name.rpartition(".")[2] in _RECURRENT or any(part in name for part in parts):
            kept.add(name)
    return frozenset(kept)
