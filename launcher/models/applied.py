"""What has been done to a model: one record on it, which all changes and their readers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class Applied:
    """The changes of a model. A copy of the model has a copy of its record."""

    token_scores: Any = None
    """The `TokenScores` of a reward model. (Both classes import this module.)"""
    chunked_head: Any = None
    """The `ChunkedHead`, with which the model computes the loss without full logits."""


def applied(model: nn.Module) -> Applied:
    """The record of a model, perhaps wrapped by DDP. It can be written to."""
    inner: nn.Module = getattr(model, "module", model)
    record: Applied = vars(inner).setdefault("launcher_changes", Applied())
    return record
