"""Micro-batches of random tokens, as large as the recipe's, for planning without the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from launcher.data.batching import rows_of
from launcher.data.collation import (
    collate_masked,
    collate_pairs,
    collate_scored,
    collate_sequences,
    last_target,
    make_sample,
    with_positions,
)
from launcher.data.custom import CustomDataset, build_custom_data
from launcher.data.loader import GlobalBatch, StepStatistics, StepTotals, Tensors, to_device
from launcher.data.objectives import collate_distilled, top_k_dtype
from launcher.data.token_store import ModelInputs
from launcher.distributed.rank_layout import RankLayout
from launcher.models.distillation import summed_distillation_loss
from launcher.models.inputs import IGNORED
from launcher.models.loss import Loss, summed_classification_loss, summed_loss
from launcher.models.preference import summed_preference_loss
from launcher.models.reward import summed_reward_loss
from launcher.recipe import schema


@dataclass(frozen=True)
class SyntheticData:
    """A micro-batch in host memory."""

    tensors: Tensors
    loss: Loss
    tokens: int
    loss_tokens: int

    def batches(
        self, ranks: RankLayout, *, micro_batches: int, steps: int
    ) -> Iterator[GlobalBatch]:
        """The same micro-batches in each step, on the device."""
        totals = StepTotals(self.loss_tokens * micro_batches, self.tokens * micro_batches)
        for step in range(1, steps + 1):
            moved = [to_device(self.tensors, ranks.device) for _ in range(micro_batches)]
            yield GlobalBatch(step, moved, StepStatistics(totals, ranks), step, 0.0)


def synthetic_data(
    data: schema.Data,
    batch: schema.Batch,
    *,
    model: ModelInputs,
    packed: bool,
    documents: int = 2,
    distillation: schema.Distillation | None = None,
) -> SyntheticData:
    """A micro-batch of full sequences; with data.builder, of its first samples. packed: each row has
    this number of documents of equal length."""
    length = data.sequence_length
    rows = rows_of(batch, sequence_length=length)
    summed: Loss = summed_loss
    drawn = np.random.default_rng(0)
    ids = [drawn.integers(0, model.vocabulary or 2, length, dtype=np.int64) for _ in range(rows)]
    if data.builder is not None:
        custom = build_custom_data(data.builder, data.arguments)
        samples = CustomDataset(custom.train, custom, data.builder)
        collated = samples.collate([samples[index % len(samples)] for index in range(rows)])
        summed = samples.loss
    elif data.kind == "classification":
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[0, -1] = 0  # without padding, some models build no mask
        tensors = {
            "input_ids": torch.from_numpy(np.stack(ids)),
            "attention_mask": mask,
            "targets": torch.from_numpy(
                drawn.integers(0, model.classes or 2, rows, dtype=np.int64)
            ),
        }
        collated = {"tensors": tensors, "tokens": rows * length, "loss_tokens": rows}
        summed = summed_classification_loss
    elif model.task == "masked_lm":
        summed = partial(summed_loss, target_loss=model.target_loss)
        predicted = drawn.random((rows, length)) < data.mask_probability
        ids[0] = ids[0][:-1]  # without padding, some models build no mask
        masked = [
            {"input_ids": row, "targets": np.where(where[: len(row)], row, IGNORED)}
            for row, where in zip(ids, predicted, strict=True)
        ]
        collated = collate_masked(
            masked, length=length, padding=model.padding, width_multiple=length
        )
        if model.target_loss is not None:
            collated = with_positions(collated)
    elif model.task == "reward":  # a pair in each row
        answers = ((half, last_target(half)) for half in np.array_split(ids[0], 2))
        scored = make_sample(answers) | {"margins": np.zeros(1, dtype=np.float32)}
        collated = collate_scored(
            [scored] * rows, length=length, packed=True, masking=model.masking
        )
        summed = summed_reward_loss
    elif data.kind == "preference":  # a pair in each row, whose tokens all have a loss
        halves = [np.array_split(row, 2) for row in ids]
        pairs = [
            make_sample((half, half) for half in both)
            | {
                "answers": np.repeat([2 * number, 2 * number + 1], list(map(len, both))),
                "reference": np.zeros(length, dtype=np.float32),
            }
            for number, both in enumerate(halves)
        ]
        collated = collate_pairs(pairs, length=length, packed=True, masking=model.masking)
        # The other losses take as much memory and time
        summed = partial(summed_preference_loss, settings=schema.Preference())
    else:
        sequences = [
            make_sample((part, part) for part in np.array_split(row, documents if packed else 1))
            for row in ids
        ]
        collated = collate_sequences(
            sequences, length=length, packed=packed, masking=model.masking, part=model.part
        )
        if model.target_loss is not None:
            collated = with_positions(collated)
            summed = partial(summed_loss, target_loss=model.target_loss)
        if distillation is not None:
            teacher = np.zeros(rows * length, dtype=top_k_dtype(distillation.top_k))
            teacher["id"] = np.arange(distillation.top_k) % (model.vocabulary or 1)
            collated = collate_distilled(collated, [teacher])
            summed = partial(summed_distillation_loss, settings=distillation)
    return SyntheticData(collated["tensors"], summed, collated["tokens"], collated["loss_tokens"])
