"""Turns a step's tensors into a line of metrics.jsonl."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from launcher.console import finite
from launcher.distributed import host_memory
from launcher.distributed.process_group import all_gather_single
from launcher.distributed.rank_layout import OTHERS, STAGES, RankLayout
from launcher.metrics.stages import PARTS
from launcher.models.expert_load import ExpertLoad
from launcher.objectives.base import Objective
from launcher.reliability.json_files import Json
from launcher.training.loop import Step

PHASES = ("data", "forward", "backward", "optimizer", "logging")
"""The phases of a step. All other time, such as the time of a save, belongs to no step."""
TIMED_EVERY = 10
"""CUDA: waits for communication are measured, by events, in one of this number of steps."""
SENSOR_SECONDS = 5.0
"""Seconds between two readings of a GPU's sensors."""
GATHERED = (
    "loss",
    "waited",
    "cpu",
    "peak",
    "reserved",
    "retries",
    "own",
    *PARTS,
    "power",
    "temperature",
    "busy",
)
"""The values that each rank contributes: its part of the loss; seconds waited for data; CPU
seconds; peaks of allocated and reserved memory; retried allocations;
`_Interval.times`; values of `GpuSensors`."""

UNKNOWN = (math.nan,) * (1 + len(PARTS))
"""`_Interval.times` before they are known."""

Timestamp = float | torch.cuda.Event
"""A point in time: on CUDA an event, because the host runs ahead of the device."""


def timestamp(device: torch.device) -> Timestamp:
    """Now; on CUDA, when the current stream gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _passed(end: Timestamp) -> bool:
    return isinstance(end, float) or bool(end.query())  # type: ignore[no-untyped-call]


def _seconds(begin: Timestamp, end: Timestamp) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end - begin)  # type: ignore[operator]
    return float(begin.elapsed_time(end)) / 1000


class _Interval:
    """How a rank spends the time between two records. Begins with the logging of a step."""

    def __init__(self, begin: Timestamp) -> None:
        self.steps = self.timed_steps = 0
        """The number of all steps, and of the steps in which waits for other ranks were
        measured."""
        self.tokens = 0
        """Tokens over all ranks."""
        self.squared_lengths = self.tower_operations = 0
        """See `StepTotals`."""
        self.waited = 0.0
        """Seconds, for the loader."""
        self.retries = math.nan
        """Retried allocations of this rank."""
        self.cpu_before = time.process_time()
        self.skipped: list[torch.Tensor] = []
        """For each step, a tensor: 1 if the step was skipped."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds by phase. They are complete if `read` is called after the device has reached the
        end of the interval, as are the next ones."""
        self.waited_for: defaultdict[str, float] = defaultdict(float)
        """Seconds of waits, which are part of the phases, by what a rank waited for (OTHERS, STAGES)."""
        self.waited_in: defaultdict[str, float] = defaultdict(float)
        """The same by phase."""
        self.marks: deque[tuple[str, Timestamp]] = deque([("logging", begin)])
        """Each phase, and when it began."""
        self.waits: deque[tuple[str, str, Timestamp, Timestamp]] = deque()
        """What a rank waited for, in which phase, and from when to when."""

    def read(self) -> None:
        """Adds up the phases that the device has finished. Does not wait for it."""
        while len(self.marks) > 1 and _passed(self.marks[1][1]):
            phase, begin = self.marks.popleft()
            self.seconds[phase] += _seconds(begin, self.marks[0][1])
        while self.waits and _passed(self.waits[0][3]):
            what, phase, begin, end = self.waits.popleft()
            seconds = _seconds(begin, end)
            self.waited_for[what] += seconds
            self.waited_in[phase] += seconds

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds[phase] for phase in PHASES) / self.steps

    @property
    def communication_seconds(self) -> float | None:
        """Mean of the steps in which it was measured; None if there was none."""
        return sum(self.waited_for.values()) / self.timed_steps if self.timed_steps else None

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds of a step without logging, which only rank 0 does, and without waits for other
        ranks; then those of PARTS. NaN if the waits are not known."""
        waits, logging = self.communication_seconds, self.seconds["logging"] / self.steps
        if waits is None:
            return UNKNOWN
        forward, backward = (
            self.seconds[phase] / self.steps - self.waited_in[phase] / self.timed_steps
            for phase in ("forward", "backward")
        )
        others, stages = (self.waited_for[name] / self.timed_steps for name in (OTHERS, STAGES))
        return self.step_seconds - waits - logging, forward, backward, stages, others


