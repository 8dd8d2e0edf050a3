"""Noise on the embeddings of tokens in training: NEFTune (Jain et al., 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.description import embeddings

ALPHA = "neftune_noise_alpha"
"""Attribute of the embedding: model.neftune_noise_alpha."""


def add_noise(model: nn.Module, alpha: float) -> None:
    """Adds uniform noise to the output (rows, tokens, hidden size) of the input embedding in training:
    at most alpha / sqrt(tokens x hidden size) in each number, as in transformers. It is drawn by the
    generator of dropout, which checkpoints restore. Blocks that are computed again do not draw it again:
    the embedding is outside of them."""
    embedding = embeddings(model)[0]
    if not isinstance(embedding, nn.Module):
        raise RecipeError(f"model.{ALPHA}: {type(model).__name__} names no input embedding")
    setattr(embedding, ALPHA, alpha)
    embedding.register_forward_hook(_with_noise)


def _with_noise(module: Any, arguments: object, output: torch.Tensor) -> torch.Tensor:
    alpha: float = getattr(module, ALPHA)
    if not module.training or alpha == 0:
        return output
    bound = alpha / (output.shape[-2] * output.shape[-1]) ** 0.5
    return output + torch.empty_like(output).uniform_(-bound, bound)
