"""The machine that a run is on, and the choice for `auto` there."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.distributed.process_group import DataParallel
from launcher.errors import RecipeError, TrainingError
from launcher.planner.machine import Machine, known_machine
from launcher.planner.separate_process import ask
from launcher.recipe.load import to_yaml
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import leaves_open
from launcher.reliability.run_directory import RunFolder, read_lines

logger = logging.getLogger(__name__)

SECONDS = 300
"""Time limit of the choice."""
OWN_CONTEXT = 2**30
"""Bytes of a GPU that this process's context and communicators hold. An estimate. A plan counts
them as needed, so they must count as available."""


def detect_machine(ranks: DataParallel, environment: Environment) -> Machine:
    """The devices of all ranks; every rank must call this. The smallest memory counts for all."""
    device, on_node = ranks.device, environment.local_world_size
    left = host_memory.available()
    host = None if left is None else left + host_memory.resident() * on_node
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free, total = torch.cuda.mem_get_info(device)
        memory: int | None = min(total, free + OWN_CONTEXT)
    else:
        name, total, memory = "cpu", 0, None if host is None else host // on_node
    every: list[Any] = [None] * ranks.size
    dist.all_gather_object(every, (name, total, memory, host, on_node), group=ranks.group)
    names, totals, memories, hosts, on_nodes = zip(*every, strict=True)
    # Where nodes differ: as if each rank had a node of its own, with its share of the memory
    per_node = on_node if len(set(on_nodes)) == 1 else 1
    shares = [
        None if size is None else size * per_node // count
        for size, count in zip(hosts, on_nodes, strict=True)
    ]
    name, total = min(zip(names, totals, strict=True))
    like = partial(
        known_machine, nodes=ranks.size // per_node, gpus_per_node=per_node, memory=total or None
    )
    try:
        machine = like(name)
    except RecipeError:  # a GPU that is not in the table
        machine = dataclasses.replace(like(None), name=name)
    return dataclasses.replace(machine, memory=_least(memories), host_memory=_least(shares))


def _least(sizes: Iterable[int | None]) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def resolve_auto(
    recipe: Recipe, machine: Machine, *, ranks: DataParallel, run: RunFolder
) -> Recipe:
    """The recipe with rank 0's choice in place of `auto`; every rank must call this.

    Writes it to RUN_DIR/recipe.yaml. A micro-batch that ran out of memory in this folder before, on
    as many of the same devices, is not chosen again, nor a larger one. Raises RecipeError where
    nothing fits, TrainingError where the plan fails.
    """
    if not leaves_open(recipe):
        return recipe
    answer: list[Any] = [None]
    if ranks.rank == 0:
        logger.info("auto: looking for the fastest configuration that fits ...")
        answer[0] = _choose(recipe, machine, run)
    dist.broadcast_object_list(answer, group=ranks.group, group_src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    chosen, overrides, why = answer[0]
    if ranks.rank == 0:
        run.check()
        (run.path / "recipe.yaml").write_text(to_yaml(chosen), encoding="utf-8")
    lines = "".join(f"\n      {override}" for override in overrides)
    logger.info(f"auto: {why}{lines}")
    return chosen  # type: ignore[no-any-return]


def _choose(recipe: Recipe, machine: Machine, run: RunFolder) -> Any:
    """What rank 0 sends to the others: an `answers.Choice`, or the exception that all raise."""
    failed: list[int] = []
    if recipe.batch.micro_batch_size == "auto" and run.events.exists():
        events = read_lines(run.events.read_text(encoding="utf-8"))
        failed = failed_micro_batches(events, machine=machine, recipe=recipe)
    limit = min(failed) - 1 if failed else None
    answers, trouble = ask("choose", recipe, machine, limit, seconds=SECONDS)
    if not answers:
        text = f"auto: the plan failed; set strategy.kind and batch.micro_batch_size. {trouble}"
        return TrainingError(text, reason="plan_failed")
    if isinstance(answers[0], RecipeError):
        return answers[0]
    chosen, overrides, why = answers[0]
    after = f"; micro-batches of {min(failed)} and more ran out of memory before" if failed else ""
    return chosen, overrides, why + after


def recorded_settings(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """What events.jsonl records of an out-of-memory failure, beside the number of ranks."""
    checkpointing = recipe.activation_checkpointing
    return {
        "micro_batch_size": recipe.batch.micro_batch_size,
        "device": machine.name,
        "sequence_length": recipe.data.sequence_length,
        "lora": recipe.lora is not None,
        "checkpointing": None if checkpointing is None else checkpointing.mode,
        "cpu_offload": recipe.strategy.cpu_offload is not None,
    }


def failed_micro_batches(
    events: list[dict[str, Any]], *, machine: Machine, recipe: Recipe
) -> list[int]:
    """Micro-batches that ran out of memory in a run folder, on as many of the same devices, with
    the same settings (strategy `auto`: with any checkpointing and offload).

    recipe: as written, with `auto` in it.
    """
    same = recorded_settings(recipe, machine) | {"ranks": machine.ranks}
    del same["micro_batch_size"]
    if recipe.strategy.kind == "auto":
        del same["checkpointing"], same["cpu_offload"]
    return [
        event["micro_batch_size"]
        for event in events
        if (event.get("event"), event.get("reason")) == ("failed", "out_of_memory")
        and isinstance(event.get("micro_batch_size"), int)
        and all(event.get(name) == value for name, value in same.items())
    ]