class GpuSensors:
    """Values of NVML (nvidia-ml-py), which a thread reads; training uses the last ones."""

    def __init__(self, device: torch.device) -> None:
        self.values = (math.nan, math.nan, math.nan)
        """Watts, degrees Celsius, share of the time that a kernel ran; NaN: not known."""
        if device.type == "cuda" and torch.version.hip is None:
            threading.Thread(target=self._read, args=(device,), daemon=True).start()

    def _read(self, device: torch.device) -> None:
        while True:
            time.sleep(SENSOR_SECONDS)
            try:
                watts = torch.cuda.power_draw(device) / 1000
                celsius = float(torch.cuda.temperature(device))
                busy = torch.cuda.utilization(device) / 100
            except Exception:  # no library, no permission, or a part of a GPU (MIG)
                return
            self.values = (watts, celsius, busy)


@dataclass(frozen=True)
class PendingRecord:
    """A logged step whose numbers are being copied to the host."""

    step: Step
    numbers: torch.Tensor
    """For each rank, the values that GATHERED names."""
    flags: torch.Tensor
    """Gradient norm, then 1 for each skipped step since the last record."""
    work: dist.Work | None
    """CPU: the all-gather of `numbers`; None with one rank."""
    event: torch.cuda.Event | None
    """CUDA: recorded after the copies to the host."""
    interval: _Interval
    time: float | None
    """CPU: when the step ended."""
    choices: torch.Tensor | None = None
    """`ExpertLoad.take` since the last record, on the host."""

    def ready(self) -> bool:
        """Whether `collect` would return without waiting."""
        if self.event is not None:
            return bool(self.event.query())  # type: ignore[no-untyped-call]
        return self.work is None or bool(self.work.is_completed())


