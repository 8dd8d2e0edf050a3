"""Memory ran out: what asked for how much, where, what holds the rest, what grew beyond the plan, and what would fit.

Nothing here allocates on the device, and what the failed step held is still held: it is counted first.
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

MiB = 2**20
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": MiB, "GiB": 2**30, "TiB": 2**40}
_NEXT = "batch.micro_batch_size is auto: the next start takes a smaller one, and goes on from the last checkpoint"
_GREW = 0.05
"""Of all that was planned: by less, a component is not said to have grown."""
_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "others": "all other tensors, with what was asked for",
    "unused": "kept by the allocator, not in use",
    "outside": "driver, communicators, other processes",
    "process": "all else of the process, with what was asked for",
}


def asked_for(error: BaseException) -> int | None:
    """Bytes that could not be had, by the error's text: CUDA's `Tried to allocate 2.00 GiB`, the CPU's `allocate 123 bytes`,
    numpy's `Unable to allocate 1.0 GiB`."""
    found = re.search(r"allocate ([\d.]+) ?(bytes|B|[KMGT]iB)\b", str(error))
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


@dataclass(frozen=True)
class Inventory:
    """Bytes of one rank when memory ran out."""

    parameters: int
    gradients: int
    optimizer: int
    on_host: int
    """Of these three, offloaded: not in them."""
    used: int
    """CUDA: of the device, by all processes. CPU: this process's resident memory."""
    allocated: int | None = None
    """CUDA: all tensors on the device."""
    reserved: int | None = None
    """CUDA: what the allocator holds for tensors."""
    total: int | None = None
    """CUDA: of the device."""

    @property
    def counted(self) -> int:
        """What was found on tensors that belong to the training."""
        return self.parameters + self.gradients + self.optimizer

    def rows(self, asked: int) -> dict[str, int]:
        """By the keys of `_NAMES`, as they compare with the plan."""
        rows = {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer}
        if self.allocated is None or self.reserved is None:
            return rows | {"process": max(0, self.used - self.counted - self.on_host) + asked}
        return rows | {
            "others": max(0, self.allocated - self.counted) + asked,
            "unused": max(0, self.reserved - self.allocated),
            "outside": max(0, self.used - self.reserved),
        }


def take_inventory(module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, *, buckets: bool) -> Inventory:
    """Counts the storages of a training's own tensors, and asks the allocator for the rest.

    buckets: DistributedDataParallel keeps memory for all gradients, whether or not they are there.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = any(isinstance(parameter, DTensor) for parameter in trained)
    # What FSDP has gathered stands in the place of its shards, as plain tensors
    weights = [p for p in [*module.parameters(), *module.buffers()] if isinstance(p, DTensor) or not sharded]
    seen: set[int] = set()
    kinds = (
        _bytes([*trained, *weights], device, seen),
        _bytes((p.grad for p in [*trained, *module.parameters()]), device, seen),
        _bytes((value for state in optimizer.state.values() for value in state.values()), device, seen),
    )
    found: dict[str, int] = {name: kind[0] for name, kind in zip(("parameters", "gradients", "optimizer"), kinds, strict=True)}
    if buckets:
        found["gradients"] = max(found["gradients"], sum(parameter.numel() * parameter.element_size() for parameter in trained))
    found["on_host"] = sum(kind[1] for kind in kinds)
    if device.type != "cuda":
        return Inventory(**found, used=host_memory.resident())
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return Inventory(**found, allocated=allocated, reserved=reserved, used=total - free, total=total)


def _bytes(values: Iterable[Any], device: torch.device, seen: set[int]) -> tuple[int, int]:
    """Of the storages that were not seen: on this device, and elsewhere."""
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
    """The innermost module of the model whose code ran, and the micro-batch's shape, as the frames of a traceback have them."""
    names = {id(part): clean_name(name) for name, part in module.named_modules() if name}
    where = shape = ""
    while traceback is not None:
        local = traceback.tb_frame.f_locals
        where = names.get(id(local.get("self")), where)
        micro_batch = local.get("micro_batch")
        if isinstance(micro_batch, dict) and not shape:
            tensors = [(name, value) for name, value in micro_batch.items() if isinstance(value, torch.Tensor) and value.ndim > 1]
            shape = f"{tensors[0][0]} {' x '.join(map(str, tensors[0][1].shape))}" if tensors else ""
        traceback = traceback.tb_next
    return where, shape


