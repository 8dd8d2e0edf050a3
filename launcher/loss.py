"""The training loss: summed over tokens, so that who computes it can divide by the tokens of the whole global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

IGNORED = -100
"""A target that carries no loss."""


def summed_loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """Sum of the next-token cross-entropies of a micro-batch, in float32; a scalar.

    micro_batch: `input_ids` and `targets` (batch, tokens), targets already shifted: targets[b, t] is what follows
    input_ids[b, t], IGNORED where no loss is due; `position_ids` (batch, tokens) where documents are packed.
    """
    inputs = {name: tensor for name, tensor in micro_batch.items() if name != "targets"}
    logits = model(**inputs, use_cache=False).logits
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), micro_batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
