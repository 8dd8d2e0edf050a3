"""The machine that a run is on, from the devices that are there, and what `auto` becomes on it."""

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
from launcher.planner.machine import Machine
from launcher.planner.rates import known_machine
from launcher.planner.separate_process import ask
from launcher.recipe.load import load_recipe, to_yaml
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import leaves_open
from launcher.reliability.run_directory import RunFolder, read_lines

logger = logging.getLogger(__name__)

SECONDS = 300
"""That choosing may take."""
OWN = 2**30
"""Bytes of a GPU that this process's driver context and communicators have taken by now, roughly: every plan counts them."""


def machine_here(ranks: DataParallel, environment: Environment) -> Machine:
    """What all ranks together are; each must call this. The least of what any of them has counts for all."""
    device, on_node = ranks.device, environment.local_world_size
    left, mine = host_memory.available(), host_memory.resident()
    host = None if left is None else left + mine * on_node
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free, total = torch.cuda.mem_get_info(device)
        # What others have taken of the GPU is not there; what this process has is in every plan
        memory: int | None = min(total, free + OWN)
    else:
        name, total, memory = "cpu", 0, None if host is None else host // on_node
    told: list[Any] = [None] * ranks.size
    dist.all_gather_object(told, (name, total, memory, host, on_node), group=ranks.group)
    per_node = on_node if len({counts for *_, counts in told}) == 1 else 1
    # Nodes that are not all alike: as if each rank had one of its own, with its share
    hosts = [None if size is None else size * per_node // count for _, _, _, size, count in told]
    name, total = min(one[:2] for one in told)
    like = partial(known_machine, nodes=ranks.size // per_node, gpus_per_node=per_node, memory=total or None)
    try:
        machine = like(name)
    except RecipeError:  # a GPU that is in no table
        machine = dataclasses.replace(like(None), name=name)
    return dataclasses.replace(machine, memory=_least(size for _, _, size, _, _ in told), host_memory=_least(hosts))


def _least(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return min(known, default=None)


@dataclass(frozen=True)
class Chosen:
    """What rank 0 tells the others."""

    recipe: Recipe
    overrides: tuple[str, ...]
    why: str


def resolve_here(recipe: Recipe, machine: Machine, *, ranks: DataParallel, run: RunFolder) -> Recipe:
    """The recipe with what it leaves open chosen by rank 0 for this machine, the same on all ranks; every rank must call this.

    Writes it to RUN_DIR/recipe.yaml. A micro-batch that ran out of memory in this folder before, on as many of the same
    devices, is not chosen again, nor a larger one. Raises RecipeError where nothing fits, TrainingError where the plan fails.
    """
    if not leaves_open(recipe):
        return recipe
    answer: list[Any] = [None]
    if ranks.rank == 0:
        logger.info("auto: looking for the fastest configuration that fits ...")
        answer[0] = _choose(recipe, machine, run)
    dist.broadcast_object_list(answer, group=ranks.group, group_src=0)
    chosen = answer[0]
    if isinstance(chosen, Exception):
        raise chosen
    assert isinstance(chosen, Chosen)
    assert not leaves_open(chosen.recipe)
    if ranks.rank == 0:
        run.check()
        (run.path / "recipe.yaml").write_text(to_yaml(chosen.recipe), encoding="utf-8")
    logger.info(f"auto: {chosen.why}" + "".join(f"\n      {override}" for override in chosen.overrides))
    return chosen.recipe


def _choose(recipe: Recipe, machine: Machine, run: RunFolder) -> Chosen | Exception:
    """What rank 0 tells the others: the choice, or what all of them raise."""
    try:
        text = run.events.read_text(encoding="utf-8")
    except OSError:
        text = ""
    failed = failed_micro_batches(read_lines(text), machine=machine, recipe=recipe) if recipe.batch.micro_batch_size == "auto" else []
    limit = min(failed) - 1 if failed else None
    answers, trouble = ask("choose", recipe, machine, seconds=SECONDS, limit_micro_batch=limit)
    if not answers:
        return TrainingError(
            f"auto: the plan that decides failed; give strategy.kind and batch.micro_batch_size themselves. {trouble}", reason="plan_failed"
        )
    (answer,) = answers
    if "problems" in answer:
        return RecipeError(answer["problems"])
    with tempfile.TemporaryDirectory(prefix="launcher-plan-") as folder:
        file = Path(folder, "recipe.yaml")
        file.write_text(answer["recipe"], encoding="utf-8")
        chosen = load_recipe([f"recipe={file}"], ranks=machine.ranks).recipe
    after = f"; micro-batches of {min(failed)} and more ran out of memory before" if failed else ""
    return Chosen(chosen, tuple(answer["overrides"]), answer["why"] + after)


def noted_of(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """What events.jsonl keeps of a failure, beside the number of ranks, for `failed_micro_batches`."""
    return {
        "micro_batch_size": recipe.batch.micro_batch_size,
        "device": machine.name,
        "sequence_length": recipe.data.sequence_length,
        "lora": recipe.lora is not None,
        "checkpointing": None if recipe.activation_checkpointing is None else recipe.activation_checkpointing.mode,
        "cpu_offload": recipe.strategy.cpu_offload is not None,
    }


def failed_micro_batches(events: list[dict[str, Any]], *, machine: Machine, recipe: Recipe) -> list[int]:
    """Micro-batches that ran out of memory in a run folder, on as many of the same devices, trained as the recipe says; where the
    strategy is `auto`, whichever it was.

    recipe: as written, with what is `auto` in it.
    """
    like = noted_of(recipe, machine) | {"ranks": machine.ranks}
    free = ("checkpointing", "cpu_offload") if recipe.strategy.kind == "auto" else ()
    for name in ("micro_batch_size", *free):
        del like[name]
    return [
        event["micro_batch_size"]
        for event in events
        if event.get("event") == "failed"
        and event.get("reason") == "out_of_memory"
        and isinstance(event.get("micro_batch_size"), int)
        and all(event.get(name) == value for name, value in like.items())
    ]
