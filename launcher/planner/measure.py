"""What training steps really take: the recipe's model, strategy and loop, trained three steps on full micro-batches.

The plan (`launcher/memory`) is judged by this, so this imports nothing of it. On the CPU the allocator's own events are
added up, on CUDA its own counters are read; what single components take is counted on the tensors themselves.

Started by `measure` under torchrun, once for any number of recipes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_map_only

from launcher.data.loader import GlobalBatch
from launcher.data.synthetic import rows_of
from launcher.distributed import process_group
from launcher.distributed.environment import prepare_cuda, read_environment
from launcher.distributed.process_group import DataParallel
from launcher.distributed.spawn import rank_main, run_ranks
from launcher.errors import TrainingError
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Recipe
from launcher.training.loop import train_steps
from launcher.training.optimizer import LossScale, make_optimizer
from launcher.training.setup import prepare_model

PHASES = ("forward", "backward", "optimizer")

STEPS = 3
"""That are trained. In the first one the optimizer's state does not yet exist. Of the others the least counts: what gloo's threads
release late, when they are kept from the processor, comes on top of a step, and is not of it."""

SETTLE_SECONDS = 0.01
"""That a mark on the CPU waits."""

MICRO_BATCHES = 3
"""Of a step, at most: the first, those between, the last."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes of tensors in the device's memory, on rank 0, in a step once training is under way. On the CPU the device's memory
    is the host's, and what is offloaded counts like all else."""

    device: Literal["cpu", "cuda"]
    peak: int
    """CUDA: of all steps, the first one included. CPU: of the later step that has less."""
    peak_of_ranks: int
    """The largest peak of any rank."""
    phases: dict[str, int]
    """The peak in forward, backward and optimizer."""
    step_start: int
    """Held when a step begins, before its batch is there."""
    after_forward: int
    """Held when the first micro-batch's forward pass has ended, its loss included."""
    after_backward: int
    """Held when the last micro-batch's backward pass has ended."""
    step_end: int
    parameters: int
    """Storages of this rank's parameters (its shards) and buffers."""
    gradients: int
    """Storages of the gradients that the optimizer gets; ddp's are views of its buckets, which are counted whole."""
    optimizer: int
    """Storages of the optimizer's state."""
    gathered: int | None
    """Storages of whole weights that are gathered when the first forward pass has ended. None: ddp under autocast, whose cast copies
    cannot be told from activations."""
    activations: int
    """What the first forward pass has left when it comes to the head; with the head's and the loss's where `logits` is None, with
    the cast copies of weights where `gathered` is None."""
    logits: int | None
    """What head and loss have left. None: the model has no output embedding; or it is frozen, and does not keep what it is given; or
    ddp under autocast, whose cast copy of it is there too."""
    spread: int
    """By how much the peaks of the steps but the first differ."""
    residue: int
    """Left when the model is gone: what the instrument missed, or something else kept."""
    reserved: int | None
    """CUDA: the most that the caching allocator held."""
    context: int | None
    """CUDA: taken on the device, outside of the allocator, by this process and any other."""
    step_peaks: list[int] = field(default_factory=list)
    """The peak of each step, the first one included."""


@dataclass(frozen=True)
class Mark:
    """A point in time."""

    name: str
    live: int
    """Bytes held at it."""
    peak: int
    """The most held from it to the next mark."""


class Meter(Protocol):
    """Bytes of tensors over time, as seen by the allocator."""

    def start(self) -> None:
        """From here on."""

    def mark(self, name: str) -> None:
        """Now is a point to be told about."""

    def stop(self) -> list[Mark]:
        """All marks, in order; the last one is called `end`."""


