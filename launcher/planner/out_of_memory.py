"""Memory ran out: who requested how much, what holds the rest, what grew beyond the plan.

Nothing here allocates on the device. What the failed step held is still held, so it can be counted.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.metrics.console import bytes_as_text
from launcher.models.initialization import clean_name
from launcher.planner.detect import noted_of
from launcher.planner.formatting import micro_batches
from launcher.planner.machine import Machine
from launcher.planner.separate_process import Answer, ask
from launcher.recipe.schema import Recipe
from launcher.reliability.run_directory import RunFolder

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
GREW = 0.05
"""Share of the plan by which a component must exceed it to count as grown."""
STATES = ("parameters", "gradients", "optimizer")
_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "others": "all other tensors, with what was asked for",
    "unused": "kept by the allocator, not in use",
    "outside": "driver, communicators, other processes",
    "process": "all else of the process, with what was asked for",
}
_NEXT = (
    "batch.micro_batch_size is auto: the next start takes a smaller one, and resumes from the last "
    "checkpoint"
)


def asked_for(error: BaseException) -> int | None:
    """Bytes that were requested, from the error's text: CUDA's `Tried to allocate 2.00 GiB`, the
    CPU's `allocate 123 bytes`, numpy's `Unable to allocate 1.0 GiB`."""
    found = re.search(r"allocate ([\d.]+) ?(bytes|B|[KMGT]iB)\b", str(error))
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


@dataclass(frozen=True)
class Inventory:
    """Bytes of one rank when memory ran out."""

    parameters: int
    gradients: int
    optimizer: int
    on_host: int
    """Of these three, offloaded to the host: not counted in them."""
    used: int
    """CUDA: of the device, by all processes. CPU: this process's resident memory."""
    allocated: int | None = None
    """CUDA: all tensors on the device."""
    reserved: int | None = None
    """CUDA: what the allocator reserves for tensors."""
    total: int | None = None
    """CUDA: of the device."""

    def rows(self, asked: int) -> dict[str, int]:
        """By the keys of `_NAMES`."""
        rows = {name: getattr(self, name) for name in STATES}
        counted = sum(rows.values())
        if self.allocated is None or self.reserved is None:
            return rows | {"process": max(0, self.used - counted - self.on_host) + asked}
        return rows | {
            "others": max(0, self.allocated - counted) + asked,
            "unused": max(0, self.reserved - self.allocated),
            "outside": max(0, self.used - self.reserved),
        }


def take_inventory(
    module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, *, buckets: bool
) -> Inventory:
    """Counts the storages of a training's states, and asks the allocator for the rest.

    buckets: DDP keeps memory for all gradients, even where there are none.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = any(isinstance(parameter, DTensor) for parameter in trained)
    # While FSDP's weights are unsharded, plain tensors take the place of the shards
    every = [*module.parameters(), *module.buffers()]
    weights = [p for p in every if isinstance(p, DTensor) or not sharded]
    seen: set[int] = set()
    states = (value for state in optimizer.state.values() for value in state.values())
    kinds = {
        "parameters": _bytes([*trained, *weights], device, seen),
        "gradients": _bytes([p.grad for p in [*trained, *module.parameters()]], device, seen),
        "optimizer": _bytes(states, device, seen),
    }
    found = {name: here for name, (here, _) in kinds.items()}
    found["on_host"] = sum(elsewhere for _, elsewhere in kinds.values())
    if buckets:
        found["gradients"] = max(found["gradients"], sum(p.nbytes for p in trained))
    if device.type != "cuda":
        return Inventory(**found, used=host_memory.resident())
    free, total = torch.cuda.mem_get_info(device)
    return Inventory(
        **found,
        used=total - free,
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        total=total,
    )


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


def at_work(traceback: TracebackType | None, module: nn.Module) -> tuple[str, str]:
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


@dataclass(frozen=True)
class Trained:
    """What holds a training's states."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device


