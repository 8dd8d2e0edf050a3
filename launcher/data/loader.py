"""Batches on their way to the device: loader processes, asynchronous copies, statistics."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing import queues
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from launcher.console import bytes_as_text
from launcher.data.batching import NO_SAMPLE, BatchSampler, Index, row_tokens
from launcher.data.collation import Collated, Unreadable
from launcher.data.dataset import MapData
from launcher.data.streaming import StreamingDataset
from launcher.data.tokenizer import prepare_worker_process
from launcher.distributed import host_memory
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError, first_line
from launcher.libraries.private import handle_queue_errors, tree_map_only
from launcher.models.micro_batch import MicroBatch
from launcher.recipe import schema

PLENTY = 2**30
"""Free bytes of /dev/shm with which no micro-batch is loaded to compare its size."""
TrainingData = MapData | StreamingDataset
_T = TypeVar("_T")


class StepTotals(NamedTuple):
    """What the ranks sum for a step."""

    loss_tokens: int = 0
    """Tokens with a target."""
    tokens: int = 0
    """Tokens without padding."""
    stop_requests: int = 0
    """Ranks that are asked to stop."""
    save_requests: int = 0
    """Ranks that are asked to save."""
    squared_lengths: int = 0
    """Sum over the documents of their squared lengths in tokens; 0: not known."""
    tower_operations: int = 0
    """Floating-point operations of the towers of attachments, forward and backward."""
    loss_weight: float | None = None
    """The sum of the weights of tokens with a target; None: each counts 1."""


class StepStatistics:
    """StepTotals over the ranks, by one all-reduce, which overlaps with the step before.

    On CUDA it has a stream of its own, so `read` does not wait for queued compute.
    """

    def __init__(self, values: StepTotals, ranks: RankLayout) -> None:
        weight = values.loss_tokens if values.loss_weight is None else values.loss_weight
        # Whole numbers up to 2^53 are exact
        self.host = torch.tensor([*values[:-1], weight], dtype=torch.float64)
        self._device, self._work, self._event = self.host, None, None
        if ranks.device.type != "cuda":
            if ranks.size > 1:
                self._work = dist.all_reduce(self._device, group=ranks.group, async_op=True)
            return
        pinned, stream = self.host.pin_memory(), _statistics_stream(ranks.device)
        with torch.cuda.stream(stream):
            self._device = pinned.to(ranks.device, non_blocking=True)
            if ranks.size > 1:
                dist.all_reduce(self._device, group=ranks.group)
            host = torch.empty_like(pinned, pin_memory=True)
            self.host = host.copy_(self._device, non_blocking=True)
            self._event = stream.record_event()

    def loss_weight(self) -> torch.Tensor:
        """The sum of the weights of all targets, over all ranks, by which a step divides its loss: their
        number, where each counts 1. A float32 scalar on the device."""
        self._wait()
        if self._event is not None:
            current = torch.cuda.current_stream(self._device.device)
            current.wait_event(self._event)
            self._device.record_stream(current)
        return self._device[-1].float()

    def read(self) -> StepTotals:
        """The sums. Waits for the all-reduce."""
        self._wait()
        # A query does not block, and the event is usually done
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        *counts, weight = self.host.tolist()
        return StepTotals(*map(int, counts))._replace(loss_weight=weight)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


@functools.cache
def _statistics_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class MicroBatches(Sequence[MicroBatch]):
    """The micro-batches of a step on the host. One that is asked for is copied to the device, so that
    those of a step, which may have large attachments, are not there at once."""

    def __init__(
        self, host: Sequence[MicroBatch], copy: Callable[[MicroBatch], MicroBatch]
    ) -> None:
        self.host, self._copy = host, copy

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, index: Any) -> Any:
        return self._copy(self.host[index])


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of one optimizer step."""

    step: int
    """1-based."""
    micro_batches: Sequence[MicroBatch]
    """On the device."""
    statistics: StepStatistics
    samples_seen: int
    """Over all ranks, including this step and batches that were skipped before it."""
    seconds_waited: float
    """For this rank's loader."""
    stream: Mapping[str, Any] | None = None
    """`StreamOrder.state` after the batch; None without data.streaming."""


