"""Data sets for other objectives than the next token: scores of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from launcher.data.collation import (
    NOTHING,
    Collated,
    Piece,
    Sample,
    collate_scored,
    last_target,
    make_sample,
)
from launcher.data.dataset import PreferenceDataset
from launcher.models import reward


@dataclass(frozen=True)
class RewardDataset(PreferenceDataset):
    """Pairs of answers for a reward model. Each answer has a score: that of its last token."""

    padding: int = 0
    """The model's id for padding. transformers takes the score of the last other token."""
    metrics: ClassVar[tuple[str, ...]] = reward.METRICS
    trains_tokens: ClassVar[bool] = False

    def loss(self, model: nn.Module, tensors: Mapping[str, Any]) -> torch.Tensor:
        """Sum of the losses of a micro-batch's pairs, and the sums of `metrics`; float32."""
        return reward.summed_reward_loss(model, tensors)

    def __getitem__(self, index: int) -> Sample:
        """As of SequenceDataset, with targets of 0 at the tokens whose score counts and IGNORED
        elsewhere; and `margins` (pairs,), float32."""
        pieces: list[Piece] = [(NOTHING, NOTHING)]
        margins = []
        for _, bounds in self.pairs(index):
            for first, last in bounds:
                ids = self.store.ids[first:last]
                pieces.append((ids, last_target(ids, self.padding)))
            weights = self.store.weights
            margins.append(0.0 if weights is None else float(weights[bounds[0][0]]))
        return make_sample(pieces) | {"margins": np.array(margins, dtype=np.float32)}

    def collate(self, rows: list[Sample]) -> Collated:
        """See `collate_scored`."""
        return collate_scored(
            rows, length=self.length if self.packed else None, masking=self.masking
        )