class StepRecorder:
    """Turns steps into records, with one all-gather of a few numbers. All ranks must make the same
    calls. Neither `add` nor `launch` waits for the device; `collect` does.
    """

    def __init__(self, ranks: RankLayout) -> None:
        self._ranks = ranks
        self.objective: Objective | None = None
        """Whose metrics are recorded beside the loss."""
        self.sources: tuple[str, ...] = ()
        """The sources of a mixture, if the loss has a part for each (`loss.by_source`)."""
        self.stages = 1
        """The ranks of a pipeline. Ranks with the same stages are neighbours."""
        self.expert_load: ExpertLoad | None = None
        self.load_of_experts: list[list[float]] = []
        """For each layer of experts, how often each was chosen in the last record, as a multiple of the
        mean; empty: no layer has experts."""
        self._device, self._cuda = ranks.device, ranks.device.type == "cuda"
        self._sensors = GpuSensors(ranks.device)
        self._times = UNKNOWN
        self._retries = 0.0
        """Retries of this rank's allocator before the interval."""
        self.measures_waits = True
        """See `WrappedModel.measures_waits`."""
        self.own_seconds: list[float] = []
        """For each rank, the first of `_Interval.times` in the last record; empty if not measured."""
        self.operations_of_towers = 0.0
        """Floating-point operations of towers per second in the last record, of all ranks."""
        self.restart(skipped=0, skipped_in_a_row=0)

    def restart(self, *, skipped: int, skipped_in_a_row: int) -> None:
        """Starts the clock of the next record."""
        self.skipped, self.skipped_in_a_row = skipped, skipped_in_a_row
        self._interval = _Interval(timestamp(self._device))
        self._timed = not self._cuda
        self._retries = _retries(self._device)

    def phase(self, name: str) -> None:
        """A phase begins."""
        self._interval.marks.append((name, timestamp(self._device)))

    @contextmanager
    def waiting(self, what: str = OTHERS) -> Iterator[None]:
        """A context in which compute waits for communication. The strategy enters it."""
        if not self._timed:
            yield
            return
        interval, begin = self._interval, timestamp(self._device)
        yield
        wait = what, interval.marks[-1][0], begin, timestamp(self._device)
        interval.waits.append(wait)

    @contextmanager
    def excluded(self, what: str = "evaluation") -> Iterator[None]:
        """Time that belongs to no step, as do retried allocations: evaluation, checkpoint."""
        timed, self._timed = self._timed, False
        retries = _retries(self._device)
        self.phase(what)
        try:
            yield
        finally:
            self._timed = timed
            self._retries += _retries(self._device) - retries
            self.phase("logging")

    def add(self, step: Step) -> None:
        """Counts a step that has been trained."""
        self.phase("logging")
        interval = self._interval
        interval.steps += 1
        totals = step.batch.statistics.read()
        interval.tokens += totals.tokens
        interval.squared_lengths += totals.squared_lengths
        interval.tower_operations += totals.tower_operations
        interval.waited += step.batch.seconds_waited
        interval.skipped.append(step.skipped)
        interval.timed_steps += self._timed and self.measures_waits
        interval.read()
        self._timed = not self._cuda or step.number % TIMED_EVERY == 1

    def launch(self, step: Step) -> PendingRecord:
        """Starts to gather the record of the last added step. The next interval begins here."""
        device, cuda, interval = self._device, self._cuda, self._interval
        end = timestamp(device)
        interval.marks.append(("logging", end))
        if not cuda:  # on CUDA not known yet: gathered with the next record
            interval.read()
            self._times = interval.times
        used = (interval.waited, time.process_time() - interval.cpu_before, *_peak_memory(device))
        before, self._retries = self._retries, _retries(device)
        interval.retries = self._retries - before
        local = [*used, interval.retries, *self._times, *self._sensors.values]
        self._times = UNKNOWN
        host = torch.tensor(local, dtype=torch.float64, pin_memory=cuda)

        def on_device(numbers: torch.Tensor) -> torch.Tensor:
            # With offload, norm and flags are in host memory
            return numbers.to(device, torch.float64, non_blocking=True)

        losses = [step.loss.view(1)] if step.metrics is None else [step.loss.view(1), step.metrics]
        numbers = torch.cat([*map(on_device, losses), on_device(host)])
        flags = on_device(torch.stack([step.grad_norm, *interval.skipped]))
        choices = None if self.expert_load is None else self.expert_load.take()
        work = event = None
        if self._ranks.size > 1:
            mine, numbers = numbers, numbers.new_empty(self._ranks.size * len(numbers))
            # On CUDA the call does not wait anyway
            work = all_gather_single(numbers, mine, group=self._ranks.group, async_op=not cuda)
        if cuda:
            both = torch.cat([numbers, flags])
            copy = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            copy.copy_(both, non_blocking=True)
            numbers, flags = copy[: len(numbers)], copy[len(numbers) :]
            if choices is not None:
                on_host = torch.empty(choices.shape, dtype=choices.dtype, pin_memory=True)
                choices = on_host.copy_(choices, non_blocking=True)
            event = torch.cuda.current_stream(device).record_event()
        self._interval = _Interval(end)
        now = None if cuda else time.time()
        return PendingRecord(step, numbers, flags, work, event, interval, now, choices)

    def collect(self, pending: PendingRecord) -> Json:
        """Waits for the record's numbers. Times and rates are means since the previous record."""
        if pending.event is not None:
            pending.event.synchronize()
        if pending.work is not None:
            pending.work.wait()
        norm, *skipped = pending.flags.tolist()
        for skip in skipped:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
            self.skipped += bool(skip)
        interval = pending.interval
        interval.read()
        if self._cuda:
            self._times = interval.times
        record = self._record(pending.step, interval, pending.numbers.view(self._ranks.size, -1))
        record["grad_norm"] = finite(norm)
        record |= self._of_experts(pending.choices)
        record["time"] = pending.time or time.time()  # on CUDA the end was just reached
        if skipped[-1]:
            record["skipped"] = True
        return record

    def _metrics(self, gathered: Mapping[str, torch.Tensor]) -> Json:
        """The metrics of the objective."""
        if self.objective is None:
            return {}
        means = {name: gathered[name].sum().item() for name in self.objective.metrics}
        shown = self.objective.shown(means).items()
        return {name: None if value is None else finite(value) for name, value in shown}

    def _record(self, step: Step, interval: _Interval, by_rank: torch.Tensor) -> Json:
        """The record of a step. `by_rank` has the shape (ranks, GATHERED)."""
        parts = [f"{part} {name}" for part in ("loss", "weight") for name in self.sources]
        metrics = () if self.objective is None else self.objective.metrics
        names = (*GATHERED[:1], *metrics, *parts, *GATHERED[1:])
        gathered = dict(zip(names, by_rank.unbind(1), strict=True))
        steps, seconds, own = interval.steps, interval.step_seconds, gathered["own"]
        self.own_seconds = [] if own.isnan().any() else own.tolist()
        # Ranks with other stages compute other blocks
        fastest = own.view(self.stages, -1).amin(1).repeat_interleave(len(own) // self.stages)
        slowest = int((own - fastest).argmax())
        rate = interval.tokens / steps / seconds
        self.operations_of_towers = interval.tower_operations / steps / seconds
        totals, reserved = step.batch.statistics.read(), finite(gathered["reserved"].max().item())
        phases = {f"{name}_seconds": interval.seconds[name] / steps for name in PHASES[1:]}
        return {
            "step": step.number,
            "loss": finite(gathered["loss"].sum().item()),
            **self._metrics(gathered),
            **self._by_source(gathered),
            "grad_norm": None,
            "learning_rate": step.learning_rate,
            "tokens": totals.tokens,
            "loss_tokens": totals.loss_tokens,
            "document_length": _ratio(interval.squared_lengths, interval.tokens),
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "mfu": None,
            "peak_memory_bytes": int(gathered["peak"].nan_to_num().max()),  # NaN: on null GPUs
            "reserved_memory_bytes": None if reserved is None else int(reserved),
            "allocation_retries": self._most_retries(interval, gathered["retries"]),
            "data_seconds": float(gathered["waited"].max()) / steps,
            **phases,
            "communication_seconds": interval.communication_seconds,
            **self._of_stages(gathered),
            "checkpoint_seconds": interval.seconds["checkpoint"],
            "cpu_seconds": float(gathered["cpu"].sum()) / steps,
            "slowest_rank": slowest if self.own_seconds else None,
            "slowest_rank_seconds": finite(own[slowest].item()),
            "fastest_rank_seconds": finite(fastest[slowest].item()),
            "gpu_power_watts": finite(gathered["power"].mean().item()),
            "gpu_temperature_celsius": finite(gathered["temperature"].max().item()),
            "gpu_utilization": finite(gathered["busy"].min().item()),
            "samples_seen": step.batch.samples_seen,
        }

    def _of_stages(self, gathered: Mapping[str, torch.Tensor]) -> Json:
        """How each stage of a pipeline spends a step: means of its ranks. Empty if not measured."""
        if self.stages == 1 or not self.own_seconds:
            return {}
        times = torch.stack([gathered[part] for part in PARTS], dim=1)
        means = times.view(self.stages, -1, len(PARTS)).mean(1).tolist()
        keys = [f"{part}_seconds" for part in PARTS]
        return {"stages": [dict(zip(keys, stage, strict=True)) for stage in means]}

    def _of_experts(self, choices: torch.Tensor | None) -> Json:
        """The load of the busiest and of the least busy expert of all layers, and the share of the
        experts that no token chose."""
        self.load_of_experts = []
        if choices is None or self.expert_load is None:
            return {}
        for row, size in zip(choices.tolist(), self.expert_load.sizes, strict=True):
            mean = sum(row) / size
            self.load_of_experts.append([count / mean if mean else 0.0 for count in row[:size]])
        loads = [load for layer in self.load_of_experts for load in layer]
        return {
            "expert_load_max": max(loads),
            "expert_load_min": min(loads),
            "experts_idle": sum(load == 0 for load in loads) / len(loads),
        }

    def _by_source(self, gathered: dict[str, torch.Tensor]) -> Json:
        """`losses`: the mean loss of each source of a mixture; null for a source without a target.
        `shares`: the share of each in the targets, times their weights."""
        if not self.sources:
            return {}
        losses, weights = {}, {}
        for name in self.sources:
            loss, weight = (gathered[f"{part} {name}"].sum().item() for part in ("loss", "weight"))
            losses[name], weights[name] = finite(loss / weight) if weight else None, weight
        whole = sum(weights.values())
        shares = {name: weight / whole if whole else 0.0 for name, weight in weights.items()}
        return {"losses": losses, "shares": shares}

    def _most_retries(self, interval: _Interval, by_rank: torch.Tensor) -> int | None:
        """The largest number of retried allocations of a rank; None on a CPU."""
        # Null GPUs gather no values; this rank's own need no device
        return int(max(interval.retries, float(by_rank.nan_to_num().max()))) if self._cuda else None


def _ratio(total: float, count: float) -> float | None:
    return total / count if total and count else None


def _peak_memory(device: torch.device) -> tuple[float, float]:
    """Peaks since the last call. CUDA: allocated and reserved bytes; CPU: resident bytes, NaN."""
    if device.type != "cuda":
        return host_memory.take_peak(), math.nan
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peaks


def _retries(device: torch.device) -> float:
    """How often PyTorch's allocator freed its cache, which waits for the device, to repeat an
    allocation; NaN on a CPU."""
    if device.type != "cuda":
        return math.nan
    return float(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
