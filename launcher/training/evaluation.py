"""Loss on the validation data: weighted by tokens, each sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from launcher.data.batching import RankBatchSampler, SampleOrder
from launcher.data.dataset import MapData
from launcher.data.loader import StepStatistics, make_loader, to_device
from launcher.distributed.process_group import DataParallel
from launcher.recipe import schema
from launcher.strategies.base import WrappedModel


@dataclass(frozen=True)
class Evaluated:
    """The loss of a validation set."""

    loss: float
    """Mean over the tokens with a target."""
    tokens: int
    """Tokens with a target."""


class Evaluator:
    """Evaluates the same samples of each validation set each time, in the order of the files."""

    def __init__(
        self,
        datasets: Mapping[str, MapData],
        *,
        data: schema.Data,
        micro_batch_size: int,
        max_batches: int | None,
        ranks: DataParallel,
    ) -> None:
        self._loaders: dict[str, tuple[MapData, Iterable[dict[str, Any]]]] = {}
        global_batch_size = micro_batch_size * ranks.size
        for name, dataset in datasets.items():
            batches = -(-len(dataset) // global_batch_size)
            # Positions beyond the last sample are empty rows: with sharding, all ranks need the same
            # number of forward passes
            sampler = RankBatchSampler(
                order=SampleOrder(samples=len(dataset), seed=0, shuffle=False, epochs=1),
                global_batch_size=global_batch_size,
                micro_batch_size=micro_batch_size,
                rank=ranks.rank,
                ranks=ranks.size,
                first_step=0,
                steps=batches if max_batches is None else min(batches, max_batches),
            )
            loader = make_loader(
                dataset,
                sampler,
                data,
                persistent_workers=data.persistent_workers and len(datasets) == 1,
                device=ranks.device,
            )
            self._loaders[name] = (dataset, loader)
        self._ranks = ranks

    @torch.no_grad()
    def evaluate(
        self,
        wrapped: WrappedModel,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        heartbeat: Callable[[str], None] = lambda phase: None,
    ) -> dict[str, Evaluated]:
        """The loss of each set over all ranks, in the order of the recipe; empty if a rank was
        asked to stop.

        The ranks agree on a stop at each micro-batch. heartbeat: called at each micro-batch.
        """
        device, ranks = self._ranks.device, self._ranks
        stream = None
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        asked: StepStatistics | None = None
        totals = torch.zeros(len(self._loaders), 2, dtype=torch.float64, device=device)
        with _evaluating(wrapped):
            for total, (dataset, loader) in zip(totals, self._loaders.values(), strict=True):
                for collated in loader:
                    heartbeat("evaluation")
                    # The answer at the previous micro-batch, so that nothing waits. All ranks get
                    # it at the same one
                    if asked is not None and asked.read()[0] > 0:
                        return {}
                    asked = StepStatistics([int(stop_requested())], ranks, stream)
                    micro_batch = to_device(collated["tensors"], device)
                    with wrapped.forward_context():
                        total[0] += dataset.loss(wrapped.model, micro_batch)
                    total[1] += collated["loss_tokens"]
        if asked is not None:
            asked.read()
        dist.all_reduce(totals, group=ranks.group)
        return {
            name: Evaluated(loss / max(tokens, 1.0), int(tokens))
            for name, (loss, tokens) in zip(self._loaders, totals.tolist(), strict=True)
        }


@contextmanager
def _evaluating(wrapped: WrappedModel) -> Iterator[None]:
    wrapped.model.eval()
    yield
    wrapped.reshard()
    wrapped.model.train()


def over_all(results: Mapping[str, Evaluated]) -> Evaluated:
    """The loss over the tokens of all sets."""
    tokens = sum(result.tokens for result in results.values())
    loss = sum(result.loss * result.tokens for result in results.values())
    return Evaluated(loss / max(tokens, 1), tokens)
