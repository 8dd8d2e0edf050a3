"""torch.profiler over some steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from launcher.recipe import schema


@contextmanager
def profiled(
    profile: schema.Profile | None,
    *,
    folder: Path,
    rank: int,
    device: torch.device,
    first_step: int,
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of each finished step. Writes
    `profile/rank_N.json`, a Chrome trace.

    first_step: steps done before this start. `profile.start_step` counts steps of the run: after a
    resume among the profiled steps only the rest of them is profiled, and after them none.
    """
    if profile is None or first_step >= profile.start_step - 1 + profile.steps:
        yield lambda step: None
        return
    from torch.profiler import ProfilerActivity, schedule
    from torch.profiler import profile as torch_profile

    target = folder / "profile"
    target.mkdir(parents=True, exist_ok=True)
    on_gpu = device.type == "cuda"
    snapshot = profile.memory_snapshot and on_gpu
    if snapshot:
        torch.cuda.memory._record_memory_history()
    warmup = min(1, profile.start_step - 1)
    action = schedule(
        wait=profile.start_step - 1 - warmup, warmup=warmup, active=profile.steps, repeat=1
    )
    done = first_step
    with torch_profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        schedule=lambda calls: action(done),  # steps of the run, not calls of this start
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(target / f"rank_{rank}.json")),
        record_shapes=True,
    ) as trace:

        def step_done(step: int) -> None:
            nonlocal done
            done = step
            trace.step()

        yield step_done
    if snapshot:
        file = str(target / f"memory_rank_{rank}.pickle")
        torch.cuda.memory._dump_snapshot(file)  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