class CpuMeter:
    """The CPU allocator's own sum, which the profiler writes down at each allocation and release.

    What was there before the first meter of this process is not counted, neither when it is freed. Whatever thread frees or
    allocates, the sum has it; the peak misses what a thread that Python started allocates and frees between two events of
    the others (those of autograd and gloo are profiled with the thread that gave them their work).
    """

    def __init__(self) -> None:
        # Else the allocator leaves out what threads that are not profiled release: gloo's, of its copies.
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._names: list[str] = []

    def start(self) -> None:
        """From here on."""
        self._profile.start()
        self.mark("start")

    def mark(self, name: str) -> None:
        """Allocates a byte, for an event, once gloo's threads have had the time to release what a collective has done with."""
        time.sleep(SETTLE_SECONDS)
        with record_function(f"mark {len(self._names)}"):
            self._names.append(name)
            torch.empty(1, dtype=torch.uint8)

    def stop(self) -> list[Mark]:
        """All marks; profiling has ended."""
        self.mark("end")
        self._profile.stop()
        recorded: Any = self._profile.profiler
        starts: list[tuple[int, str]] = []
        sums: list[tuple[int, int]] = []
        nodes = list(recorded.kineto_results.experimental_event_tree())
        while nodes:
            node = nodes.pop()
            nodes += node.children
            if node.tag == _EventType.Allocation:
                if node.extra_fields.device.type == "cpu":
                    sums.append((node.start_time_ns, node.extra_fields.total_allocated))
            elif node.name.startswith("mark "):
                starts.append((node.start_time_ns, self._names[int(node.name.removeprefix("mark "))]))
        sums.sort(key=lambda event: event[0])
        starts.sort()
        if [name for _, name in starts] != self._names:
            raise TrainingError(f"the profiler recorded {len(starts)} of {len(self._names)} marks")
        times = [when for when, _ in sums]
        first = [bisect_left(times, when) + 1 for when, _ in starts]  # a mark's byte is gone again
        base = sums[first[0]][1]
        marks = []
        for (_, name), since, until in zip(starts, first, [*(index - 1 for index in first[1:]), len(sums)], strict=True):
            marks.append(Mark(name, sums[since][1] - base, max(total for _, total in sums[since:until]) - base))
        return marks


class CudaMeter:
    """The caching allocator's counters."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Mark] = []
        self._now: tuple[str, int] | None = None
        self._before = 0

    def start(self) -> None:
        """From here on."""
        self._release()
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_allocated(self._device)
        self.mark("start")

    def mark(self, name: str) -> None:
        """The counters run ahead of the device as the allocator does: nothing is waited for."""
        if self._now is not None:
            self._marks.append(Mark(*self._now, torch.cuda.max_memory_allocated(self._device) - self._before))
        self._now = (name, torch.cuda.memory_allocated(self._device) - self._before)
        torch.cuda.memory.reset_peak_memory_stats(self._device)

    def _release(self) -> None:
        """Frees cuBLAS' workspaces, and tensors of finished collectives, which NCCL's process group keeps until its next one."""
        assert dist.group.WORLD is not None
        dist.group.WORLD._wait_for_pending_works()
        dist.barrier(device_ids=[self._device.index])
        torch._C._cuda_clearCublasWorkspaces()

    def stop(self) -> list[Mark]:
        """All marks."""
        self._release()
        self.mark("end")
        assert self._now is not None
        return [*self._marks, Mark(*self._now, self._now[1])]


def storage_bytes(tensors: Iterable[torch.Tensor | None], *, device: torch.device, without: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the storages on the device that these tensors lie in, each counted once; of a DTensor this rank's part."""

    def storages(given: Iterable[torch.Tensor | None]) -> dict[int, int]:
        plain = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in given if tensor is not None)
        found = [tensor.untyped_storage() for tensor in plain if tensor.device.type == device.type]
        return {storage._cdata: storage.nbytes() for storage in found}

    left_out = storages(without)
    return sum(size for key, size in storages(tensors).items() if key not in left_out)


def gathered_bytes(model: nn.Module, *, device: torch.device) -> tuple[int, int]:
    """What fully_shard's gathered weights take now, and a gathering's buffer that it keeps until the next one."""
    states: list[Any] = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    # torch 2.13 has several groups to a module
    groups: list[Any] = [group for state in states for group in getattr(state, "_fsdp_param_groups", [state._fsdp_param_group]) if group]
    parameters: list[Any] = [parameter for group in groups for parameter in group.fsdp_params]
    tensors: list[torch.Tensor] = []
    for parameter in parameters:
        tensors += [*parameter.all_gather_outputs, *getattr(parameter, "_unsharded_inner_tensors", ())]
        tensors += [parameter._unsharded_param] if hasattr(parameter, "_unsharded_param") else []
    waiting = [getattr(group.comm_ctx, "all_gather_state", None) for group in groups]
    buffers = [state.all_gather_result.all_gather_output for state in waiting if state is not None]
    return (
        storage_bytes(tensors, device=device, without=[parameter._sharded_param_data for parameter in parameters]),
        storage_bytes(buffers, device=device),
    )


