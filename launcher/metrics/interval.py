"""How a rank spends the time between two records: phases of a step, and waits for other ranks."""

from __future__ import annotations

import resource
import time
from collections import defaultdict, deque
from types import TracebackType

import torch

Moment = float | torch.cuda.Event
"""A point in time: on CUDA an event, because the host runs ahead of the device."""

PHASES = ("data", "forward", "backward", "optimizer", "logging")
"""The phases of a step. All other time, such as that of a checkpoint, belongs to no step."""


def moment(device: torch.device) -> Moment:
    """Now; on CUDA, when the current stream gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def cpu_seconds() -> float:
    """User and system time of this process, without its data workers."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Interval:
    """The steps between two records of this rank."""

    def __init__(self, begin: Moment) -> None:
        """It begins with the logging of the previous step."""
        self.steps = self.tokens = 0
        """Tokens: over all ranks."""
        self.timed_steps = 0
        """Those in which waits for other ranks were measured."""
        self.waited, self.cpu = 0.0, cpu_seconds()
        """Seconds waited for the loader; CPU seconds at the start."""
        self.skipped: list[torch.Tensor] = []
        """For each step, 1 if it was skipped."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By phase, and `communication`, which is part of the phases. Complete after `read` once
        the device has reached the end."""
        self._marks: deque[tuple[str, Moment]] = deque([("logging", begin)])
        self._waits: deque[tuple[Moment, Moment]] = deque()

    def mark(self, phase: str, now: Moment) -> None:
        """A phase begins, and the one before ends."""
        self._marks.append((phase, now))

    def wait(self, begin: Moment, end: Moment) -> None:
        """Compute waited for communication."""
        self._waits.append((begin, end))

    def read(self) -> None:
        """Adds up what the device has passed. Does not wait."""
        while len(self._marks) > 1 and _passed(self._marks[1][1]):
            phase, begin = self._marks.popleft()
            self.seconds[phase] += _seconds(begin, self._marks[0][1])
        while self._waits and _passed(self._waits[0][1]):
            self.seconds["communication"] += _seconds(*self._waits.popleft())

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return sum(self.seconds[phase] for phase in PHASES) / self.steps

    @property
    def communication_seconds(self) -> float | None:
        """Mean of the steps in which it was measured; None if there was none."""
        return self.seconds["communication"] / self.timed_steps if self.timed_steps else None


class Waiting:
    """A context: compute waits for communication inside."""

    def __init__(self, interval: Interval, device: torch.device) -> None:
        self._interval, self._device = interval, device

    def __enter__(self) -> None:
        self._begin = moment(self._device)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._interval.wait(self._begin, moment(self._device))


def _passed(end: Moment) -> bool:
    return isinstance(end, float) or bool(end.query())  # type: ignore[no-untyped-call]


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return float(begin.elapsed_time(end)) / 1000
