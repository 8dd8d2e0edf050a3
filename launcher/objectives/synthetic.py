"""Micro-batches of random tokens, as large as the recipe's, for planning without the data."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from launcher.data.batching import rows_of
from launcher.data.loader import (
    GlobalBatch,
    MicroBatches,
    StepStatistics,
    StepTotals,
    to_device,
)
from launcher.data.token_store import ModelTraits
from launcher.distributed.rank_layout import RankLayout
from launcher.models.micro_batch import MicroBatch
from launcher.objectives.base import Example, Objective
from launcher.objectives.loss import Loss
from launcher.recipe import schema


@dataclass(frozen=True)
class SyntheticData:
    """A micro-batch in host memory."""

    micro_batch: MicroBatch
    loss: Loss
    tokens: int
    loss_tokens: int

    def batches(
        self, ranks: RankLayout, *, micro_batches: int, steps: int
    ) -> Iterator[GlobalBatch]:
        """The same micro-batches in each step, on the device."""
        totals = StepTotals(self.loss_tokens * micro_batches, self.tokens * micro_batches)
        for step in range(1, steps + 1):
            copy = functools.partial(to_device, device=ranks.device)
            moved = MicroBatches([self.micro_batch] * micro_batches, copy)
            yield GlobalBatch(step, moved, StepStatistics(totals, ranks), step, 0.0)


def synthetic_data(
    objective: Objective,
    data: schema.Data,
    batch: schema.Batch,
    *,
    model: ModelTraits,
    packed: bool,
    documents: int = 2,
) -> SyntheticData:
    """A micro-batch of full sequences; with data.builder, of its first samples. packed: each row has
    this number of documents of equal length."""
    about = Example(
        data,
        rows_of(batch, row_length=data.row_length),
        model.inputs(data.row_length, packed=packed),
        documents=documents,
        vocabulary=model.vocabulary or 2,
        classes=model.classes or 2,
        generator=np.random.default_rng(0),
    )
    objective, made = objective.with_example(about)
    return SyntheticData(made.micro_batch, objective.loss, made.tokens, made.loss_tokens)
