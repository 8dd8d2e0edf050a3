"""torch.profiler over some steps of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as torch_profile

from launcher.recipe import schema

_ROWS = 40
"""Of a table."""


class Profiler:
    """Names the phases of a step in the trace, and profiles the recipe's steps.

    Writes to `profile/`: `rank_N.pt.trace.json`, a trace for TensorBoard and Perfetto;
    `rank_N_time.txt` and `rank_N_memory.txt`, the operators by their own time and memory; and
    `memory_rank_N.pickle`, a snapshot of the CUDA memory (memory_snapshot).
    """

    def __init__(
        self, profile: schema.Profile, target: Path, *, rank: int, device: torch.device, done: int
    ) -> None:
        """done: steps of the run before this start."""
        self._target, self._rank = target, rank
        self._on_gpu, self._done = device.type == "cuda", done
        self._snapshot, self._recording = profile.memory_snapshot and self._on_gpu, False
        self._phase = ExitStack()
        target.mkdir(parents=True, exist_ok=True)
        before = profile.start_step - 1
        warmup = min(profile.warmup, before)
        self._first, self._last = before - warmup, before + profile.steps
        action = schedule(wait=self._first, warmup=warmup, active=profile.steps, repeat=1)
        self._torch = torch_profile(
            activities=[
                ProfilerActivity.CPU,
                *([ProfilerActivity.CUDA] if self._on_gpu else []),
            ],
            schedule=lambda calls: action(self._done),  # steps of the run, not calls of this start
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )

    def start(self) -> None:
        self._record_memory()
        self._torch.start()

    def stop(self) -> None:
        self._phase.close()
        self._torch.stop()

    def phase(self, name: str) -> None:
        """A phase of a step begins."""
        self._phase.close()
        self._phase.enter_context(record_function(name))

    def step_done(self, step: int) -> None:
        """Call it with each finished step."""
        self._phase.close()
        self._done = step
        self._record_memory()
        self._torch.step()

    def _record_memory(self) -> None:
        if self._snapshot and not self._recording and self._first <= self._done < self._last:
            self._recording = True
            torch.cuda.memory._record_memory_history()

    def _write(self, trace: torch_profile) -> None:
        name = f"rank_{self._rank}"
        if self._snapshot:
            file = str(self._target / f"memory_{name}.pickle")
            torch.cuda.memory._dump_snapshot(file)  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        trace.export_chrome_trace(str(self._target / f"{name}.pt.trace.json"))
        where, operators = "device" if self._on_gpu else "cpu", trace.key_averages()
        for table, column in (("time", "time_total"), ("memory", "memory_usage")):
            text = operators.table(sort_by=f"self_{where}_{column}", row_limit=_ROWS)
            (self._target / f"{name}_{table}.txt").write_text(text + "\n")


@contextmanager
def profiled(
    profile: schema.Profile | None,
    *,
    folder: Path,
    rank: int,
    device: torch.device,
    first_step: int,
) -> Iterator[Profiler | None]:
    """Yields the profiler of this start; None if it profiles nothing.

    first_step: steps done before this start. `profile.start_step` counts steps of the run: after a
    resume among the profiled steps only the rest of them is profiled, and after them none.
    """
    if (
        profile is None
        or first_step >= profile.start_step - 1 + profile.steps
        or (profile.ranks is not None and rank not in profile.ranks)
    ):
        yield None
        return
    profiler = Profiler(profile, folder / "profile", rank=rank, device=device, done=first_step)
    profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()