class PostMortem:
    """One rank's. Made before anything is allocated; `training` is set once there is one."""

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
        recipe, training, asked = self._recipe, self.training, asked_for(error)
        on_gpu = self._machine.device == "cuda"
        rank, ranks = self._environment.rank, self._environment.world_size
        host_error = isinstance(error, MemoryError) or "CPUAllocator" in str(error)
        module, shape, inventory = "", "", None
        if training is not None:
            module, shape = at_work(error.__traceback__, training.module)
            buckets = recipe.strategy.kind == "ddp" and self._machine.ranks > 1
            inventory = take_inventory(
                training.module, training.optimizer, training.device, buckets=buckets
            )
        phases = {
            "forward": "the forward pass",
            "backward": "the backward pass",
            "optimizer": "the optimizer's step",
            "start": "preparation",
        }
        when = f"step {step + 1}: in {phases.get(phase, phase)}"
        if phase in ("forward", "backward"):
            count = micro_batches(recipe, ranks)
            of = "" if count is None else f" of {count}"
            when += f" of micro-batch {micro_batch}{of}" + (f" ({shape})" if shape else "")
        when += f", in {module}" if module else ""
        what = "GPU memory" if on_gpu and not host_error else "memory"
        lines = [f"rank {rank} of {ranks} ran out of {what} in {when}"]
        if asked is not None:
            lines.append(f"it asked for {bytes_as_text(asked)}{_left(inventory)}")
        if on_gpu and (file := self._snapshot()) is not None:
            lines.append(f"a snapshot of the allocator, for pytorch.org/memory_viz, is in {file}")
        helps = phase in ("forward", "backward", "optimizer", "data", "evaluation")
        told = "\n".join(lines)
        return self._account(told, helps, phase=phase, asked=asked or 0, inventory=inventory)

    def killed(self, who: str, step: int) -> Account:
        """The kernel's out-of-memory killer ended another rank. who: `rank 1 of 2`. step: the last
        finished one."""
        left = host_memory.available()
        told = f"{who} was ended in step {step + 1} by the kernel, whose out-of-memory killer acts "
        told += "where host memory runs out"
        if left is not None:
            told += f"; {bytes_as_text(left)} are left on this node now"
        return self._account(told, self._machine.device == "cpu")

    def _account(self, told: str, helps: bool, **more: Any) -> Account:
        """helps: whether a smaller micro-batch would."""
        smaller = self._restarts_smaller and self._recipe.batch.micro_batch_size != 1
        return Account(
            told,
            self._recipe,
            self._machine,
            noted=noted_of(self._recipe, self._machine) if helps else {},
            smaller_next=helps and smaller,
            restarts_now=helps and smaller and self._environment.restarts_left > 0,
            **more,
        )

    def _snapshot(self) -> Path | None:
        file = self._run.path / f"out_of_memory_rank_{self._environment.rank}.pickle"
        with contextlib.suppress(Exception):  # the report matters more
            self._run.check()
            torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
            return file
        return None


def _left(inventory: Inventory | None) -> str:
    if inventory is None or inventory.total is None or inventory.reserved is None:
        return ""
    unused = inventory.reserved - (inventory.allocated or 0)
    return (
        f"; of {bytes_as_text(inventory.total)}, "
        f"{bytes_as_text(inventory.total - inventory.used)} were free, and {bytes_as_text(unused)} "
        "kept by the allocator in pieces too small"
    )


@dataclass
class Account:
    """The report: `told` at once, the rest once the plan was asked."""

    told: str
    recipe: Recipe
    machine: Machine
    noted: dict[str, Any]
    """For events.jsonl, where a smaller micro-batch would help."""
    smaller_next: bool
    """The next start takes a smaller micro-batch."""
    restarts_now: bool
    """torchrun starts the run again at once with a smaller micro-batch; the plan is not asked."""
    phase: str = ""
    asked: int = 0
    inventory: Inventory | None = None

    def conclude(self, seconds: float) -> str:
        """What is held beside the plan, what grew, and what fits; takes at most so many seconds."""
        inventory, after = self.inventory, [_NEXT] if self.smaller_next else []
        rows = {} if inventory is None else inventory.rows(self.asked)
        if self.restarts_now:
            return "\n".join([*_table(rows, None), *after])
        measured = None
        if inventory is not None and inventory.allocated is not None:
            measured = inventory.allocated + self.asked
        how = {"phase": self.phase, "measured": measured, "outside": rows.get("outside")}
        answers, trouble = ask("explain", self.recipe, self.machine, seconds=seconds, **how)
        plan = next((answer for answer in answers if "components" in answer), None)
        fits = next((answer["suggestions"] for answer in answers if "suggestions" in answer), None)
        planned = {} if plan is None else _planned(plan, rows)
        lines = _table(rows, planned if plan is not None else None)
        if plan is not None:
            lines.append(_verdict(rows, planned, plan, self.machine))
        return "\n".join([*lines, *_advice(fits, trouble), *after])


