"""Batches on their way to the device: loader processes, pinned memory, copies beside the compute."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from launcher.batching import RankSlots, SampleOrder, accumulation_steps
from launcher.data.dataset import SequenceDataset
from launcher.processes import DataParallel
from launcher.recipe import schema

Tensors = dict[str, torch.Tensor]


class Counts:
    """What all ranks add up at the start of a step, in one all-reduce that runs beside the step before.

    On CUDA it has a stream of its own: `loss_tokens()` stays on the device, and `read()` waits for this sum alone, not
    for the compute that is queued.
    """

    def __init__(self, values: list[int], ranks: DataParallel, stream: torch.cuda.Stream | None) -> None:
        self._host = torch.tensor(values, dtype=torch.int64)
        self._device, self._work, self._event = self._host, None, None
        if stream is None:
            if ranks.size > 1:
                self._work = dist.all_reduce(self._device, group=ranks.group, async_op=True)
            return
        pinned = self._host.pin_memory()
        with torch.cuda.stream(stream):
            self._device = pinned.to(ranks.device, non_blocking=True)
            if ranks.size > 1:
                dist.all_reduce(self._device, group=ranks.group)
            self._host = torch.empty_like(pinned, pin_memory=True).copy_(self._device, non_blocking=True)
            self._event = stream.record_event()

    def loss_tokens(self) -> torch.Tensor:
        """Tokens with a target over all ranks, at least 1; a float32 scalar on the device."""
        self._wait()
        if self._event is not None:
            current = torch.cuda.current_stream(self._device.device)
            current.wait_event(self._event)
            self._device.record_stream(current)
        return self._device[0].clamp(min=1).float()

    def read(self) -> list[int]:
        """All values, summed over the ranks."""
        self._wait()
        if self._event is not None:
            self._event.synchronize()
        return [int(value) for value in self._host.tolist()]

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of one optimizer step, on the device."""

    step: int
    """1-based."""
    micro_batches: list[Tensors]
    counts: Counts
    """Over all ranks: tokens with a target, tokens but padding, ranks that were asked to stop."""
    samples_seen: int
    """Since the start of the run, over all ranks, this step included."""
    seconds_waited: float
    """That this rank waited for its loader."""


def make_loader(
    dataset: SequenceDataset,
    slots: Any,
    *,
    workers: int,
    prefetch_factor: int,
    persistent_workers: bool,
    pin_memory: bool | None,
    device: torch.device,
) -> DataLoader[Any]:
    """Collated micro-batches in the order of `slots` (an iterable of lists of indices)."""
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=slots,
        collate_fn=dataset.collate,
        num_workers=workers,
        prefetch_factor=prefetch_factor if workers else None,
        persistent_workers=persistent_workers if workers else False,
        pin_memory=device.type == "cuda" if pin_memory is None else pin_memory and device.type == "cuda",
        worker_init_fn=_ignore_interrupts if workers else None,
    )


def _ignore_interrupts(worker: int) -> None:
    """A loader process ends when its rank does: what asks the rank to stop is not for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Mover:
    """Copies to the device on a stream of its own, so that a copy does not queue behind the compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def move(self, tensors: Tensors) -> Tensors:
        if self.stream is None:
            return tensors
        with torch.cuda.stream(self.stream):
            moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self.stream)
        for tensor in moved.values():
            tensor.record_stream(current)
        return moved


def training_batches(
    dataset: SequenceDataset,
    *,
    data: schema.Data,
    batch: schema.Batch,
    order: SampleOrder,
    steps: int,
    ranks: DataParallel,
    stop_requested: Callable[[], bool],
) -> Iterator[GlobalBatch]:
    """The global batches of the run, step 1 to `steps`, this rank's part of each.

    Asking for the next one fetches it from the loader, starts its copy to the device and the counting over the ranks,
    and waits for neither.
    """
    sizes = {"global_batch_size": batch.global_batch_size, "micro_batch_size": batch.micro_batch_size}
    accumulation = accumulation_steps(**sizes, ranks=ranks.size)
    slots = RankSlots(order=order, rank=ranks.rank, ranks=ranks.size, first_step=0, steps=steps, **sizes)
    loader = make_loader(
        dataset,
        slots,
        workers=data.workers,
        prefetch_factor=data.prefetch_factor,
        persistent_workers=False,  # one pass over one endless order
        pin_memory=data.pin_memory,
        device=ranks.device,
    )
    mover = _Mover(ranks.device)
    total = order.epochs * order.samples if order.epochs is not None else None
    loaded = iter(loader)
    for step in range(1, steps + 1):
        started = time.perf_counter()
        collated = [next(loaded) for _ in range(accumulation)]
        waited = time.perf_counter() - started
        counts = [sum(c["loss_tokens"] for c in collated), sum(c["tokens"] for c in collated), int(stop_requested())]
        seen = step * batch.global_batch_size
        yield GlobalBatch(
            step=step,
            micro_batches=[mover.move(c["tensors"]) for c in collated],
            counts=Counts(counts, ranks, mover.stream),
            samples_seen=seen if total is None else min(seen, total),
            seconds_waited=waited,
        )