@dataclass
class _Counted:
    """On tensors, while training."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """At the marks `forward`, `head` and `backward` of each step's first micro-batch: weights, and buffers."""
    casts: bool = False
    """ddp under autocast."""
    head_apart: bool = False
    """Whether all that is there when the head is called stays."""
    reserved: int | None = None
    context: int | None = None


def measure_recipe(recipe: Recipe, ranks: DataParallel) -> Measured:
    """Trains the recipe three steps on these ranks, all of which must call it. Weights are random."""
    meter: Meter = CudaMeter(ranks.device) if ranks.device.type == "cuda" else CpuMeter()
    gc.collect()
    meter.start()
    try:
        counted = _train(recipe, ranks, meter)
    finally:
        gc.collect()
        marks = meter.stop()
    measured = evaluate(marks, counted, device=ranks.device.type)
    peaks = [0] * ranks.size
    dist.all_gather_object(peaks, measured.peak, group=ranks.group)
    return dataclasses.replace(measured, peak_of_ranks=max(peaks))


def _train(recipe: Recipe, ranks: DataParallel, meter: Meter) -> _Counted:
    device = ranks.device
    random = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, init="random"))
    prepared = prepare_model(random, device=device, group=ranks.group)
    data = prepared.synthetic_data(recipe.data, recipe.batch)
    rows = rows_of(recipe.batch, sequence_length=recipe.data.sequence_length)
    wrapped = prepared.wrap(random, ranks)
    optimizer = make_optimizer(wrapped.module, recipe.optimizer)
    counted = _Counted(casts=recipe.strategy.kind == "ddp" and prepared.compute_dtype != torch.float32)
    micro_batch = -1

    def note(name: str) -> None:
        meter.mark(name)
        if name in ("forward", "head", "backward") and micro_batch == 0:
            counted.gathered.setdefault(name, []).append(gathered_bytes(wrapped.module, device=device))

    def beat(phase: str) -> None:
        nonlocal micro_batch
        micro_batch = -1 if phase == "data" else micro_batch + (phase == "forward")
        note(phase)
        if phase == "optimizer":
            counted.gradients = storage_bytes((parameter.grad for parameter in wrapped.module.parameters()), device=device)

    module: Any = wrapped.module
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if head is not None:
        head.register_forward_pre_hook(lambda *unused: note("head"))
        counted.head_apart = not counted.casts and any(parameter.requires_grad for parameter in head.parameters())
    micro_batches = min(MICRO_BATCHES, max(1, recipe.batch.global_batch_size // (rows * ranks.size)))
    for _ in train_steps(
        wrapped,
        optimizer,
        _with_own_tensors(data.batches(ranks, micro_batches=micro_batches, steps=STEPS), device=device),
        loss=data.loss,
        learning_rate=lambda step: 1e-4,
        loss_scale=LossScale(device, enabled=prepared.compute_dtype == torch.float16),
        max_grad_norm=recipe.optimizer.max_grad_norm,
        ranks=ranks.size,
        heartbeat=beat,
    ):
        pass
    counted.parameters = storage_bytes([*module.parameters(), *module.buffers()], device=device)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    counted.optimizer = storage_bytes(states, device=device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        counted.reserved = torch.cuda.memory_stats(device)["reserved_bytes.all.peak"]
        counted.context = total - free - torch.cuda.memory_reserved(device)
    return counted


def _with_own_tensors(batches: Iterator[GlobalBatch], *, device: torch.device) -> Iterator[GlobalBatch]:
    """On the CPU a synthetic batch stays where numpy made it, the same for all micro-batches; a loader's are tensors, each its own."""
    for batch in batches:
        if device.type == "cpu":
            clone = partial(tree_map_only, torch.Tensor, torch.clone)
            batch = dataclasses.replace(batch, micro_batches=[clone(micro_batch) for micro_batch in batch.micro_batches])
        yield batch


def evaluate(marks: list[Mark], counted: _Counted, *, device: str) -> Measured:
    """Marks of whole steps, to what they say; of the steps but the first, the least."""
    starts = [index for index, mark in enumerate(marks) if mark.name == "data"]
    assert len(starts) == STEPS + 1
    steps = [_of_step(marks[first : last + 1], counted, number) for number, (first, last) in enumerate(pairwise(starts))]
    peaks = [max(step[phase] for phase in PHASES) for step in steps]
    peak = max(peaks) if device == "cuda" else min(peaks[1:])
    steps = steps[1:]
    least = {key: min(step[key] for step in steps) for key in steps[0]}
    return Measured(
        device="cuda" if device == "cuda" else "cpu",
        peak=peak,
        peak_of_ranks=peak,
        phases={phase: least[phase] for phase in PHASES},
        step_start=least["step_start"],
        after_forward=least["after_forward"],
        after_backward=least["after_backward"],
        step_end=least["step_end"],
        parameters=counted.parameters,
        gradients=counted.gradients,
        optimizer=counted.optimizer,
        gathered=None if counted.casts else least["gathered"],
        activations=least["activations"] if counted.head_apart else least["activations_and_logits"],
        logits=least["logits"] if counted.head_apart else None,
        spread=max(peaks[1:]) - min(peaks[1:]),
        residue=marks[-1].live,
        reserved=counted.reserved,
        context=counted.context,
        step_peaks=peaks,
    )


def _of_step(marks: list[Mark], counted: _Counted, number: int) -> dict[str, int]:
    """marks: from a step's `data` to the next one's, both included."""
    first = {mark.name: mark for mark in reversed(marks)}
    phase_of = {"data": "forward", "head": "forward"}
    found = {phase: max(mark.peak for mark in marks[:-1] if phase_of.get(mark.name, mark.name) == phase) for phase in PHASES}

    def grown(since: str, until: str) -> int:
        """Bytes kept between two marks, but those of gathering."""
        gathering = sum(counted.gathered[until][number]) - sum(counted.gathered[since][number])
        return first[until].live - first[since].live - gathering

    head = "head" if "head" in first else "forward"
    return found | {
        "step_start": marks[0].live,
        "after_forward": first["backward"].live,
        "after_backward": first["optimizer"].live,
        "step_end": marks[-1].live,
        "gathered": counted.gathered["backward"][number][0],
        "activations": grown("forward", head),
        "logits": grown(head, "backward"),
        "activations_and_logits": grown("forward", "backward"),
    }


def run(setting: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank: measures each recipe; returns the fields of `Measured`."""
    environment = read_environment()
    with process_group.process_group(environment, device="any", init_timeout=300) as (ranks, _):
        process_group.set_threads(environment, device=ranks.device, cpu_offload=True)
        results = []
        for arguments in setting["recipes"]:
            recipe = load_recipe(arguments, ranks=ranks.size, files=False).recipe
            process_group.set_numerics(deterministic=recipe.run.deterministic, float32_matmul=recipe.run.float32_matmul)
            results.append(dataclasses.asdict(measure_recipe(recipe, ranks)))
        return results


def measure(recipes: Sequence[Sequence[str]], *, ranks: int, gpus: bool = True, timeout: float = 600) -> list[Measured]:
    """Measures recipes, each given as on the command line, in one launch of torchrun on this machine.

    gpus: whether GPUs are used where there are some. timeout: seconds for all of them.
    Raises RecipeError as `load_recipe`, TrainingError where the processes fail or are
    not done in time; none is left behind.
    """
    for arguments in recipes:
        load_recipe(arguments, ranks=ranks, files=False)
    variables = dict(os.environ)
    prepare_cuda(variables, deterministic=False)  # as a training run has it
    if not gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    setting = {"recipes": [list(arguments) for arguments in recipes]}
    ended = run_ranks("launcher.planner.measure", setting, ranks=ranks, seconds=timeout, variables=variables)
    if ended.status != 0 or ended.result is None:
        what = f"were not done after {timeout:.0f} s" if ended.status is None else f"ended with status {ended.status}"
        why = ended.error or f"the end of what they printed:\n{ended.printed[-4000:]}"
        raise TrainingError(f"the {ranks} processes that measure {what}: {why}")
    return [Measured(**measured) for measured in ended.result]


if __name__ == "__main__":
    rank_main(run)
