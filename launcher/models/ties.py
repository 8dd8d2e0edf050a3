"""Parameters that several modules share, such as the input and the output embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from launcher.models.names import clean_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of clean names that share a parameter, in the order of the modules."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean_name(name))
    return [tied for tied in names.values() if len(tied) > 1]


def untie(model: nn.Module, name: str) -> None:
    """Gives a name of a tied parameter of a meta model, not yet wrapped, its own parameter."""
    parent, _, attribute = name.rpartition(".")
    own = nn.Parameter(torch.empty_like(model.get_parameter(name)))
    setattr(model.get_submodule(parent), attribute, own)
    config_untied(model.config)
    getattr(model, "all_tied_weights_keys", {}).pop(name, None)


def config_untied(config: PreTrainedConfig) -> None:
    """Changes a config of transformers so that the output embedding has weights of its own."""
    for part in (config, config.get_text_config(decoder=True)):
        part.tie_word_embeddings = False