@dataclass(frozen=True)
class Trained:
    """What holds a training's own tensors."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device


class PostMortem:
    """One rank's. Made before anything is allocated; `training` is set once there is one."""

    def __init__(self, recipe: Recipe, machine: Machine, *, environment: Environment, run: RunFolder, restarts_smaller: bool) -> None:
        self._recipe, self._machine, self._environment, self._run = recipe, machine, environment, run
        self._restarts_smaller = restarts_smaller
        self.training: Trained | None = None

    def examine(self, error: BaseException, *, step: int, phase: str, micro_batch: int) -> Account:
        """Counts what is there, and keeps a snapshot of the allocator. step: the last finished one."""
        training, recipe = self.training, self._recipe
        asked = asked_for(error)
        module, shape, inventory = "", "", None
        if training is not None:
            module, shape = at_work(error.__traceback__, training.module)
            buckets = recipe.strategy.kind == "ddp" and self._machine.ranks > 1
            inventory = take_inventory(training.module, training.optimizer, training.device, buckets=buckets)
        device = self._machine.device
        rank, ranks = self._environment.rank, self._environment.world_size
        what = "GPU memory" if device == "cuda" and not isinstance(error, MemoryError) and "CPUAllocator" not in str(error) else "memory"
        when = _when(phase, step, micro_batch, module, shape, recipe, ranks)
        lines = [f"rank {rank} of {ranks} ran out of {what} in {when}"]
        if asked is not None:
            lines.append(f"it asked for {bytes_as_text(asked)}" + _left(inventory))
        snapshot = self._snapshot() if device == "cuda" else None
        if snapshot is not None:
            lines.append(f"a snapshot of the allocator, for pytorch.org/memory_viz, is in {snapshot}")
        trains = phase in ("forward", "backward", "optimizer", "data", "evaluation")
        return self._account("\n".join(lines), helps=trains, phase=phase, asked=asked or 0, inventory=inventory)

    def killed(self, who: str, step: int) -> Account:
        """Another rank was ended by the kernel's out-of-memory killer. who: `rank 1 of 2`. step: the last finished one."""
        left = host_memory.available()
        told = f"{who} was ended in step {step + 1} by the kernel, whose out-of-memory killer acts where host memory runs out"
        told += f"; {bytes_as_text(left)} are left on this node now" if left is not None else ""
        return self._account(told, helps=self._machine.device == "cpu")

    def _account(self, told: str, *, helps: bool, **more: Any) -> Account:
        """helps: a smaller micro-batch would."""
        return Account(
            told,
            recipe=self._recipe,
            machine=self._machine,
            smaller_next=self._restarts_smaller and self._recipe.batch.micro_batch_size != 1 if helps else None,
            restarts_now=self._environment.restarts_left > 0,
            **more,
        )

    def _snapshot(self) -> Path | None:
        file = self._run.path / f"out_of_memory_rank_{self._environment.rank}.pickle"
        with contextlib.suppress(Exception):  # no snapshot, then: what is told matters more
            self._run.check()
            torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
            return file
        return None


def _when(phase: str, step: int, micro_batch: int, module: str, shape: str, recipe: Recipe, ranks: int) -> str:
    """`step 3: in the forward pass of micro-batch 2 of 4 (input_ids 4 x 2048), in model.layers.17.mlp`."""
    count = micro_batches(recipe, ranks)
    of = f" of {count}" if count is not None else ""
    words = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step", "start": "preparation"}
    text = f"step {step + 1}: in {words.get(phase, phase)}"
    if phase in ("forward", "backward"):
        text += f" of micro-batch {micro_batch}{of}" + (f" ({shape})" if shape else "")
    return text + (f", in {module}" if module else "")


def _left(inventory: Inventory | None) -> str:
    if inventory is None or inventory.total is None or inventory.reserved is None:
        return ""
    unused = inventory.reserved - (inventory.allocated or 0)
    return (
        f"; of {bytes_as_text(inventory.total)}, {bytes_as_text(inventory.total - inventory.used)} were free, "
        f"and {bytes_as_text(unused)} kept by the allocator in pieces that did not serve"
    )


