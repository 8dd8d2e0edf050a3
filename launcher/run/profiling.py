"""torch.profiler over some steps of a run."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as torch_profile

from launcher.distributed.rank_layout import RankLayout
from launcher.errors import first_line
from launcher.libraries.private import dump_memory_snapshot, record_memory_history
from launcher.recipe import schema

logger = logging.getLogger(__name__)

_ROWS = 40
"""Rows of a table."""


class Profiler:
    """A context that names the phases of a step in the trace, and profiles the recipe's steps.

    Writes to `profile/`: `rank_N.pt.trace.json`, a trace for TensorBoard and Perfetto;
    `rank_N_time.txt` and `rank_N_memory.txt`, the operators by their own time and memory; and
    `memory_rank_N.pickle`, a snapshot of the CUDA memory (memory_snapshot).
    """

    def __init__(
        self, profile: schema.Profile, folder: Path, *, ranks: RankLayout, done: int
    ) -> None:
        """`done` is the number of steps before this start."""
        self._target, self._rank = folder / "profile", ranks.rank
        self._on_gpu, self._done = ranks.device.type == "cuda", done
        self._snapshot = profile.memory_snapshot and self._on_gpu
        self._phase = ExitStack()
        self._target.mkdir(parents=True, exist_ok=True)
        before = profile.start_step - 1
        warmup = min(profile.warmup, before)
        self._first = before - warmup
        action = schedule(wait=self._first, warmup=warmup, active=profile.steps, repeat=1)
        cuda = [ProfilerActivity.CUDA] if self._on_gpu else []
        self._torch = torch_profile(
            activities=[ProfilerActivity.CPU, *cuda],
            schedule=lambda calls: action(self._done),  # steps of the run, not calls of this start
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )

    def __enter__(self) -> None:
        if self._done >= self._first:
            self._record_memory()
        self._torch.start()

    def __exit__(self, *error: object) -> None:
        self._phase.close()
        self._torch.stop()

    def phase(self, name: str) -> None:
        """A phase of a step begins."""
        self._phase.close()
        self._phase.enter_context(record_function(name))

    def step_done(self, step: int) -> None:
        """A step ends; the profiler starts or stops where the recipe says so."""
        self._phase.close()
        self._done = step
        if step == self._first:
            self._record_memory()
        self._torch.step()

    def _record_memory(self) -> None:
        if self._snapshot:
            record_memory_history(on=True)

    def _write(self, trace: torch_profile) -> None:
        try:
            self._write_files(trace)
        except (OSError, RuntimeError) as error:  # such as a full disk
            logger.warning(f"the profile was not written: {first_line(error)}; training continues")

    def _write_files(self, trace: torch_profile) -> None:
        name = f"rank_{self._rank}"
        if self._snapshot:
            file = str(self._target / f"memory_{name}.pickle")
            dump_memory_snapshot(file)
            record_memory_history(on=False)
        trace.export_chrome_trace(str(self._target / f"{name}.pt.trace.json"))
        where, operators = "device" if self._on_gpu else "cpu", trace.key_averages()
        for table, column in (("time", "time_total"), ("memory", "memory_usage")):
            text = operators.table(sort_by=f"self_{where}_{column}", row_limit=_ROWS)
            (self._target / f"{name}_{table}.txt").write_text(text + "\n")


def make_profiler(
    profile: schema.Profile | None, folder: Path, *, ranks: RankLayout, done: int
) -> Profiler | None:
    """The profiler of a start after `done` steps; None if it profiles nothing. A resume among the
    profiled steps profiles the rest of them."""
    if profile is None or done >= profile.start_step - 1 + profile.steps:
        return None
    if profile.ranks is not None and ranks.rank not in profile.ranks:
        return None
    return Profiler(profile, folder, ranks=ranks, done=done)
