"""Training losses: summed over targets, so that who computes one can divide by the targets of the whole global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

IGNORED = -100
"""A target that carries no loss."""

Loss = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]
"""loss(model, micro-batch): the sum over the micro-batch's targets, a float32 scalar."""


def summed_loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """Sum of the next-token cross-entropies of a micro-batch, in float32; a scalar.

    micro_batch: `input_ids` and `targets` (batch, tokens), targets already shifted: targets[b, t] is what follows
    input_ids[b, t], IGNORED where no loss is due; `position_ids` (batch, tokens) where documents are packed, and what
    else the model's forward takes.
    """
    inputs = {name: value for name, value in micro_batch.items() if name != "targets"}
    logits = model(**inputs, use_cache=False).logits
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), micro_batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def summed_classification_loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """Sum of the cross-entropies of a micro-batch's classes, in float32; a scalar.

    micro_batch: `input_ids` and `attention_mask` (batch, tokens), `targets` (batch,), IGNORED where no loss is due.
    """
    inputs = {name: value for name, value in micro_batch.items() if name != "targets"}
    logits = model(**inputs).logits
    return nn.functional.cross_entropy(logits.float(), micro_batch["targets"], ignore_index=IGNORED, reduction="sum")