class Account:
    """What is to be told of it: `told` at once, the rest once the plan was asked."""

    def __init__(
        self,
        told: str,
        *,
        recipe: Recipe,
        machine: Machine,
        smaller_next: bool | None,
        restarts_now: bool,
        phase: str = "",
        asked: int = 0,
        inventory: Inventory | None = None,
    ) -> None:
        """smaller_next: whether the next start takes a smaller micro-batch; None: a smaller one would not help."""
        self.told = told
        self.noted = {} if smaller_next is None else noted_of(recipe, machine)
        self.restarts_now = bool(smaller_next) and restarts_now
        """The plan is not asked: what follows is a start with a smaller micro-batch."""
        self._recipe, self._machine, self._phase, self._asked, self._inventory = recipe, machine, phase, asked, inventory
        self._next = _NEXT if smaller_next else None

    def conclude(self, seconds: float) -> str:
        """The inventory beside the plan, what grew, and remedies; takes up to so many seconds. Where torchrun starts the run
        again in a moment with a smaller micro-batch, the inventory alone."""
        inventory = self._inventory
        rows = {} if inventory is None else inventory.rows(self._asked)
        if self.restarts_now:
            return "\n".join([*_table(rows, None), _NEXT])
        measured = None if inventory is None or inventory.allocated is None else inventory.allocated + self._asked
        how = {"phase": self._phase, "measured": measured, "outside": rows.get("outside")}
        answers, trouble = ask("explain", self._recipe, self._machine, seconds=seconds, **how)
        plan = next((answer for answer in answers if "components" in answer), None)
        remedies = next((answer["remedies"] for answer in answers if "remedies" in answer), None)
        lines = _table(rows, None if plan is None else _planned(plan, rows))
        if plan is not None:
            lines += _verdict(rows, plan, self._machine)
        return "\n".join([*lines, *_advice(remedies, trouble), *([] if self._next is None else [self._next])])


def _planned(plan: Answer, rows: dict[str, int]) -> dict[str, int]:
    """The plan's bytes by the keys of the rows."""
    components = dict(plan["components"])
    planned = {name: components.pop(name) for name in ("parameters", "gradients", "optimizer")}
    rest = sum(components.values())
    if "process" in rows:
        return planned | {"process": rest + plan["context"]}
    return planned | {"others": rest, "unused": plan["margin"], "outside": plan["context"]}


def _table(rows: dict[str, int], planned: dict[str, int] | None) -> list[str]:
    if not rows:
        return []
    width = max(len(_NAMES[name]) for name in rows)
    lines = [f"{'':{width}}  {'now':>10}" + (f"  {'by plan':>10}" if planned is not None else "")]
    for name, size in rows.items():
        line = f"{_NAMES[name]:{width}}  {bytes_as_text(size):>10}"
        if planned is not None:
            line += f"  {bytes_as_text(planned[name]):>10}"
            if _grew(name, rows, planned):
                line += f"  <- {bytes_as_text(size - planned[name])} beyond the plan"
        lines.append(line)
    return lines


def _grew(name: str, rows: dict[str, int], planned: dict[str, int]) -> bool:
    return rows[name] - planned[name] > _GREW * sum(planned.values())


def _verdict(rows: dict[str, int], plan: Answer, machine: Machine) -> list[str]:
    """What that means."""
    planned = _planned(plan, rows)
    needed = f"the plan gives this recipe {bytes_as_text(plan['needed'])} a rank"
    if machine.memory is not None and plan["needed"] > machine.memory:
        return [f"{needed}, and there are {bytes_as_text(machine.memory)}: it does not fit, as `launcher plan` would have said"]
    grown = [name for name in rows if _grew(name, rows, planned)]
    worst = max(grown, key=lambda name: rows[name] - planned[name], default=None)
    if worst == "outside":
        return ["other processes hold memory on this GPU: nvidia-smi names them (AMD: amd-smi process)"]
    if worst == "unused":
        return ["the allocator holds memory in pieces that do not serve: is PYTORCH_ALLOC_CONF set to other than expandable_segments:True?"]
    if grown:
        return [f"beyond the plan: {'; '.join(_NAMES[name] for name in grown)}"]
    if not rows:
        host, left = sum(plan["host"].values()), machine.host_memory
        of = f", and {bytes_as_text(left)} were free at the start" if left is not None else ""
        return [f"the plan gives a node {bytes_as_text(host)} of host memory{of}"]
    return ["nothing has grown much beyond the plan" + ("" if machine.memory is None else f", by which it fits: {needed}")]


def _advice(remedies: list[Answer] | None, trouble: str) -> list[str]:
    if remedies is None:
        return [f"what would fit could not be found out: {trouble}", "try a smaller batch.micro_batch_size first"]
    if not remedies:
        return ["nothing that the plan knows needs less on these devices: more of them, a shorter data.sequence_length, or lora"]
    fastest = remedies[0]["tokens_per_second"]
    width = max(len(" ".join(one["overrides"])) for one in remedies)
    lines = ["what fits by plan, the fastest first, as overrides:"]
    for one in remedies:
        speed = "" if one is remedies[0] else f", {one['tokens_per_second'] / fastest:.0%} of the first's speed"
        lines.append(f"  {' '.join(one['overrides']):{width}}  # {bytes_as_text(one['needed'])} a rank{speed}")
    return lines
