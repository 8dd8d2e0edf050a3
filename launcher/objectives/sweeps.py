"""Passes over a data set without training: each sample once, in the order of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from launcher.console import task
from launcher.data.batching import (
    BatchSampler,
    JoinedBatchSampler,
    RankBatchSampler,
    SampleOrder,
)
from launcher.data.collation import Collated, raise_error
from launcher.data.dataset import MapData, SequenceDataset
from launcher.data.loader import make_loader, to_device
from launcher.distributed.process_group import gather
from launcher.distributed.rank_layout import RankLayout
from launcher.models.micro_batch import MicroBatch
from launcher.recipe import schema
from launcher.strategies.base import WrappedModel

_TOGETHER = 8
"""Micro-batches of full rows that samples are drawn for at once, where they share rows."""


def evaluation_batches(
    dataset: MapData,
    data: schema.Data,
    *,
    micro_batch_size: int,
    max_batches: int | None,
    ranks: RankLayout,
    persistent_workers: bool = False,
    first: int = 0,
) -> DataLoader[Any]:
    """This rank's micro-batches of each sample from `first` on once, in the order of the files.
    Positions after the last sample are empty rows: with sharding, all ranks need the same number of
    forward passes. max_batches: of `micro_batch_size` samples on each rank, that are evaluated.

    Samples that share rows come in this order by `_TOGETHER` micro-batches of full rows."""
    return make_loader(
        dataset,
        _sampler(
            dataset,
            micro_batch_size=micro_batch_size,
            max_batches=max_batches,
            ranks=ranks,
            first=first,
        ),
        data,
        seed=ranks.data_parallel_rank,
        persistent_workers=persistent_workers,
        device=ranks.device,
    )


def _sampler(
    dataset: MapData,
    *,
    micro_batch_size: int,
    max_batches: int | None,
    ranks: RankLayout,
    first: int,
) -> BatchSampler:
    at_once, samples = micro_batch_size * ranks.data_parallel_size, len(dataset)
    if max_batches is not None:
        samples = min(samples, first + max_batches * at_once)
    part: dict[str, Any] = {
        "order": SampleOrder(samples=samples, seed=0, shuffle=False, epochs=1),
        "rank": ranks.data_parallel_rank,
        "ranks": ranks.data_parallel_size,
        "first_step": 0,
        "first_sample": first,
    }
    if not dataset.joined:
        steps = -(-(samples - first) // at_once)
        return RankBatchSampler(
            global_batch_size=at_once, micro_batch_size=micro_batch_size, steps=steps, **part
        )
    assert isinstance(dataset, SequenceDataset)
    assert dataset.lengths is not None
    full = at_once * dataset.length * len(dataset) / max(1, dataset.tokens)
    together = max(1, int(_TOGETHER * full))
    return JoinedBatchSampler(
        global_batch_size=together,
        lengths=dataset.lengths,
        row_length=dataset.length,
        rows=micro_batch_size,
        steps=-(-(samples - first) // together),
        **part,
    )


def rows_in_order(
    dataset: MapData,
    data: schema.Data,
    wrapped: WrappedModel,
    compute: Callable[[MicroBatch, Collated], torch.Tensor],
    *,
    first: int,
    micro_batch_size: int,
    ranks: RankLayout,
    what: str,
) -> Iterator[torch.Tensor]:
    """On rank 0 the rows that `compute` returns for the tensors of a micro-batch and for all of it,
    in the order of `evaluation_batches` from `first` on, for one micro-batch of each rank at a time;
    on the other ranks tensors without rows. Every rank must read all. `what` names the task."""
    loader = evaluation_batches(
        dataset,
        data,
        micro_batch_size=micro_batch_size,
        max_batches=None,
        ranks=ranks,
        first=first,
    )
    sampler: Any = loader.batch_sampler
    count = sum(map(sampler.micro_batches, range(sampler.steps)))
    with wrapped.evaluating(), task(what, count) as advance:
        for collated in map(raise_error, loader):
            rows = compute(to_device(collated.micro_batch, ranks.device), collated)
            advance(1)
            yield _on_rank_0(rows if ranks.counts else rows[:0], ranks)


def _on_rank_0(rows: torch.Tensor, ranks: RankLayout) -> torch.Tensor:
    """The rows of all ranks, by rank; on the other ranks none."""
    counts = gather(len(rows), ranks.group)
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts] if ranks.rank == 0 else None
    dist.gather(padded, parts, group=ranks.group, group_dst=0)
    found = [part[:count] for part, count in zip(parts or (), counts, strict=False)]
    return torch.cat(found) if found else rows[:0]
