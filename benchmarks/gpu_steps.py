"""Trains the rows of gpu_rows.py in one process for each GPU: time and memory, by plan and measured.

    python benchmarks/gpu_steps.py --group steps                       # one GPU; on more: with torchrun
    python benchmarks/gpu_steps.py --group memory --tiny               # also on a CPU: does it run?

A start of each configuration would take longer than its steps. Prints a row of a Markdown table for
each, when it is done:

- `ms`: a step, the mean of those after the warm-up; `enqueue ms`: until the host has started it.
- `GiB`: the most bytes of tensors; `reserved GiB`: of the allocator; `retries`: allocations that it
  repeated after it had waited for the GPU and freed memory.
- `waits`: lines of code that wait for the GPU in a step; `kernels, ms`: of one step, by kind, and
  the longest kernels of no kind by name.

Rows are full, and each is one document, so that MFU counts no attention that is masked away. The
rows of the groups `memory` and `goals` have only time and memory. A row that fails has its reason.
Exit status: 1 if one failed, or if its loss did not fall.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.distributed.environment import prepare_cuda, read_environment

prepare_cuda(deterministic=False)  # before torch is imported, as a training run has it

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpu_plans import PLANS, planned  # noqa: E402
from gpu_rows import COMPILED, GROUPS, Row, rows_of  # noqa: E402

from launcher.distributed import process_group  # noqa: E402
from launcher.distributed.hardware import find_gpu, peak_flops  # noqa: E402
from launcher.distributed.rank_layout import RankLayout  # noqa: E402
from launcher.models.flops import token_flops  # noqa: E402
from launcher.optimizers.optimizer import LossScale  # noqa: E402
from launcher.planner.recipe_values import micro_batches_of, with_random_weights  # noqa: E402
from launcher.training.loop import Update, train_steps  # noqa: E402
from launcher.training.model import prepare_model  # noqa: E402

COLUMNS = (
    "row | ms | ms by plan | tokens/s | MFU | GiB | GiB by plan | reserved GiB | retries | waits "
    "| enqueue ms | s to step 1 | loss | kernels, ms"
)
NULL = "NULLGPU_COUNT" in os.environ
"""Whether the GPUs are null GPUs (tests/nullgpu), which compute no values."""
KINDS = {
    "attention": ("flash", "sdpa", "fmha"),
    "products": ("gemm", "nvjet", "cutlass", "xmma"),
    "compiled": ("triton",),
    "nccl": ("nccl",),
    "copies": ("memcpy", "memset", "chunk_cat", "split_with_sizes"),
    "optimizer": ("multi_tensor",),
}
"""Words in the names of kernels."""
SPACES = re.compile(r"\s+")


class Measured:
    """What was measured of a row; None: it was not, or has no value here."""

    seconds: float
    enqueue: float
    to_step_1: float
    peak: int | None = None
    reserved: int | None = None
    retries: int | None = None
    waits: Counter[str] | None = None
    kernels: Counter[str] | None = None
    flops_per_token: float = 0.0

    def __init__(self) -> None:
        self.losses: list[float] = []


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Counts the lines of code that wait for the GPU, on this thread."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "called a synchronizing" in str(warning.message):
            found[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


@contextlib.contextmanager
def kernel_times() -> Iterator[Counter[str]]:
    """Milliseconds of kernels by kind, and their number."""
    found: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield found
        synchronize()
    others: Counter[str] = Counter()
    for event in profile.key_averages():
        if event.device_type == torch.autograd.DeviceType.CPU:  # a launch, not a kernel
            continue
        name, ms = event.key.lower(), event.device_time_total / 1000
        kinds = (kind for kind, words in KINDS.items() if any(word in name for word in words))
        kind = next(kinds, "others")
        found[kind] += ms
        found["count"] += event.count
        if kind == "others":
            others[SPACES.sub(" ", event.key)[:100].replace("|", "/")] += ms
    for name, ms in others.most_common(5):
        found[f"of others: {name}"] = ms


def train(row: Row, ranks: RankLayout, *, warm_up: int, timed: int, detailed: bool) -> Measured:
    """Trains a row on synthetic full rows with the launcher's own loop. All ranks call this.

    `detailed` adds two steps: one that counts waits and one that is profiled.
    """
    started, device = time.perf_counter(), ranks.device
    cuda = device.type == "cuda"
    recipe = row.recipe(ranks.size, half=cuda)
    recipe = with_random_weights(recipe, compile=recipe.model.compile is True)
    process_group.set_numerics(deterministic=False, float32_matmul=recipe.run.float32_matmul)
    found, retried, before = Measured(), 0, 0
    if cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        retried = torch.cuda.memory_stats()["num_alloc_retries"]
    prepared = prepare_model(recipe, device=device)
    data = prepared.synthetic_data(
        recipe.data, recipe.batch, prepared.row_division(recipe.strategy, ranks), documents=1
    )
    wrapped = prepared.wrap(recipe, ranks)
    optimizer = prepared.make_optimizer(wrapped, recipe)
    update = Update(optimizer, lambda step: 1e-4, LossScale(device, enabled=False), 1.0)
    batches = data.batches(
        ranks,
        micro_batches=micro_batches_of(recipe, ranks=ranks.size),
        steps=warm_up + timed + 2,
    )
    steps = train_steps(wrapped, batches, loss=data.loss, update=update, averaged_over=ranks.size)
    losses: list[torch.Tensor] = []

    def advance(count: int) -> None:
        losses.extend(step.loss for step in itertools.islice(steps, count))

    advance(1)
    synchronize()
    found.to_step_1 = time.perf_counter() - started
    advance(warm_up - 1)
    synchronize()
    began = time.perf_counter()
    advance(timed)
    found.enqueue = (time.perf_counter() - began) / timed
    synchronize()
    found.seconds = (time.perf_counter() - began) / timed
    if cuda:
        found.peak = torch.cuda.max_memory_allocated() - before
        found.reserved = torch.cuda.max_memory_reserved()
        found.retries = torch.cuda.memory_stats()["num_alloc_retries"] - retried
    if cuda and detailed:
        with counted_waits() as found.waits:
            advance(1)
        with kernel_times() as found.kernels:
            advance(1)
    found.losses = [float(loss) for loss in losses]
    found.flops_per_token = token_flops(wrapped.module).at(row.length)
    return found


def release(device: torch.device) -> None:
    """Frees what a row leaves behind: tensors that NCCL keeps until its next collective, and the
    graphs that dynamo has compiled for its blocks, because after eight variants of a function it
    would compile no more. All ranks call this."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        assert dist.group.WORLD is not None
        dist.group.WORLD._wait_for_pending_works()
        dist.barrier(device_ids=[device.index])
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def cells(row: Row, found: Measured, plan: dict[str, Any], ranks: int, gpu: str | None) -> str:
    """The cells of a row of the table."""

    def text(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    def gib(value: int | None) -> str:
        return text(None if value is None else value / 2**30, "{:.2f}")

    speed = row.tokens(ranks) / found.seconds
    peak, kernels = None if gpu is None else peak_flops(gpu), found.kernels
    seconds = plan.get("seconds")
    waits = None if found.waits is None else ", ".join(f"{k} x {n}" for k, n in found.waits.items())
    times = None
    if kernels is not None:
        count = kernels.pop("count", 0)
        parts = [f"{kind} {ms:.1f}" for kind, ms in kernels.most_common()]
        times = ", ".join([f"{count:.0f} kernels", *parts])
    return " | ".join(
        [
            row.name,
            f"{1000 * found.seconds:.1f}",
            text(None if seconds is None else 1000 * seconds, "{:.1f}"),
            f"{speed:.0f}",
            text(None if peak is None else speed * found.flops_per_token / peak / ranks, "{:.1%}"),
            gib(found.peak),
            gib(plan.get("peak")),
            gib(found.reserved),
            text(found.retries, "{}"),
            "" if waits is None else waits or "none",
            f"{1000 * found.enqueue:.1f}",
            f"{found.to_step_1:.1f}",
            f"{found.losses[0]:.4f} to {found.losses[-1]:.4f}",
            times or "",
        ]
    )


def measure(options: argparse.Namespace, ranks: RankLayout) -> list[str]:
    """Prints the table on rank 0. Returns the names of the rows that failed."""
    started, failed = time.monotonic(), []
    gpu = torch.cuda.get_device_name(0) if ranks.device.type == "cuda" else None
    listed = None if gpu is None else find_gpu(gpu)
    known = None if listed is None else listed.name
    plans = planned(options.plans, known or "", ranks.size)
    detailed = options.group in ("steps", "widths", "families")
    count = {"warm_up": 3, "timed": 2 if options.tiny else 5}
    if not detailed:  # the steps of goals take many seconds
        count = {"warm_up": 2, "timed": 2 if options.group == "memory" else 1}

    def show(line: str) -> None:
        if ranks.rank == 0:
            print(line, flush=True)

    show(f"| {COLUMNS} |\n|---|{'---|' * COLUMNS.count('|')}")
    every = None if options.tiny else known or "none"
    for row in rows_of(options.group, gpu=every, ranks=ranks.size):
        if options.eager and COMPILED in row.overrides:
            continue
        if options.rows is not None and row.name not in options.rows:
            continue
        if time.monotonic() - started > options.seconds:
            show(f"not started: {row.name}")
            continue
        plan = {} if options.tiny else plans.get(f"{options.group}: {row.name}", {})
        try:
            found = train(row.tiny() if options.tiny else row, ranks, detailed=detailed, **count)
        except Exception as error:  # the other rows are measured all the same
            failed.append(row.name)
            first = str(error).replace("|", "/").splitlines() or [""]
            reason = f"failed: {type(error).__name__}: {first[0][:200]}"
            show(f"| {row.name} | {reason} |{' |' * (COLUMNS.count('|') - 1)}")
            del error
        else:
            if not NULL and found.losses[-1] >= found.losses[0]:
                failed.append(f"{row.name}: its loss did not fall")
            show(f"| {cells(row.tiny() if options.tiny else row, found, plan, ranks.size, gpu)} |")
            del found
        release(ranks.device)
    return failed


def main() -> int:
    """Prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", choices=GROUPS, default="steps")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="some rows of the group, by name")
    parser.add_argument("--eager", action="store_true", help="skips the compiled rows")
    parser.add_argument("--tiny", action="store_true", help="small models: does everything run?")
    parser.add_argument("--seconds", type=float, default=3600, help="no row starts later")
    parser.add_argument("--plans", type=Path, default=PLANS, help="file of gpu_plans.py")
    options = parser.parse_args()
    environment = read_environment()
    with process_group.process_group(environment, device="any", init_timeout=300) as (ranks, _):
        process_group.prepare_cpu(environment, device=ranks.device, cpu_offload=True)
        failed = measure(options, ranks)
    if failed and environment.main:
        print("\nFailed:", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
