"""Measures memory and time of a few training steps on full micro-batches.

`launcher plan --verify` checks the plan against this measurement, so this module does not import
from the planner. `measure_recipes` starts it under torchrun, once for any number of recipes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from launcher.data.loader import GlobalBatch, MicroBatches
from launcher.distributed import process_group
from launcher.distributed.environment import prepare_cuda, read_environment
from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.spawn import rank_main, run_ranks
from launcher.errors import TrainingError
from launcher.libraries.private import (
    clear_cublas_workspaces,
    storage_id,
    tree_map_only,
    wait_for_pending_works,
)
from launcher.optimizers.optimizer import LossScale
from launcher.planner.recipe_values import micro_batches_of, with_random_weights
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Recipe
from launcher.reliability.json_files import Json
from launcher.training.loop import Update, train_steps
from launcher.training.model import prepare_model

PHASES = ("forward", "backward", "optimizer")
STEPS = 3
"""Training steps. On the CPU the smallest peak of the steps after the first is used: gloo's threads
may release buffers late, which is not memory of the step."""
SETTLE_SECONDS = 0.01
"""Pause before each mark on the CPU, for the same reason."""
MICRO_BATCHES = 3
"""Maximum number of micro-batches of a step: the first, one between, the last."""
WARM_UP, TIMED = 2, 3
"""Steps that allocate memory and compile, and the timed steps after them."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Bytes of tensors on the device of rank 0. On a CPU, offloaded tensors count, too."""

    peak: int
    """The peak of all steps on CUDA; on a CPU the smallest peak of a later step."""
    phases: dict[str, int]
    """The peak of each phase in the later steps."""
    step_start: int
    """Before the batch of a step is loaded."""
    after_forward: int
    """After the forward pass of the first micro-batch."""
    parameters: int
    """This rank's shards, with buffers."""
    gradients: int
    """What the optimizer gets; with DDP whole buckets."""
    optimizer: int
    reserved: int | None = None
    """The most that CUDA's caching allocator reserved."""
    context: int | None = None
    """Memory of a GPU outside of the allocator, of all processes."""
    step_peaks: list[int]
    residue: int
    """After the model was deleted; 0 unless the measurement missed something."""
    seconds: float | None = None
    """Duration of an optimizer step with all its micro-batches; None if not timed."""


@dataclass(frozen=True)
class Mark:
    """A point in time, the bytes held then, and the most bytes held until the next mark."""

    name: str
    live: int
    peak: int


class CpuMeter:
    """Memory of CPU tensors: the profiler records the allocator's total at each of its events.

    The total covers all threads. The peak misses memory that autograd's and gloo's threads, which
    are not profiled, allocate and free between two events.
    """

    def __init__(self) -> None:
        # Without this flag, memory freed by threads that are not profiled is not reported
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        """Counts from 0."""
        self._profile.start()
        self.mark("start")

    def mark(self, name: str) -> None:
        """Allocates a byte, which the profiler records as an event."""
        time.sleep(SETTLE_SECONDS)
        with record_function(f"mark {name}"):
            torch.empty(1, dtype=torch.uint8)

    def stop(self) -> list[Mark]:
        """Returns all marks; the last one is called `end`."""
        self.mark("end")
        self._profile.stop()
        recorded: Any = self._profile.profiler
        starts: list[tuple[int, str]] = []
        totals: list[tuple[int, int]] = []
        nodes = list(recorded.kineto_results.experimental_event_tree())
        while nodes:
            node = nodes.pop()
            nodes += node.children
            if node.tag.name == "Allocation":
                if node.extra_fields.device.type == "cpu":
                    totals.append((node.start_time_ns, node.extra_fields.total_allocated))
            elif node.name.startswith("mark "):
                starts.append((node.start_time_ns, node.name.removeprefix("mark ")))
        totals.sort(key=lambda event: event[0])
        starts.sort()
        times = [when for when, _ in totals]
        # The mark allocates a byte, and the event after the mark's own event frees it
        first = [bisect_left(times, when) + 1 for when, _ in starts]
        base = totals[first[0]][1]
        ends = [index - 1 for index in first[1:]]
        ends.append(len(totals))
        marks = []
        for (_, name), since, until in zip(starts, first, ends, strict=True):
            peak = max(total for _, total in totals[since:until])
            marks.append(Mark(name, totals[since][1] - base, peak - base))
        return marks


