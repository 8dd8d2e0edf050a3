"""Turns a step's tensors into a line of metrics.jsonl."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from launcher.distributed import host_memory
from launcher.distributed.process_group import DataParallel
from launcher.training.loop import Step

Moment = float | torch.cuda.Event
"""A point in time: on CUDA an event, because the host runs ahead of the device."""


@dataclass(frozen=True)
class PendingRecord:
    """A logged step whose numbers are being copied to the host."""

    step: Step
    numbers: torch.Tensor
    """For each rank: part of the loss, seconds waited for data, CPU seconds, peak memory."""
    flags: torch.Tensor
    """Gradient norm, then 1 for each skipped step since the last record."""
    work: Any
    """CPU: the all-gather of `numbers`; None with one rank."""
    event: torch.cuda.Event | None
    """CUDA: recorded after the copies to the host."""
    begin: Moment
    end: Moment
    pauses: list[tuple[Moment, Moment]]
    """Times between begin and end that belong to no step."""
    steps: int
    """Since the last record."""
    tokens: int
    """Since the last record, over all ranks."""

    def ready(self) -> bool:
        """Whether `collect` would return without waiting."""
        if self.event is not None:
            return bool(self.event.query())  # type: ignore[no-untyped-call]
        return self.work is None or bool(self.work.is_completed())


class StepRecorder:
    """Turns steps into records, with one all-gather of a few numbers. All ranks must make the same
    calls.

    Neither `add` nor `launch` waits for the device. If a record is collected after the next step
    has started, the device has work meanwhile.
    """

    def __init__(
        self, ranks: DataParallel, *, flops_per_token: float, peak_flops: float | None
    ) -> None:
        self._ranks = ranks
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self.restart(skipped=0, skipped_in_a_row=0)

    def restart(self, *, skipped: int, skipped_in_a_row: int) -> None:
        """Starts the clock of the next record, for example after a checkpoint was loaded."""
        self.skipped, self.skipped_in_a_row = skipped, skipped_in_a_row
        self._start_interval(self._now())

    def _start_interval(self, begin: Moment) -> None:
        self._begin = begin
        self._pauses: list[tuple[Moment, Moment]] = []
        self._steps = self._tokens = 0
        self._waited, self._cpu = 0.0, _cpu_seconds()
        self._skipped: list[torch.Tensor] = []

    def _now(self) -> Moment:
        if self._ranks.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._ranks.device))
        return event

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time that belongs to no step: evaluation, saving."""
        begin = self._now()
        try:
            yield
        finally:
            self._pauses.append((begin, self._now()))

    def add(self, step: Step) -> None:
        _, tokens, *_ = step.batch.statistics.read()
        self._steps += 1
        self._tokens += tokens
        self._waited += step.batch.seconds_waited
        self._skipped.append(step.skipped)

    def launch(self, step: Step) -> PendingRecord:
        """Starts to gather the record of the last added step. The next interval begins here."""
        device, cuda = self._ranks.device, self._ranks.device.type == "cuda"
        end = self._now()
        local = [self._waited, _cpu_seconds() - self._cpu, _peak_memory(device)]
        host = torch.tensor(local, dtype=torch.float64, pin_memory=cuda)

        def on_device(numbers: torch.Tensor) -> torch.Tensor:
            # With offload, norm and flags are in host memory
            return numbers.to(device, torch.float64, non_blocking=True)

        numbers = torch.cat([on_device(step.loss).view(1), on_device(host)])
        flags = on_device(torch.stack([step.grad_norm, *self._skipped]))
        work = event = None
        if self._ranks.size > 1:
            mine, numbers = numbers, numbers.new_empty(self._ranks.size * len(numbers))
            # Renamed in torch 2.13
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            # On CUDA the call does not wait anyway
            work = all_gather(numbers, mine, group=self._ranks.group, async_op=not cuda)
        if cuda:
            both = torch.cat([numbers, flags])
            copy = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            copy.copy_(both, non_blocking=True)
            numbers, flags = copy[: len(numbers)], copy[len(numbers) :]
            event = torch.cuda.current_stream(device).record_event()
        pending = PendingRecord(
            step,
            numbers,
            flags,
            work,
            event,
            self._begin,
            end,
            self._pauses,
            self._steps,
            self._tokens,
        )
        self._start_interval(end)
        return pending

    def collect(self, pending: PendingRecord) -> dict[str, Any]:
        """Waits for the record's numbers. Times and rates are means since the previous record."""
        if pending.event is not None:
            pending.event.synchronize()
        if pending.work is not None:
            pending.work.wait()
        step = pending.step
        norm, *skipped = pending.flags.tolist()
        for skip in skipped:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
            self.skipped += int(skip)
        by_rank = pending.numbers.view(self._ranks.size, -1)
        loss = float(by_rank[:, 0].sum())
        seconds = _seconds(pending.begin, pending.end)
        seconds -= sum(_seconds(*pause) for pause in pending.pauses)
        rate = pending.tokens / seconds
        loss_tokens, tokens, *_ = step.batch.statistics.read()
        # On CUDA the end was just reached
        since_end = time.perf_counter() - pending.end if isinstance(pending.end, float) else 0.0
        peak = self._peak_flops and self._peak_flops * self._ranks.size
        record = {
            "step": step.number,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "learning_rate": step.learning_rate,
            "tokens": tokens,
            "loss_tokens": loss_tokens,
            "step_seconds": seconds / pending.steps,
            "tokens_per_second": rate,
            "mfu": rate * self._flops_per_token / peak if peak else None,
            "peak_memory_bytes": int(by_rank[:, 3].max()),
            "data_seconds": float(by_rank[:, 1].max()) / pending.steps,
            "cpu_seconds": float(by_rank[:, 2].sum()) / pending.steps,
            "samples_seen": step.batch.samples_seen,
            "time": time.time() - since_end,
        }
        if skipped[-1]:
            record["skipped"] = True
        return record


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return float(begin.elapsed_time(end)) / 1000


def _cpu_seconds() -> float:
    """User and system time of this process, without its data workers."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _peak_memory(device: torch.device) -> int:
    """Peak since the last call. CUDA: allocated bytes; CPU: resident bytes."""
    if device.type != "cuda":
        return host_memory.take_peak()
    peak = int(torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return peak
