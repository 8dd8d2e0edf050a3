"""Turns a step's tensors into a line of metrics.jsonl."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from launcher.distributed import host_memory
from launcher.distributed.process_group import DataParallel
from launcher.metrics.gpu_sensors import GpuSensors
from launcher.metrics.interval import PHASES, Interval, Moment, Waiting, cpu_seconds, moment
from launcher.training.loop import Step

TIMED_EVERY = 10
"""CUDA: in each so many steps the waits for communication are measured. It takes some events for
each group of parameters."""
GATHERED = ("loss", "waited", "cpu", "peak", "reserved", "own", "power", "temperature", "busy")
"""What each rank contributes: its part of the loss; seconds waited for data; CPU seconds; peaks of
allocated and reserved memory; seconds of a step as of `_own_seconds`;
watts, degrees Celsius and share of the time busy of its GPU (NaN: not known)."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token."""

    model: float
    """Forward and backward: `flops_per_token`."""
    recomputed: float | None = 0.0
    """In addition, where activations are recomputed; None: not known."""
    peak: float | None = None
    """A device's per second; None: not known."""

    @property
    def recomputed_share(self) -> float:
        """Of all operations; 0 if it is not known."""
        again = self.recomputed or 0.0
        return again / (self.model + again) if again else 0.0