def make_loader(
    dataset: TrainingData,
    sampler: BatchSampler,
    data: schema.Data,
    *,
    seed: int,
    persistent_workers: bool,
    device: torch.device,
) -> DataLoader[Any]:
    """Loads micro-batches. seed is that of the loader processes."""
    workers = data.workers
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=dataset.collate,
        num_workers=workers,
        prefetch_factor=data.prefetch_factor if workers else None,
        persistent_workers=persistent_workers and workers > 0,
        pin_memory=device.type == "cuda" and data.pin_memory is not False,
        worker_init_fn=_prepare_loader_process if workers else None,
        # By default each iterator draws its seed from the default generator, which dropout uses
        # too: a resume would draw once more
        generator=torch.Generator().manual_seed(seed),
    )


def _prepare_loader_process(worker: int) -> None:
    prepare_worker_process(worker)
    handle_queue_errors(_pass_on_problem)


def _pass_on_problem(queue: queues.Queue[Any], error: Exception, dropped: tuple[int, Any]) -> None:
    """In a loader process, in the place of a micro-batch that could not be passed on: Python prints
    a traceback and drops it, and the rank would wait for ever."""
    problem = f"a loader process could not pass on a micro-batch: {first_line(error)}"
    text = f"data.workers: {problem}. {host_memory.shared_text()}"
    queue.put((dropped[0], Unreadable(text)))


def check_shared_memory(
    dataset: TrainingData, sampler: BatchSampler, data: schema.Data, *, ranks: int
) -> None:
    """Compares /dev/shm with what the loader processes of these ranks, all of a machine, hold there:
    the largest of the first micro-batches, or of data with unknown lengths the first one.

    Raises RecipeError if it does not fit. Does nothing where much is free, and for a stream, of which
    no shard is open yet.
    """
    memory = host_memory.shared_memory()
    if not data.workers or isinstance(dataset, StreamingDataset) or memory is None:
        return
    if memory[0] >= PLENTY:
        return
    lengths, first = dataset.lengths, _first_rows(sampler)
    if not first:
        return
    largest = first[0]
    if lengths is not None:
        known = lengths
        largest = max(first, key=lambda rows: sum(row_tokens(row, known) for row in rows))
    samples: Any = dataset  # those of a builder share no rows
    size = _bytes(dataset.collate([samples[row] for row in largest]))
    ahead = data.workers * data.prefetch_factor * ranks
    if size * ahead > memory[0]:
        raise RecipeError(
            f"data.workers: {data.workers} loader processes of each of {ranks} ranks, with "
            f"{data.prefetch_factor} micro-batches of {bytes_as_text(size)} each, hold "
            f"{bytes_as_text(size * ahead)} in shared memory. {host_memory.shared_text()}"
        )


def _bytes(value: object) -> int:
    """Bytes of the tensors in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, MicroBatch | Collated):
        return sum(_bytes(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def to_device(value: _T, device: torch.device) -> _T:
    """Copies the tensors in dicts, lists, tuples and micro-batches to the device without waiting."""
    moved: Any
    if isinstance(value, MicroBatch):
        moved = value.mapped(partial(to_device, device=device))
    elif isinstance(value, torch.Tensor):
        moved = value.to(device, non_blocking=True)
    else:
        moved = tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value
        )
    return cast(_T, moved)


def _first_rows(sampler: BatchSampler) -> list[Sequence[Index]]:
    """The rows of the first 64 micro-batches."""
    batches: Iterable[Sequence[Index]] = sampler
    return list(itertools.islice(batches, 64))


def expected_padding(dataset: TrainingData, sampler: BatchSampler) -> float | None:
    """Share of padding in 64 micro-batches if rows are padded as `dataset.width` says; None if the
    lengths are not known."""
    if isinstance(dataset, StreamingDataset) or (lengths := dataset.lengths) is None:
        return None
    held = padded = 0
    for indices in _first_rows(sampler):
        rows = [row_tokens(row, lengths) for row in indices if row != NO_SAMPLE]
        held += sum(rows)
        padded += dataset.width(max(rows, default=0)) * len(rows)
    return 1 - held / padded if padded else 0.0
