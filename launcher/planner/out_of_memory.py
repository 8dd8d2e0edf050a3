"""The out-of-memory report: the request, what holds the memory, what exceeds the plan, what fits.

Nothing here allocates on the device. What the failed step held is still held, so it can be counted.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.metrics.console import bytes_as_text
from launcher.models.initialization import clean_name
from launcher.planner.detect import recorded_settings
from launcher.planner.formatting import micro_batches
from launcher.planner.machine import Machine
from launcher.planner.memory import Plan
from launcher.planner.separate_process import ask
from launcher.recipe.schema import Recipe
from launcher.reliability.run_directory import RunFolder

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
EXCESS = 0.05
"""Share of the whole plan by which a row must exceed its plan to be marked."""
STATES = ("parameters", "gradients", "optimizer")
_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "others": "all other tensors, with the request",
    "unused": "reserved by the allocator, not in use",
    "outside": "driver, communicators, other processes",
    "process": "the rest of the process, with the request",
}
_PHASES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer's step",
    "start": "preparation",
}
_NEXT = (
    "batch.micro_batch_size is auto: the next start takes a smaller one, and resumes from the last "
    "checkpoint"
)


def requested_bytes(error: BaseException) -> int | None:
    """From the error's text: CUDA's `Tried to allocate 2.00 GiB`, the CPU's `allocate 123 bytes`,
    numpy's `Unable to allocate 1.0 GiB`."""
    found = re.search(r"allocate ([\d.]+) ?(bytes|B|[KMGT]iB)\b", str(error))
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


@dataclass(frozen=True)
class Trained:
    """What holds the states of a training."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device


class DeviceMemory(NamedTuple):
    """Bytes of a GPU."""

    allocated: int
    """For tensors."""
    reserved: int
    """By the allocator, for tensors."""
    used: int
    """By all processes."""
    total: int


def take_inventory(
    training: Trained, *, buckets: bool, requested: int
) -> tuple[dict[str, int], DeviceMemory | None]:
    """Bytes that this rank holds and requested, by the keys of `_NAMES`, and those of its GPU.

    buckets: DDP keeps memory for all gradients, even where there are none.
    """
    module, optimizer, device = training.module, training.optimizer, training.device
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = any(isinstance(parameter, DTensor) for parameter in trained)
    # While FSDP's weights are unsharded, plain tensors take the place of the shards
    every = [*module.parameters(), *module.buffers()]
    weights = [p for p in every if isinstance(p, DTensor) or not sharded]
    gradients = [p.grad for p in [*trained, *module.parameters()]]
    values = [value for state in optimizer.state.values() for value in state.values()]
    seen: set[int] = set()
    rows, on_host = {}, 0
    for name, tensors in zip(STATES, ([*trained, *weights], gradients, values), strict=True):
        rows[name], elsewhere = _bytes(tensors, device, seen)
        on_host += elsewhere
    if buckets:
        rows["gradients"] = max(rows["gradients"], sum(p.nbytes for p in trained))
    states = sum(rows.values())
    if device.type != "cuda":
        rest = host_memory.resident() - states - on_host
        return rows | {"process": max(0, rest) + requested}, None
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    gpu = DeviceMemory(allocated, reserved, total - free, total)
    return rows | _gpu_rows(gpu, states, requested), gpu


def _gpu_rows(gpu: DeviceMemory, states: int, requested: int) -> dict[str, int]:
    return {
        "others": max(0, gpu.allocated - states) + requested,
        "unused": max(0, gpu.reserved - gpu.allocated),
        "outside": max(0, gpu.used - gpu.reserved),
    }


def _bytes(values: Iterable[Any], device: torch.device, seen: set[int]) -> tuple[int, int]:
    """Of storages that were not seen before: on this device, and elsewhere."""
    here = elsewhere = 0
    for value in values:
        tensor = value._local_tensor if isinstance(value, DTensor) else value
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        if tensor.device.type == device.type:
            here += storage.nbytes()
        else:
            elsewhere += storage.nbytes()
    return here, elsewhere


def failing_module(traceback: TracebackType | None, module: nn.Module) -> tuple[str, str]:
    """The innermost module whose code ran, and the micro-batch's shape, from a traceback."""
    names = {id(part): clean_name(name) for name, part in module.named_modules() if name}
    where = shape = ""
    while traceback is not None:
        local = traceback.tb_frame.f_locals
        where = names.get(id(local.get("self")), where)
        batch = local.get("micro_batch")
        for name, value in batch.items() if isinstance(batch, dict) and not shape else ():
            if isinstance(value, torch.Tensor) and value.ndim > 1 and not shape:
                shape = f"{name} {' x '.join(map(str, value.shape))}"
        traceback = traceback.tb_next
    return where, shape


