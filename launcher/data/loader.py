"""Batches on their way to the device: loader processes, pinned memory, copies beside the compute."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from launcher.data.batching import NO_SAMPLE, Order, RankSlots, Slots, TokenSlots
from launcher.data.dataset import Collated, MapData, TrainingData
from launcher.data.streaming import Place, StreamingDataset
from launcher.distributed.process_group import DataParallel
from launcher.errors import RecipeError
from launcher.recipe import schema

Tensors = dict[str, Any]
"""A micro-batch on its device: tensors, and what else its loss takes."""


class Counts:
    """What all ranks add up at the start of a step, in one all-reduce that runs beside the step before.

    On CUDA it has a stream of its own: `loss_tokens()` stays on the device, and `read()` waits for this sum alone, not
    for the compute that is queued.
    """

    def __init__(
        self, values: list[int], ranks: DataParallel, stream: torch.cuda.Stream | None
    ) -> None:
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
            self._host = torch.empty_like(pinned, pin_memory=True).copy_(
                self._device, non_blocking=True
            )
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
        if (
            self._event is not None and not self._event.query()
        ):  # a query does not wait, and most often this is done
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
    """Over all ranks: tokens with a target, tokens but padding, ranks that were asked to stop, and to save."""
    samples_seen: int
    """Since the start of the run, over all ranks, this step included."""
    seconds_waited: float
    """That this rank waited for its loader."""
    stream_places: Mapping[int, Place] = field(default_factory=dict)
    """data.streaming: where the shards that this rank reads stand after this batch."""


def make_loader(
    dataset: MapData | StreamingDataset,
    slots: Slots,
    *,
    workers: int,
    prefetch_factor: int,
    persistent_workers: bool,
    pin_memory: bool | None,
    device: torch.device,
) -> DataLoader[Any]:
    """Collated micro-batches in the order of `slots` (an iterable of lists of indices); a stream has an order of its own."""
    how: dict[str, Any]
    if isinstance(dataset, StreamingDataset):
        workers = dataset.workers(workers)
        how = {"batch_size": None, "collate_fn": _as_it_is}
    else:
        how = {"batch_sampler": slots, "collate_fn": dataset.collate}
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        num_workers=workers,
        prefetch_factor=prefetch_factor if workers else None,
        persistent_workers=persistent_workers if workers else False,
        pin_memory=device.type == "cuda"
        if pin_memory is None
        else pin_memory and device.type == "cuda",
        worker_init_fn=_ignore_interrupts if workers else None,
        # Else each pass draws from the generator that dropout draws from, and a resumed run would have drawn once more
        generator=torch.Generator(),
        **how,
    )


def _sound(collated: Collated) -> Collated:
    if "error" in collated:
        raise RecipeError(collated["error"])
    return collated


def _as_it_is(collated: Any) -> Any:
    return collated


def _ignore_interrupts(worker: int) -> None:
    """A loader process ends when its rank does: what asks the rank to stop is not for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a stream tokenizes here: one thread a process


class Mover:
    """Copies to the device on a stream of its own, so that a copy does not queue behind the compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def move(self, tensors: Tensors) -> Tensors:
        """The micro-batch on the device. The current stream waits for the copy."""
        if self.stream is None:
            return tensors
        with torch.cuda.stream(self.stream):
            moved: Tensors = to_device(tensors, self._device)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self.stream)
        for tensor in _tensors(moved):
            tensor.record_stream(current)
        return moved


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors inside of dicts, lists and tuples on the device, all else as it is; copies do not wait."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: to_device(item, device) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def make_slots(
    batch: schema.Batch,
    *,
    order: Order,
    lengths: Sequence[int] | None,
    steps: int,
    ranks: DataParallel,
    first_step: int = 0,
) -> Slots:
    """This rank's micro-batches, of a number of rows or of a budget of tokens.

    lengths: tokens of each sample, needed with micro_batch_tokens.
    """
    common: dict[str, Any] = {
        "order": order,
        "global_batch_size": batch.global_batch_size,
        "rank": ranks.rank,
        "ranks": ranks.size,
        "first_step": first_step,
        "steps": steps,
    }
    if batch.micro_batch_tokens is None:
        assert isinstance(batch.micro_batch_size, int)  # auto was resolved before
        return RankSlots(micro_batch_size=batch.micro_batch_size, **common)
    assert lengths is not None
    return TokenSlots(micro_batch_tokens=batch.micro_batch_tokens, lengths=lengths, **common)


def expected_padding(
    dataset: TrainingData, slots: Slots, *, micro_batches: int = 64
) -> float | None:
    """Share of padding in the first micro-batches, where rows are padded to the longest; None where lengths are not known."""
    lengths = dataset.lengths
    if lengths is None:
        return None
    held = padded = 0
    for indices in itertools.islice(slots, micro_batches):
        rows = [int(lengths[index]) for index in indices if index != NO_SAMPLE]
        held += sum(rows)
        padded += max(rows, default=0) * len(rows)
    return 1 - held / padded if padded else 0.0


def training_batches(
    dataset: MapData | StreamingDataset,
    *,
    data: schema.Data,
    slots: Slots,
    global_batch_size: int,
    samples: int | None,
    first_step: int,
    skipped_batches: int,
    steps: int,
    ranks: DataParallel,
    stop_requested: Callable[[], bool],
    save_requested: Callable[[], bool],
) -> Iterator[GlobalBatch]:
    """The global batches of the run, step `first_step` + 1 to `steps`, this rank's part of each.

    slots: from the batch `first_step` + `skipped_batches` on: step s has batch s + skipped_batches.
    samples: of the whole run; None: it has no end of its own.
    Asking for the next one fetches it from the loader, starts its copy to the device and the counting over the ranks,
    and waits for neither.
    """
    loader = make_loader(
        dataset,
        slots,
        workers=data.workers,
        prefetch_factor=data.prefetch_factor,
        persistent_workers=False,  # one pass over one endless order
        pin_memory=data.pin_memory,
        device=ranks.device,
    )
    mover = Mover(ranks.device)
    loaded = iter(loader)
    for step in range(first_step, steps):
        started = time.perf_counter()
        collated = [
            _sound(next(loaded)) for _ in range(slots.micro_batches(step + skipped_batches))
        ]
        waited = time.perf_counter() - started
        counts = [
            sum(c["loss_tokens"] for c in collated),
            sum(c["tokens"] for c in collated),
            int(stop_requested()),
            int(save_requested()),
        ]
        seen = (step + 1) * global_batch_size
        yield GlobalBatch(
            step=step + 1,
            micro_batches=[mover.move(c["tensors"]) for c in collated],
            counts=Counts(counts, ranks, mover.stream),
            samples_seen=seen if samples is None else min(seen, samples),
            seconds_waited=waited,
            stream_places={
                shard: place for c in collated for shard, place in c.get("places", {}).items()
            },
        )