class CudaMeter:
    """Memory of CUDA tensors, from the counters of the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Mark] = []
        self._before = 0

    def start(self) -> None:
        """Counts from 0."""
        self._release()
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_allocated(self._device)
        self.mark("start")

    def mark(self, name: str) -> None:
        """Reads the counters; they need no synchronization with the device."""
        if self._marks:
            peak = torch.cuda.max_memory_allocated(self._device) - self._before
            self._marks[-1] = dataclasses.replace(self._marks[-1], peak=peak)
        live = torch.cuda.memory_allocated(self._device) - self._before
        self._marks.append(Mark(name, live, live))
        torch.cuda.memory.reset_peak_memory_stats(self._device)

    def _release(self) -> None:
        """Frees cuBLAS workspaces, and tensors that NCCL keeps until its next collective."""
        assert dist.group.WORLD is not None
        wait_for_pending_works(dist.group.WORLD)
        dist.barrier(device_ids=[self._device.index])
        clear_cublas_workspaces()

    def stop(self) -> list[Mark]:
        """Returns all marks; the last one is called `end`."""
        self._release()
        self.mark("end")
        return self._marks


class Clock:
    """When the phases of steps began. On CUDA this is the device's time: within a step the host runs
    ahead of it, as in training, and waits for it only between steps."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        """Phases, with an event on CUDA and else with seconds."""

    def mark(self, phase: str) -> None:
        """A phase begins; `data` begins a step."""
        if not self._on_gpu:
            self._marks.append((phase, time.perf_counter()))
            return
        if phase == "data":
            torch.cuda.synchronize()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((phase, event))

    def times(self) -> list[tuple[str, float]]:
        """Names of phases, and seconds. On CUDA waits for the device."""
        if not self._on_gpu:
            return self._marks
        torch.cuda.synchronize()
        first = self._marks[0][1]
        return [(phase, first.elapsed_time(event) / 1000) for phase, event in self._marks]


def storages(values: Iterable[object]) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors among these values, by address. The storage of a DTensor is its
    local shard's."""
    local = (value.to_local() if isinstance(value, DTensor) else value for value in values)
    tensors = [value for value in local if isinstance(value, torch.Tensor) and not value.is_meta]
    return {storage_id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}


def storage_bytes(values: Iterable[object], *, device: str) -> int:
    """Total size of the storages of these values on a kind of device, without mapped files."""
    own = [storage for storage in storages(values).values() if storage.device.type == device]
    return sum(storage.nbytes() for storage in own if storage.filename is None)


def measure_recipe(recipe: Recipe, ranks: RankLayout, *, timed: bool = False) -> Measurement:
    """Trains the recipe for three steps from random weights, and if `timed` for some more, to
    measure their time. All ranks must call it."""
    device = ranks.device
    meter = CudaMeter(device) if device.type == "cuda" else CpuMeter()
    gc.collect()
    meter.start()
    try:
        sizes = _train(recipe, ranks, meter.mark, steps=STEPS)
    finally:
        gc.collect()
        marks = meter.stop()
    if timed:
        clock = Clock(device)
        _train(recipe, ranks, clock.mark, steps=WARM_UP + TIMED)
        sizes["seconds"] = median_step(clock.times(), micro_batches_of(recipe, ranks=ranks.size))
    return evaluate(marks, sizes, device=device.type)


def median_step(times: list[tuple[str, float]], micro_batches: int) -> float:
    """Seconds of a step with this number of micro-batches: the median of the timed steps.

    `times` says when each phase of steps with at most `MICRO_BATCHES` began. Each further
    micro-batch is assumed to take as long as the second one, which is neither the first nor the
    last.
    """
    starts = [index for index, (name, _) in enumerate(times) if name == "data"]
    steps = []
    for first, last in list(pairwise(starts))[WARM_UP:]:
        forwards = [start for name, start in times[first:last] if name == "forward"]
        seconds = times[last][1] - times[first][1]
        if micro_batches > len(forwards):
            seconds += (micro_batches - len(forwards)) * (forwards[2] - forwards[1])
        steps.append(seconds)
    return statistics.median(steps)