@dataclass
class Account:
    """The report."""

    told: str
    """Printed at once."""
    noted: dict[str, Any]
    """For events.jsonl, where a smaller micro-batch would help."""
    restarts_now: bool
    """torchrun restarts the run at once with a smaller micro-batch: the plan is not asked."""
    conclude: Callable[[float], str]
    """What is held beside the plan, what exceeds it, and what fits; takes a time limit."""


class PostMortem:
    """Examines this rank after memory ran out. `training` is set once there is one."""

    def __init__(
        self,
        recipe: Recipe,
        machine: Machine,
        *,
        environment: Environment,
        run: RunFolder,
        restarts_smaller: bool,
    ) -> None:
        self._recipe, self._machine, self._run = recipe, machine, run
        self._environment, self._restarts_smaller = environment, restarts_smaller
        self.training: Trained | None = None

    def examine(self, error: BaseException, *, step: int, phase: str, micro_batch: int) -> Account:
        """Counts what is held, saves a snapshot of the allocator. step: the last finished one."""
        training, requested = self.training, requested_bytes(error)
        on_gpu, ranks = self._machine.device == "cuda", self._environment.world_size
        module, shape, gpu = "", "", None
        rows: dict[str, int] = {}
        if training is not None:
            module, shape = failing_module(error.__traceback__, training.module)
            buckets = self._recipe.strategy.kind == "ddp" and self._machine.ranks > 1
            rows, gpu = take_inventory(training, buckets=buckets, requested=requested or 0)
        on_host = isinstance(error, MemoryError) or "CPUAllocator" in str(error)
        text = f"rank {self._environment.rank} of {ranks} ran out of "
        text += "GPU memory" if on_gpu and not on_host else "memory"
        text += f" in step {step + 1}: in {_PHASES.get(phase, phase)}"
        if phase in ("forward", "backward"):
            count = micro_batches(self._recipe, ranks)
            of = "" if count is None else f" of {count}"
            text += f" of micro-batch {micro_batch}{of}" + (f" ({shape})" if shape else "")
        text += f", in {module}" if module else ""
        if requested is not None:
            text += f"\nit asked for {bytes_as_text(requested)}"
        if requested is not None and gpu is not None:
            text += (
                f"; of {bytes_as_text(gpu.total)}, {bytes_as_text(gpu.total - gpu.used)} were "
                f"free, and {bytes_as_text(gpu.reserved - gpu.allocated)} reserved by the "
                "allocator in pieces too small"
            )
        if on_gpu:
            file = self._run.path / f"out_of_memory_rank_{self._environment.rank}.pickle"
            with contextlib.suppress(Exception):  # the report matters more
                self._run.check()
                torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
                text += f"\nallocator snapshot, for pytorch.org/memory_viz: {file}"
        helps = phase in ("forward", "backward", "optimizer", "data", "evaluation")
        measured = None if gpu is None else gpu.allocated + (requested or 0)
        return self._account(text, helps, phase=phase, rows=rows, measured=measured)

    def killed(self, who: str, step: int) -> Account:
        """The kernel's out-of-memory killer ended another process. who: `rank 1 of 2`. step: the
        last finished one."""
        left = host_memory.available()
        text = f"{who} was ended in step {step + 1} by the kernel: host memory ran out"
        if left is not None:
            text += f"; {bytes_as_text(left)} are left on this node now"
        return self._account(text, self._machine.device == "cpu", phase="", rows={}, measured=None)

    def _account(
        self, told: str, helps: bool, *, phase: str, rows: dict[str, int], measured: int | None
    ) -> Account:
        """helps: whether a smaller micro-batch would. measured: bytes of tensors on the GPU."""
        recipe, machine = self._recipe, self._machine
        smaller = helps and self._restarts_smaller and recipe.batch.micro_batch_size != 1
        restarts_now = smaller and self._environment.restarts_left > 0

        def conclude(seconds: float) -> str:
            if restarts_now:
                return "\n".join([*_table(rows, {}), _NEXT])
            answers, trouble = ask(
                "explain", recipe, machine, measured, rows.get("outside"), seconds=seconds
            )
            lines = _report(answers, trouble, phase, rows)
            return "\n".join([*lines, _NEXT] if smaller else lines)

        noted = recorded_settings(recipe, machine) if helps else {}
        return Account(told, noted, restarts_now, conclude)


