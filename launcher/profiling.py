"""torch.profiler over a few steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from launcher.recipe import schema


@contextmanager
def profiled(profile: schema.Profile | None, *, folder: Path, rank: int, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yields what is to be called after each step. Writes `profile/rank_N.json`, a Chrome trace, once the steps are done."""
    if profile is None:
        yield lambda: None
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
    with torch_profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        schedule=schedule(wait=profile.start_step - 1 - warmup, warmup=warmup, active=profile.steps, repeat=1),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(target / f"rank_{rank}.json")),
        record_shapes=True,
    ) as trace:
        yield trace.step
    if snapshot:
        torch.cuda.memory._dump_snapshot(str(target / f"memory_rank_{rank}.pickle"))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