def _train(recipe: Recipe, ranks: RankLayout, mark: Callable[[str], None], *, steps: int) -> Json:
    """Sets a mark at each phase. Returns sizes of storages, as fields of `Measurement`."""
    ranks = ranks.with_sizes(recipe.strategy)
    device, sizes = ranks.device, dict[str, object]()
    random = with_random_weights(recipe, compile=recipe.model.compiles)
    prepared = prepare_model(random, device=device)
    data = prepared.synthetic_data(
        recipe.data, recipe.batch, prepared.row_division(recipe.strategy, ranks)
    )
    wrapped = prepared.wrap(random, ranks)
    optimizer = prepared.make_optimizer(wrapped, recipe)
    count = min(MICRO_BATCHES, micro_batches_of(recipe, ranks=ranks.size))
    batches = data.batches(ranks, micro_batches=count, steps=steps)
    if device.type == "cpu":
        batches = map(_with_own_tensors, batches)
    module: Any = wrapped.module

    def heartbeat(phase: str) -> None:
        mark(phase)
        if phase == "optimizer":
            gradients = (parameter.grad for parameter in module.parameters())
            sizes["gradients"] = storage_bytes(gradients, device=device.type)

    scale = LossScale(device, enabled=prepared.compute_dtype == torch.float16)
    update = Update(
        optimizer,
        lambda step: 1e-4,
        scale,
        recipe.optimizer.max_grad_norm,
        average_decay=recipe.optimizer.ema,
    )
    for _ in train_steps(
        wrapped,
        batches,
        loss=data.loss,
        update=update,
        averaged_over=ranks.size,
        heartbeat=heartbeat,
    ):
        pass
    weights = [*module.parameters(), *module.buffers()]
    sizes["parameters"] = storage_bytes(weights, device=device.type)
    states = (value for state in optimizer.state.values() for value in state.values())
    sizes["optimizer"] = storage_bytes(states, device=device.type)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        sizes["reserved"] = torch.cuda.memory_stats(device)["reserved_bytes.all.peak"]
        sizes["context"] = total - free - torch.cuda.memory_reserved(device)
    return sizes


def _with_own_tensors(batch: GlobalBatch) -> GlobalBatch:
    """On the CPU synthetic micro-batches share memory of numpy; a loader gives each its own."""
    clone = partial(tree_map_only, torch.Tensor, torch.clone)
    copies = MicroBatches(batch.micro_batches, lambda each: each.mapped(clone))
    return dataclasses.replace(batch, micro_batches=copies)


def evaluate(marks: list[Mark], sizes: Json, *, device: str) -> Measurement:
    """Finds peaks and totals from the marks of `STEPS` steps."""
    starts = [index for index, mark in enumerate(marks) if mark.name == "data"]
    assert len(starts) == STEPS + 1
    steps = []
    for first, last in pairwise(starts):
        step: dict[str, int] = dict.fromkeys(PHASES, 0)
        for mark in marks[first:last]:
            phase = mark.name.replace("data", "forward")
            step[phase] = max(step[phase], mark.peak)
        backward = next(mark for mark in marks[first:last] if mark.name == "backward")
        steps.append(step | {"step_start": marks[first].live, "after_forward": backward.live})
    peaks = [max(step[phase] for phase in PHASES) for step in steps]
    least = {key: min(step[key] for step in steps[1:]) for key in steps[0]}
    return Measurement(
        peak=max(peaks) if device == "cuda" else min(peaks[1:]),
        phases={phase: least.pop(phase) for phase in PHASES},
        step_peaks=peaks,
        residue=marks[-1].live,
        **least,
        **sizes,
    )


def run(setting: Json) -> list[Json]:
    """On every rank: measures each recipe; returns the fields of `Measurement`."""
    environment = read_environment()
    with process_group.process_group(environment, device="any", init_timeout=300) as (ranks, _):
        process_group.prepare_cpu(environment, device=ranks.device, cpu_offload=True)
        results = []
        for arguments in setting["recipes"]:
            recipe = load_recipe(arguments, ranks=ranks.size, files=False).recipe
            process_group.set_numerics(
                deterministic=recipe.run.deterministic, float32_matmul=recipe.run.float32_matmul
            )
            measured = measure_recipe(recipe, ranks, timed=setting["timed"])
            results.append(dataclasses.asdict(measured))
        return results


def measure_recipes(
    recipes: Sequence[Sequence[str]],
    *,
    ranks: int,
    gpus: bool = True,
    timeout: float = 600,
    timed: bool = False,
) -> list[Measurement]:
    """Measures recipes, each given as on the command line, on GPUs where there are some.

    timeout is in seconds, for all recipes together; `timed` measures seconds, too. Raises
    RecipeError as `load_recipe`, and TrainingError if the processes fail or take too long.
    """
    for arguments in recipes:
        load_recipe(arguments, ranks=ranks, files=False)
    variables = dict(os.environ)
    prepare_cuda(variables, deterministic=False)  # as a training run has it
    if not gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    setting = {"recipes": [list(arguments) for arguments in recipes], "timed": timed}
    ended = run_ranks(
        "launcher.planner.measurement", setting, ranks=ranks, seconds=timeout, variables=variables
    )
    if ended.status != 0 or ended.result is None:
        what = "timed out" if ended.status is None else f"ended with status {ended.status}"
        why = ended.error or f"the end of what they printed:\n{ended.printed[-4000:]}"
        raise TrainingError(f"the {ranks} processes that measure {what}: {why}")
    return [Measurement(**measured) for measured in ended.result]


if __name__ == "__main__":
    rank_main(run)
