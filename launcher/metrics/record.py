"""From a step's tensors to a line of metrics.jsonl."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from launcher.loop import Step
from launcher.processes import DataParallel


class StepRecorder:
    """Turns steps into records. Every rank calls it for the same steps: a record takes one gathering of a few numbers."""

    def __init__(self, ranks: DataParallel, *, flops_per_token: float, peak_flops: float | None) -> None:
        self._ranks = ranks
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._since = time.perf_counter()
        self._excluded = 0.0
        self._steps = self._tokens = 0
        self._waited = 0.0
        self._cpu = _cpu_seconds()
        self.skipped_in_a_row = self.skipped = 0
        self._pending: list[torch.Tensor] = []

    def restart(self, *, skipped: int, skipped_in_a_row: int) -> None:
        """From another step on, after some time that is no part of it."""
        self.skipped, self.skipped_in_a_row = skipped, skipped_in_a_row
        self._since, self._excluded, self._steps, self._waited, self._cpu = time.perf_counter(), 0.0, 0, 0.0, _cpu_seconds()
        self._pending.clear()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time that is no part of a step: evaluation, saving."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._excluded += time.perf_counter() - begin

    def add(self, step: Step) -> None:
        """Counts a step that is not logged on its own."""
        self._steps += 1
        self._waited += step.batch.seconds_waited
        self._pending.append(step.skipped)

    def record(self, step: Step) -> dict[str, Any]:
        """The record of a step that was added last; waits for the device. Times and rates are means since the last record."""
        device = self._ranks.device
        numbers = [step.loss, step.grad_norm, *self._pending]  # with offload some of them are in host memory
        local = torch.stack([number.to(device, torch.float64) for number in numbers]).tolist()
        mine = torch.tensor([local[0], self._waited, _cpu_seconds() - self._cpu, _peak_memory(device)], dtype=torch.float64)
        gathered = self._gather(mine)
        loss_tokens, tokens, *_ = step.batch.counts.read()
        for skip in local[2:]:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
            self.skipped += int(skip)
        now = time.perf_counter()
        seconds = (now - self._since - self._excluded) / self._steps
        loss, grad_norm, skipped = float(gathered[:, 0].sum()), local[1], bool(local[-1])
        rate = tokens / seconds
        record = {
            "step": step.number,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "learning_rate": step.learning_rate,
            "tokens": tokens,
            "loss_tokens": loss_tokens,
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "mfu": rate * self._flops_per_token / (self._peak_flops * self._ranks.size) if self._peak_flops else None,
            "peak_memory_bytes": int(gathered[:, 3].max()),
            "data_seconds": float(gathered[:, 1].max()) / self._steps,
            "cpu_seconds": float(gathered[:, 2].sum()) / self._steps,
            "samples_seen": step.batch.samples_seen,
            "time": time.time(),
        }
        if skipped:
            record["skipped"] = True
        self._since, self._excluded, self._steps, self._waited, self._cpu = now, 0.0, 0, 0.0, _cpu_seconds()
        self._pending.clear()
        return record

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        if self._ranks.size == 1:
            return mine.unsqueeze(0)
        on_device = mine.to(self._ranks.device)
        gathered = torch.empty(self._ranks.size * len(mine), dtype=mine.dtype, device=self._ranks.device)
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        all_gather(gathered, on_device, group=self._ranks.group)
        return gathered.cpu().view(self._ranks.size, -1)


def _cpu_seconds() -> float:
    """User and system time of this process, without its loader processes."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _peak_memory(device: torch.device) -> int:
    """CUDA: most bytes of tensors so far; CPU: most resident bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
