"""The out-of-memory report: the request, what holds the memory, what exceeds the plan, what fits.

Nothing here allocates on the device. The memory of the failed step has not been freed yet, so it
can be counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from types import TracebackType
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.console import aligned, bytes_as_text
from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.distributed.separate_process import run_in_process
from launcher.errors import message_of
from launcher.libraries.private import dump_memory_snapshot
from launcher.models.micro_batch import MicroBatch
from launcher.models.names import clean_name
from launcher.models.shards import local_bytes
from launcher.planner.auto import recorded_settings
from launcher.planner.formatting import NAMES, micro_batches
from launcher.planner.machine import Machine
from launcher.planner.measurement import storages
from launcher.planner.memory import Component, Plan
from launcher.planner.plan import make_plan
from launcher.planner.search import search_configurations
from launcher.recipe.schema import Recipe
from launcher.reliability.causes import Account
from launcher.reliability.run_directory import RunFolder

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
EXCESS = 0.05
"""Share of the whole plan by which a row must exceed its plan to be marked."""
SUGGESTIONS = 3
CLEARLY_LESS = 0.03
"""A suggestion must need less memory than the failed recipe by this share of its tensors."""
STATES: tuple[Component, ...] = ("parameters", "gradients", "optimizer")
"""Components of the plan that this rank holds between steps."""
_NAMES: dict[str, str] = {name: NAMES[name] for name in STATES} | {
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
_NOTHING = (
    "no known configuration needs less on these devices: take more devices, a shorter "
    "data.sequence_length, or lora"
)


def requested_bytes(error: BaseException) -> int | None:
    """The size of the failed allocation, from the text of the error: CUDA's `Tried to allocate 2.00
    GiB`, the CPU's `allocate 123 bytes`, numpy's `Unable to allocate 1.0 GiB`."""
    match = re.search(r"allocate ([\d.]+) ?(bytes|B|[KMGT]iB)\b", message_of(error))
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


class DeviceMemory(NamedTuple):
    """Bytes of a GPU."""

    allocated: int
    """Used by this rank for tensors."""
    reserved: int
    """Reserved by this rank's allocator."""
    used: int
    """Used by all processes."""
    total: int


def gpu_memory() -> DeviceMemory:
    """The memory of this rank's GPU, now."""
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return DeviceMemory(allocated, reserved, total - free, total)


def take_inventory(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    gpu: DeviceMemory | None,
    *,
    buckets: bool,
    requested: int,
) -> dict[str, int]:
    """Bytes that this rank holds and requested, by the keys of `_NAMES`. On CPUs `gpu` is None.
    With `buckets`, as in DDP, gradients that are None have memory, too."""
    device = "cpu" if gpu is None else "cuda"
    rows, everywhere = _states(module, optimizer, device, buckets)
    if gpu is None:
        rest = host_memory.resident() - everywhere
        return rows | {"process": max(0, rest) + requested}
    return rows | {
        "others": max(0, gpu.allocated - sum(rows.values())) + requested,
        "unused": max(0, gpu.reserved - gpu.allocated),
        "outside": max(0, gpu.used - gpu.reserved),
    }


def _states(
    module: nn.Module, optimizer: torch.optim.Optimizer, device: str, buckets: bool
) -> tuple[dict[str, int], int]:
    """Bytes of each of `STATES` on the device, and of all of them together on any device. Shared
    storages count once."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = any(isinstance(parameter, DTensor) for parameter in trained)
    # While FSDP's weights are unsharded, plain tensors take the place of the shards
    every = [*module.parameters(), *module.buffers()]
    weights = [p for p in every if isinstance(p, DTensor) or not sharded]
    gradients = [p.grad for p in [*trained, *module.parameters()]]
    values = [value for state in optimizer.state.values() for value in state.values()]
    seen: dict[int, torch.UntypedStorage] = {}
    rows: dict[str, int] = {}
    for name, tensors in zip(STATES, ([*trained, *weights], gradients, values), strict=True):
        new = {key: storage for key, storage in storages(tensors).items() if key not in seen}
        seen |= new
        rows[name] = sum(s.nbytes() for s in new.values() if s.device.type == device)
    if buckets:
        rows["gradients"] = max(rows["gradients"], local_bytes(trained))
    return rows, sum(storage.nbytes() for storage in seen.values())


def failing_module(traceback: TracebackType | None, module: nn.Module) -> tuple[str, str]:
    """The innermost module whose code ran, and the micro-batch's shape, from a traceback."""
    names = {id(part): clean_name(name) for name, part in module.named_modules() if name}
    where = shape = ""
    while traceback is not None:
        local = traceback.tb_frame.f_locals
        where = names.get(id(local.get("self")), where)
        if isinstance(batch := local.get("micro_batch"), MicroBatch) and not shape:
            shapes = [
                f"{name} {' x '.join(map(str, value.shape))}"
                for name, value in batch.inputs.items()
                if isinstance(value, torch.Tensor) and value.ndim > 1
            ]
            shape = shapes[0] if shapes else ""
        traceback = traceback.tb_next
    return where, shape


class MemoryPostMortem:
    """Examines this rank after memory ran out. The run sets what is known at that time."""

    def __init__(self, recipe: Recipe, environment: Environment, run: RunFolder) -> None:
        self._recipe, self._environment, self._run = recipe, environment, run
        self._restarts_smaller = recipe.batch.micro_batch_size == "auto"
        self._machine: Machine | None = None
        self._trained: tuple[nn.Module, torch.optim.Optimizer] | None = None

    def resolved(self, recipe: Recipe, machine: Machine) -> None:
        """The machine is known, and `auto` has been replaced."""
        self._recipe, self._machine = recipe, machine

    def built(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Model and optimizer exist."""
        self._trained = module, optimizer

    def examine(
        self, error: BaseException, *, step: int, phase: str, micro_batch: int
    ) -> Account | None:
        """Counts the memory held and saves a snapshot of the allocator."""
        if self._machine is None:
            return None
        requested = requested_bytes(error)
        rank, ranks = self._environment.rank, self._environment.world_size
        on_gpu = self._machine.device == "cuda"
        module, shape, gpu, rows = "", "", None, dict[str, int]()
        if self._trained is not None:
            module, shape = failing_module(error.__traceback__, self._trained[0])
            gpu = gpu_memory() if on_gpu else None
            buckets = self._recipe.strategy.kind == "ddp" and self._machine.ranks > 1
            rows = take_inventory(*self._trained, gpu, buckets=buckets, requested=requested or 0)
        on_host = isinstance(error, MemoryError) or "CPUAllocator" in message_of(error)
        text = f"rank {rank} of {ranks} ran out of {'GPU ' if on_gpu and not on_host else ''}memory"
        text += f" in step {step + 1}: in {_PHASES.get(phase, phase)}"
        if phase in ("forward", "backward"):
            count = micro_batches(self._recipe.batch, ranks)
            of = "" if count is None else f" of {count}"
            text += f" of micro-batch {micro_batch}{of}" + (f" ({shape})" if shape else "")
        text += f", in {module}" if module else ""
        if requested is not None:
            text += f"\nit requested {bytes_as_text(requested)}"
        if requested is not None and gpu is not None:
            unused = bytes_as_text(gpu.reserved - gpu.allocated)
            text += f"; of {bytes_as_text(gpu.total)}, {bytes_as_text(gpu.total - gpu.used)} were "
            text += f"free, and {unused} reserved by the allocator in pieces too small"
        if on_gpu:
            file = self._run.path / f"out_of_memory_rank_{rank}.pickle"
            with contextlib.suppress(Exception):  # the report matters more
                self._run.check()
                if dump_memory_snapshot(str(file)):
                    text += f"\nallocator snapshot, for pytorch.org/memory_viz: {file}"
        helps = phase in ("forward", "backward", "optimizer", "data", "evaluation")
        measured = None if gpu is None else gpu.allocated + (requested or 0)
        return self._account(self._machine, text, helps, phase=phase, rows=rows, measured=measured)

    def killed(self, process: str, step: int) -> Account | None:
        """The report on a process that the kernel ended, such as `rank 1 of 2`; None if no machine
        is known."""
        if self._machine is None:
            return None
        left = host_memory.available()
        text = f"{process} was ended in step {step + 1} by the kernel: host memory ran out"
        if left is not None:
            text += f"; {bytes_as_text(left)} are left on this node now"
        return self._account(self._machine, text, self._machine.device == "cpu")

    def _account(
        self,
        machine: Machine,
        message: str,
        helps: bool,
        *,
        phase: str = "",
        rows: dict[str, int] | None = None,
        measured: int | None = None,
    ) -> Account:
        """The report, with suggestions. `helps` says whether a smaller micro-batch would help."""
        recipe, rows = self._recipe, rows or {}
        smaller = helps and self._restarts_smaller and recipe.batch.micro_batch_size != 1
        restarts_now = smaller and self._environment.restarts_left > 0

        def explained(seconds: float) -> str:
            lines = _table(rows, {})
            if not restarts_now:
                try:
                    lines = run_in_process(seconds, explain, recipe, machine, phase, rows, measured)
                except Exception as error:  # whatever the error is, the rest of the report matters
                    lines += [f"what would fit is not known: {error}"]
            return "\n".join([*lines, _NEXT] if smaller else lines)

        noted = recorded_settings(recipe, machine) if helps else {}
        return Account(message, noted, restarts_now, explained)


def explain(
    recipe: Recipe, machine: Machine, phase: str, rows: dict[str, int], measured: int | None
) -> list[str]:
    """A table of the memory held and planned, and the fastest configurations that need less.

    `rows` is the result of `take_inventory`. `measured` are the bytes of tensors on the device,
    with the request. If the memory held exceeds the plan, the suggestions are for a device that is
    smaller by the excess.
    """
    plan = make_plan(recipe, machine)
    # In preparation, what the rank holds is not known yet
    planned = _planned(plan, phase) if rows or phase == "start" else {}
    lines = _table(rows, planned)
    memory, whole = machine.memory, machine.host_memory
    if memory is not None and plan.needed > memory:
        needed, there = bytes_as_text(plan.needed), bytes_as_text(memory)
        lines.append(f"the plan is {needed} a rank, and there are {there}: the recipe does not fit")
    elif not rows:
        of = "" if whole is None else f", and a node has {bytes_as_text(whole)}"
        host = bytes_as_text(plan.host.total)
        lines.append(f"the plan of a node is {host} of host memory{of}")
    limit = plan.needed - round(CLEARLY_LESS * plan.tensors)
    if memory is not None:
        beside = max(plan.context, rows.get("outside", 0))
        share = min(1.0, plan.tensors / measured) if measured else 1.0
        limit = min(limit, plan.context + round((memory - beside) * share))
    smaller = dataclasses.replace(machine, memory=limit)
    fitting = [
        configuration
        for configuration in search_configurations(
            recipe, smaller, traced=SUGGESTIONS
        ).configurations
        if configuration.overrides
        and configuration.plan.fits
        and configuration.plan.traced == plan.traced
    ]
    if not fitting:
        return [*lines, _NOTHING]
    suggestions: list[list[str]] = []
    for configuration in fitting[:SUGGESTIONS]:
        text = f"# {bytes_as_text(configuration.plan.needed)} a rank"
        if suggestions:
            speed = configuration.tokens_per_second / fitting[0].tokens_per_second
            text += f", {speed:.0%} of the first's speed"
        suggestions.append(["", " ".join(configuration.overrides), text])
    title = "what fits by plan, the fastest first, as overrides:"
    return [*lines, title, *aligned(suggestions, "<<<")]


def _planned(plan: Plan, phase: str) -> dict[str, int]:
    """The plan's bytes in this phase, or at the peak, by the keys of the rows."""
    moments = {str(name): moment for name, moment in plan.step.phases.items()}
    components = moments.get(phase, plan.step.peak).components
    planned: dict[str, int] = {name: getattr(components, name) for name in STATES}
    rest = components.total - sum(planned.values())
    if plan.machine.device == "cpu":
        return planned | {"process": rest + plan.context}
    return planned | {"others": rest, "unused": plan.margin, "outside": plan.context}


def _table(rows: dict[str, int], planned: dict[str, int]) -> list[str]:
    """A table of two mappings with the same keys; one that is not known is empty."""
    table = [["", "now" if rows else "", "by plan" if planned else "", ""]]
    for name in rows or planned:
        now, by_plan = (bytes_as_text(side[name]) if side else "" for side in (rows, planned))
        excess = rows[name] - planned[name] if rows and planned else 0
        beyond = excess > EXCESS * sum(planned.values())
        remark = f"<- {bytes_as_text(excess)} beyond the plan" if beyond else ""
        table.append([_NAMES[name], now, by_plan, remark])
    return list(aligned(table, "<>><")) if len(table) > 1 else []