@dataclass(frozen=True)
class PendingRecord:
    """A logged step whose numbers are being copied to the host."""

    step: Step
    numbers: torch.Tensor
    """For each rank, those of GATHERED."""
    flags: torch.Tensor
    """Gradient norm, then 1 for each skipped step since the last record."""
    work: Any
    """CPU: the all-gather of `numbers`; None with one rank."""
    event: torch.cuda.Event | None
    """CUDA: recorded after the copies to the host."""
    interval: Interval
    """The steps since the last record."""
    end: Moment

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

    def __init__(self, ranks: DataParallel, flops: Flops) -> None:
        self._ranks, self._flops = ranks, flops
        self._sensors = GpuSensors(ranks.device)
        self._own = math.nan
        self.own_seconds: list[float] = []
        """Of the last record: for each rank, as of `_own_seconds`; empty if not measured."""
        self.totals: defaultdict[str, float] = defaultdict(float)
        """Of this rank since the first record: seconds by phase and of all (`step`), `tokens`, and
        `communication` in `timed` seconds; and the number of `records`."""
        self.restart(skipped=0, skipped_in_a_row=0)

    def restart(self, *, skipped: int, skipped_in_a_row: int) -> None:
        """Starts the clock of the next record, for example after a checkpoint was loaded."""
        self.skipped, self.skipped_in_a_row = skipped, skipped_in_a_row
        self._interval = Interval(moment(self._ranks.device))
        self._timed = self._ranks.device.type != "cuda"

    def phase(self, name: str) -> None:
        """A phase of a step begins."""
        self._interval.mark(name, moment(self._ranks.device))

    def waiting(self) -> AbstractContextManager[None]:
        """A context for the strategy: compute waits for communication inside."""
        return Waiting(self._interval, self._ranks.device) if self._timed else nullcontext()

    @contextmanager
    def excluded(self, what: str = "evaluation") -> Iterator[None]:
        """Time that belongs to no step: evaluation, checkpoint."""
        timed, self._timed = self._timed, False
        self.phase(what)
        try:
            yield
        finally:
            self._timed = timed
            self.phase("logging")

    def add(self, step: Step) -> None:
        _, tokens, *_ = step.batch.statistics.read()
        self.phase("logging")
        interval, cuda = self._interval, self._ranks.device.type == "cuda"
        interval.steps += 1
        interval.tokens += tokens
        interval.waited += step.batch.seconds_waited
        interval.skipped.append(step.skipped)
        interval.timed_steps += self._timed
        interval.read()
        self._timed = not cuda or step.number % TIMED_EVERY == 1

    def launch(self, step: Step) -> PendingRecord:
        """Starts to gather the record of the last added step. The next interval begins here."""
        device, cuda = self._ranks.device, self._ranks.device.type == "cuda"
        end, interval = moment(device), self._interval
        interval.mark("logging", end)
        if not cuda:  # else its own time is not known yet: it is gathered with the next record
            interval.read()
            self._own = _own_seconds(interval)
        used = (interval.waited, cpu_seconds() - interval.cpu, *_peak_memory(device))
        local = [*used, self._own, *self._sensors.values]
        self._own = math.nan
        host = torch.tensor(local, dtype=torch.float64, pin_memory=cuda)

        def on_device(numbers: torch.Tensor) -> torch.Tensor:
            # With offload, norm and flags are in host memory
            return numbers.to(device, torch.float64, non_blocking=True)

        numbers = torch.cat([on_device(step.loss).view(1), on_device(host)])
        flags = on_device(torch.stack([step.grad_norm, *interval.skipped]))
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
        self._interval = Interval(end)
        return PendingRecord(step, numbers, flags, work, event, interval, end)

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
        record = self._record(step, pending.interval, by_rank)
        record["grad_norm"] = norm if math.isfinite(norm) else None
        # On CUDA the end was just reached
        since_end = time.perf_counter() - pending.end if isinstance(pending.end, float) else 0.0
        record["time"] = time.time() - since_end
        if skipped[-1]:
            record["skipped"] = True
        return record

    def _record(self, step: Step, interval: Interval, by_rank: torch.Tensor) -> dict[str, Any]:
        """by_rank: (ranks, GATHERED)."""
        gathered = dict(zip(GATHERED, by_rank.unbind(1), strict=True))
        interval.read()
        steps, seconds, own = interval.steps, interval.step_seconds, gathered["own"]
        if self._ranks.device.type == "cuda":
            self._own = _own_seconds(interval)
        self.own_seconds = [] if own.isnan().any() else own.tolist()
        loss, rate = float(gathered["loss"].sum()), interval.tokens / steps / seconds
        loss_tokens, tokens, *_ = step.batch.statistics.read()
        flops, recomputed = self._flops.model, self._flops.recomputed
        peak = self._flops.peak and self._flops.peak * self._ranks.size
        phases = {f"{name}_seconds": interval.seconds[name] / steps for name in PHASES[1:]}
        self._add_totals(interval)
        return {
            "step": step.number,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": None,
            "learning_rate": step.learning_rate,
            "tokens": tokens,
            "loss_tokens": loss_tokens,
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "mfu": rate * flops / peak if peak else None,
            "hfu": rate * (flops + recomputed) / peak if peak and recomputed is not None else None,
            "peak_memory_bytes": int(gathered["peak"].max()),
            "reserved_memory_bytes": _number(gathered["reserved"].max()),
            "data_seconds": float(gathered["waited"].max()) / steps,
            **phases,
            "communication_seconds": interval.communication_seconds,
            "checkpoint_seconds": interval.seconds["checkpoint"],
            "cpu_seconds": float(gathered["cpu"].sum()) / steps,
            "slowest_rank": int(own.argmax()) if self.own_seconds else None,
            "slowest_rank_seconds": _number(own.max()),
            "fastest_rank_seconds": _number(own.min()),
            "gpu_power_watts": _number(gathered["power"].mean()),
            "gpu_temperature_celsius": _number(gathered["temperature"].max()),
            "gpu_utilization": _number(gathered["busy"].min()),
            "samples_seen": step.batch.samples_seen,
        }

    def _add_totals(self, interval: Interval) -> None:
        self.totals["records"] += 1
        if self.totals["records"] == 1:  # it loads, compiles and allocates
            return
        steps, waits = interval.steps, interval.communication_seconds
        for phase in PHASES:
            self.totals[phase] += interval.seconds[phase]
        self.totals["step"] += interval.step_seconds * steps
        self.totals["tokens"] += interval.tokens
        if waits is not None:
            self.totals["communication"] += waits * steps
            self.totals["timed"] += interval.step_seconds * steps


def _number(value: torch.Tensor) -> float | None:
    """None for NaN."""
    number = float(value)
    return number if math.isfinite(number) else None


def _own_seconds(interval: Interval) -> float:
    """Seconds of a step, without waits for other ranks and without logging, which only rank 0 does;
    NaN if the waits were not measured."""
    waits, logging = interval.communication_seconds, interval.seconds["logging"] / interval.steps
    return math.nan if waits is None else interval.step_seconds - waits - logging


def _peak_memory(device: torch.device) -> tuple[float, float]:
    """Peaks since the last call. CUDA: allocated and reserved bytes; CPU: resident bytes, NaN."""
    if device.type != "cuda":
        return host_memory.take_peak(), math.nan
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peaks
