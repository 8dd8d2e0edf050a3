"""The machine that a run is on, and what `auto` stands for there."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.distributed.process_group import DataParallel
from launcher.errors import RecipeError, TrainingError
from launcher.planner.machine import Machine, known_machine
from launcher.planner.separate_process import ask
from launcher.recipe.load import load_recipe, to_yaml
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import leaves_open
from launcher.reliability.run_directory import RunFolder, read_lines

logger = logging.getLogger(__name__)

SECONDS = 300
"""Time limit of the choice."""
OWN_CONTEXT = 2**30
"""Bytes of a GPU that this process's context and communicators take by now. An estimate; a plan
counts them as needed, so they must count as available."""


def detect_machine(ranks: DataParallel, environment: Environment) -> Machine:
    """The devices of all ranks; every rank must call this. The smallest memory counts for all."""
    device, on_node = ranks.device, environment.local_world_size
    left, mine = host_memory.available(), host_memory.resident()
    host = None if left is None else left + mine * on_node
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free, total = torch.cuda.mem_get_info(device)
        memory: int | None = min(total, free + OWN_CONTEXT)
    else:
        name, total, memory = "cpu", 0, None if host is None else host // on_node
    every: list[Any] = [None] * ranks.size
    dist.all_gather_object(every, (name, total, memory, host, on_node), group=ranks.group)
    per_node = on_node if len({counts for *_, counts in every}) == 1 else 1
    # Where nodes differ: as if each rank had a node of its own, with its share of the memory
    hosts = [None if size is None else size * per_node // n for _, _, _, size, n in every]
    name, total = min(one[:2] for one in every)
    nodes = ranks.size // per_node
    like = partial(known_machine, nodes=nodes, gpus_per_node=per_node, memory=total or None)
    try:
        machine = like(name)
    except RecipeError:  # a GPU that is not in the table
        machine = dataclasses.replace(like(None), name=name)
    smallest = _least(size for _, _, size, _, _ in every)
    return dataclasses.replace(machine, memory=smallest, host_memory=_least(hosts))


def _least(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return min(known, default=None)


@dataclass(frozen=True)
class _Choice:
    recipe: Recipe
    overrides: list[str]
    why: str


def resolve_auto(
    recipe: Recipe,
    machine: Machine,
    *,
    ranks: DataParallel,
    run: RunFolder,
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
    choice = answer[0]
    if isinstance(choice, Exception):
        raise choice
    assert isinstance(choice, _Choice)
    assert not leaves_open(choice.recipe)
    if ranks.rank == 0:
        run.check()
        (run.path / "recipe.yaml").write_text(to_yaml(choice.recipe), encoding="utf-8")
    overrides = "".join(f"\n      {override}" for override in choice.overrides)
    logger.info(f"auto: {choice.why}{overrides}")
    return choice.recipe


def _choose(recipe: Recipe, machine: Machine, run: RunFolder) -> _Choice | Exception:
    """What rank 0 sends to the others: the choice, or what all of them raise."""
    failed: list[int] = []
    if recipe.batch.micro_batch_size == "auto" and run.events.exists():
        events = read_lines(run.events.read_text(encoding="utf-8"))
        failed = failed_micro_batches(events, machine=machine, recipe=recipe)
    limit = min(failed) - 1 if failed else None
    answers, trouble = ask("choose", recipe, machine, seconds=SECONDS, limit_micro_batch=limit)
    if not answers:
        text = f"auto: the plan failed; set strategy.kind and batch.micro_batch_size. {trouble}"
        return TrainingError(text, reason="plan_failed")
    (answer,) = answers
    if "problems" in answer:
        return RecipeError(answer["problems"])
    with tempfile.TemporaryDirectory(prefix="launcher-plan-") as folder:
        file = Path(folder, "recipe.yaml")
        file.write_text(answer["recipe"], encoding="utf-8")
        chosen = load_recipe([f"recipe={file}"], ranks=machine.ranks).recipe
    after = f"; micro-batches of {min(failed)} and more ran out of memory before" if failed else ""
    return _Choice(chosen, answer["overrides"], answer["why"] + after)


def noted_of(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """What events.jsonl keeps of a failure for `failed_micro_batches`, with the number of ranks."""
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
    """Micro-batches that ran out of memory in a run folder, on as many of the same devices.

    Only with the recipe's settings; with strategy `auto` with any checkpointing and offload.

    recipe: as written, with `auto` in it.
    """
    same = noted_of(recipe, machine) | {"ranks": machine.ranks}
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
