"""Names of a model's tensors, whatever wraps their modules."""

from __future__ import annotations

import torch
from torch import nn

from launcher.libraries.private import CHECKPOINT_PREFIX


def clean_name(name: str) -> str:
    """A name without the parts that activation checkpointing and peft's adapters insert."""
    for inserted in (CHECKPOINT_PREFIX, "base_layer"):
        name = name.replace(f"{inserted}.", "").removesuffix(inserted)
    return name.rstrip(".")


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by clean name; a tied one under each of its names."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {clean_name(name): tensor for name, tensor in (*parameters, *buffers)}
