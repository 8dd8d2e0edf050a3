"""Passes over a data set without training: each sample once, in the order of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from launcher.console import task
from launcher.data.batching import RankBatchSampler, SampleOrder
from launcher.data.collation import Collated
from launcher.data.dataset import MapData
from launcher.data.loader import make_loader, to_device
from launcher.data.run_data import raise_error
from launcher.distributed.process_group import gather
from launcher.distributed.rank_layout import RankLayout
from launcher.recipe import schema
from launcher.strategies.base import WrappedModel


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
    forward passes."""
    global_batch_size = micro_batch_size * ranks.data_parallel_size
    batches = -(-(len(dataset) - first) // global_batch_size)
    sampler = RankBatchSampler(
        order=SampleOrder(samples=len(dataset), seed=0, shuffle=False, epochs=1),
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        rank=ranks.data_parallel_rank,
        ranks=ranks.data_parallel_size,
        first_step=0,
        first_sample=first,
        steps=batches if max_batches is None else min(batches, max_batches),
    )
    return make_loader(
        dataset,
        sampler,
        data,
        seed=ranks.data_parallel_rank,
        persistent_workers=persistent_workers,
        device=ranks.device,
    )


@torch.no_grad()
def rows_in_order(
    dataset: MapData,
    data: schema.Data,
    wrapped: WrappedModel,
    compute: Callable[[Mapping[str, Any], Collated], torch.Tensor],
    *,
    first: int,
    micro_batch_size: int,
    ranks: RankLayout,
    what: str,
) -> Iterator[torch.Tensor]:
    """On rank 0 the rows that `compute` returns for the tensors of a micro-batch and for all of it,
    in the order of the samples from `first` on, for one micro-batch of each rank at a time; on the
    other ranks tensors without rows. Every rank must read all. `what` names the task."""
    loader = evaluation_batches(
        dataset,
        data,
        micro_batch_size=micro_batch_size,
        max_batches=None,
        ranks=ranks,
        first=first,
    )
    steps = -(-(len(dataset) - first) // (micro_batch_size * ranks.data_parallel_size))
    with forward_only(wrapped), task(what, steps) as advance:
        for collated in map(raise_error, loader):
            micro_batch = to_device(collated["tensors"], ranks.device)
            with wrapped.forward_context():
                rows = compute(micro_batch, collated)
            advance(1)
            yield _on_rank_0(rows[:0] if ranks.tensor_parallel_rank else rows, ranks)


def _on_rank_0(rows: torch.Tensor, ranks: RankLayout) -> torch.Tensor:
    """The rows of all ranks, by rank; on the other ranks none."""
    counts = gather(len(rows), ranks.group)
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts] if ranks.rank == 0 else None
    dist.gather(padded, parts, group=ranks.group, group_dst=0)
    found = [part[:count] for part, count in zip(parts or (), counts, strict=False)]
    return torch.cat(found) if found else rows[:0]


@contextmanager
def forward_only(wrapped: WrappedModel) -> Iterator[None]:
    """Around forward passes without backward passes."""
    wrapped.model.eval()
    yield
    wrapped.reshard()
    wrapped.model.train()