def _report(answers: list[Any], trouble: str, phase: str, rows: dict[str, int]) -> list[str]:
    """answers: of `answers.explain`, as far as there are any."""
    if not answers or not isinstance(answers[0], Plan):
        return [*_table(rows, {}), *_suggestions([], trouble or str(answers))]
    plan, *suggestions = answers
    table = _table(rows, _planned(plan, phase, rows))
    return [*table, *_verdict(rows, plan), *_suggestions(suggestions, trouble)]


def _planned(plan: Plan, phase: str, rows: dict[str, int]) -> dict[str, int]:
    """The plan's bytes in this phase, by the keys of the rows."""
    moments = {str(name): moment for name, moment in plan.step.phases.items()}
    components = moments.get(phase, plan.step.peak).components
    planned: dict[str, int] = {name: getattr(components, name) for name in STATES}
    rest = components.total - sum(planned.values())
    if "process" in rows:
        return planned | {"process": rest + plan.context}
    return planned | {"others": rest, "unused": plan.margin, "outside": plan.context}


def _table(rows: dict[str, int], planned: dict[str, int]) -> list[str]:
    """planned: empty where there is no plan."""
    if not rows:
        return []
    width = max(len(_NAMES[name]) for name in rows)
    lines = [f"{'':{width}}  {'now':>10}" + (f"  {'by plan':>10}" if planned else "")]
    for name, size in rows.items():
        line = f"{_NAMES[name]:{width}}  {bytes_as_text(size):>10}"
        if planned:
            line += f"  {bytes_as_text(planned[name]):>10}"
            excess = size - planned[name]
            if excess > EXCESS * sum(planned.values()):
                line += f"  <- {bytes_as_text(excess)} beyond the plan"
        lines.append(line)
    return lines


def _verdict(rows: dict[str, int], plan: Plan) -> list[str]:
    """What the table does not show."""
    memory, free = plan.machine.memory, plan.machine.host_memory
    if memory is not None and plan.needed > memory:
        needed, there = bytes_as_text(plan.needed), bytes_as_text(memory)
        return [f"the plan is {needed} a rank, and there are {there}: the recipe does not fit"]
    if rows:
        return []
    of = "" if free is None else f", and {bytes_as_text(free)} were free at the start"
    return [f"the plan of a node is {bytes_as_text(plan.host.total)} of host memory{of}"]


def _suggestions(answers: list[Any], trouble: str) -> list[str]:
    """answers: empty, or a list of `answers.Suggestion`."""
    if not answers:
        failed = f"what would fit is not known: {trouble}"
        return [failed, "try a smaller batch.micro_batch_size first"]
    if not answers[0]:
        return [
            "no known configuration needs less on these devices: take more devices, a shorter "
            "data.sequence_length, or lora"
        ]
    texts = [" ".join(overrides) for overrides, _, _ in answers[0]]
    width, fastest = max(map(len, texts)), answers[0][0][2]
    lines = ["what fits by plan, the fastest first, as overrides:"]
    for text, (_, needed, tokens_per_second) in zip(texts, answers[0], strict=True):
        share = tokens_per_second / fastest
        speed = f", {share:.0%} of the first's speed" if len(lines) > 1 else ""
        lines.append(f"  {text:{width}}  # {bytes_as_text(needed)} a rank{speed}")
    return lines