def _planned(plan: Answer, rows: dict[str, int]) -> dict[str, int]:
    """The plan's bytes by the keys of the rows."""
    planned = {name: plan["components"][name] for name in STATES}
    rest = sum(plan["components"].values()) - sum(planned.values())
    if "process" in rows:
        return planned | {"process": rest + plan["context"]}
    return planned | {"others": rest, "unused": plan["margin"], "outside": plan["context"]}


def _table(rows: dict[str, int], planned: dict[str, int] | None) -> list[str]:
    if not rows:
        return []
    width = max(len(_NAMES[name]) for name in rows)
    lines = [f"{'':{width}}  {'now':>10}" + ("" if planned is None else f"  {'by plan':>10}")]
    for name, size in rows.items():
        line = f"{_NAMES[name]:{width}}  {bytes_as_text(size):>10}"
        if planned is not None:
            line += f"  {bytes_as_text(planned[name]):>10}"
            if name in _grown(rows, planned):
                line += f"  <- {bytes_as_text(size - planned[name])} beyond the plan"
        lines.append(line)
    return lines


def _grown(rows: dict[str, int], planned: dict[str, int]) -> list[str]:
    least = GREW * sum(planned.values())
    return [name for name in rows if rows[name] - planned[name] > least]


def _verdict(rows: dict[str, int], planned: dict[str, int], plan: Answer, machine: Machine) -> str:
    """What the table means."""
    needed = f"the plan gives this recipe {bytes_as_text(plan['needed'])} a rank"
    memory = "" if machine.memory is None else bytes_as_text(machine.memory)
    if machine.memory is not None and plan["needed"] > machine.memory:
        return (
            f"{needed}, and there are {memory}: it does not fit, as `launcher plan` would have said"
        )
    grown = _grown(rows, planned)
    worst = max(grown, key=lambda name: rows[name] - planned[name], default=None)
    if worst == "outside":
        return (
            "other processes hold memory on this GPU: nvidia-smi names them (AMD: amd-smi process)"
        )
    if worst == "unused":
        return (
            "the allocator holds memory in pieces too small: is PYTORCH_ALLOC_CONF set to other "
            "than expandable_segments:True?"
        )
    if grown:
        return f"beyond the plan: {'; '.join(_NAMES[name] for name in grown)}"
    if not rows:
        free = machine.host_memory
        of = "" if free is None else f", and {bytes_as_text(free)} were free at the start"
        return f"the plan gives a node {bytes_as_text(plan['host'])} of host memory{of}"
    fits = f", by which it fits: {needed}" if memory else ""
    return f"nothing has grown much beyond the plan{fits}"


def _advice(suggestions: list[Answer] | None, trouble: str) -> list[str]:
    if suggestions is None:
        failed = f"what would fit could not be found out: {trouble}"
        return [failed, "try a smaller batch.micro_batch_size first"]
    if not suggestions:
        return [
            "nothing that the plan knows needs less on these devices: more of them, a shorter "
            "data.sequence_length, or lora"
        ]
    fastest = suggestions[0]["tokens_per_second"]
    width = max(len(" ".join(one["overrides"])) for one in suggestions)
    lines = ["what fits by plan, the fastest first, as overrides:"]
    for one in suggestions:
        share = one["tokens_per_second"] / fastest
        speed = "" if one is suggestions[0] else f", {share:.0%} of the first's speed"
        overrides = f"{' '.join(one['overrides']):{width}}"
        lines.append(f"  {overrides}  # {bytes_as_text(one['needed'])} a rank{speed}")
    return lines
