"""Loss on the validation data: weighted by tokens, every sample once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from launcher.batching import RankSlots, SampleOrder
from launcher.data.dataset import SequenceDataset
from launcher.data.loader import make_loader
from launcher.loss import summed_loss
from launcher.processes import DataParallel
from launcher.recipe import schema
from launcher.strategies import WrappedModel


class Evaluator:
    """Evaluates the same samples each time, in the order of the files."""

    def __init__(
        self, dataset: SequenceDataset, *, data: schema.Data, micro_batch_size: int, max_batches: int | None, ranks: DataParallel
    ) -> None:
        global_batch_size = micro_batch_size * ranks.size
        batches = -(-len(dataset) // global_batch_size)
        # Slots beyond the last sample are empty rows: every rank runs as many forward passes, which sharding needs.
        slots = RankSlots(
            order=SampleOrder(samples=len(dataset), seed=0, shuffle=False, epochs=1),
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            rank=ranks.rank,
            ranks=ranks.size,
            first_step=0,
            steps=batches if max_batches is None else min(batches, max_batches),
        )
        self._loader: Iterable[dict[str, Any]] = make_loader(
            dataset,
            slots,
            workers=data.workers,
            prefetch_factor=data.prefetch_factor,
            persistent_workers=data.persistent_workers,
            pin_memory=data.pin_memory,
            device=ranks.device,
        )
        self._ranks = ranks

    @torch.no_grad()
    def evaluate(self, wrapped: WrappedModel) -> tuple[float, int]:
        """Token mean of the loss over all ranks, and the number of tokens with a target."""
        wrapped.model.eval()
        device = self._ranks.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for collated in self._loader:
            micro_batch = {name: tensor.to(device, non_blocking=True) for name, tensor in collated["tensors"].items()}
            with wrapped.forward_context():
                total[0] += summed_loss(wrapped.model, micro_batch)
            total[1] += collated["loss_tokens"]
        wrapped.reshard()
        dist.all_reduce(total, group=self._ranks.group)
        wrapped.model.train()
        loss, tokens = total.tolist()
        return loss / max(tokens, 1.0), int(tokens)
