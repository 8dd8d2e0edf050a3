"""Detects the machine of a run, and chooses the settings that are `auto` for it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from launcher.console import bytes_as_text
from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.distributed.process_group import DataParallel, from_rank_0, gather
from launcher.distributed.separate_process import run_in_process
from launcher.errors import RecipeError, TrainingError
from launcher.planner.fastest import measured_choice
from launcher.planner.formatting import batch_text, speed_text, strategy_text
from launcher.planner.machine import Machine, known_machine
from launcher.planner.search import fastest_that_fits, search_configurations
from launcher.recipe.load import to_yaml
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import open_keys
from launcher.reliability.json_files import replace_text
from launcher.reliability.run_directory import RunFolder

logger = logging.getLogger(__name__)

SECONDS = 300
"""Time limit of the choice."""
OWN_CONTEXT = 2**30
"""Bytes of a GPU that the CUDA context and communicators of this process hold. An estimate. A plan
includes them in the memory needed, so they must also be included in the memory available."""


def detect_machine(ranks: DataParallel, environment: Environment) -> Machine:
    """The machine that all ranks run on, with the smallest memory of all devices.

    Every rank must call this.
    """
    device, on_node = ranks.device, environment.local_world_size
    left = host_memory.available()
    host = None if left is None else left // on_node + host_memory.resident()
    name, total, memory = "cpu", 0, host
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free, total = torch.cuda.mem_get_info(device)
        memory = min(total, free + OWN_CONTEXT)
    every = gather(((name, total), memory, host, on_node), ranks.group)
    devices, memories, hosts, on_nodes = zip(*every, strict=True)
    # If the nodes differ, each rank is treated as a node of its own, with its share of the memory
    per_node = on_node if len(set(on_nodes)) == 1 else 1
    name, total = min(devices)
    machine = known_machine(
        name, nodes=ranks.size // per_node, gpus_per_node=per_node, memory=total or None
    )
    host = _least(hosts)
    return dataclasses.replace(
        machine,
        memory=_least(memories),
        host_memory=None if host is None else host * per_node,
    )


def _least(sizes: Sequence[int | None]) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def resolve_auto(
    recipe: Recipe, machine: Machine, *, ranks: DataParallel, run: RunFolder
) -> Recipe:
    """The recipe with rank 0's choice in place of `auto`; every rank must call this.

    Writes the recipe to RUN_DIR/recipe.yaml. Micro-batch sizes that ran out of memory in an earlier
    start of this run, on as many of the same devices, are not chosen again, nor are larger ones.
    Raises RecipeError if nothing fits, TrainingError if planning fails.
    """
    if not open_keys(recipe):
        return recipe
    answer: tuple[Recipe, Sequence[str], str] | Exception | None = None
    if ranks.rank == 0:
        logger.info("auto: looking for the fastest configuration that fits ...")
        failed = failed_micro_batches(run.read_events(), machine=machine, recipe=recipe)
        try:
            answer = run_in_process(SECONDS, _choose, recipe, machine, min(failed, default=None))
        except RecipeError as error:
            answer = error
        except TrainingError as error:
            text = f"auto: the plan failed; set {' and '.join(open_keys(recipe))}. {error}"
            answer = TrainingError(text, reason="plan_failed")
    answer = from_rank_0(answer, ranks.group)
    if isinstance(answer, Exception):
        raise answer
    assert answer is not None
    chosen, overrides, why = answer
    if ranks.rank == 0:
        run.check()
        replace_text(run.path / "recipe.yaml", to_yaml(chosen))
    lines = "".join(f"\n      {override}" for override in overrides)
    logger.info(f"auto: {why}{lines}")
    return chosen


def _choose(
    recipe: Recipe, machine: Machine, failed: int | None
) -> tuple[Recipe, Sequence[str], str]:
    """Like `choose`, but raises RecipeError with suggestions if nothing fits."""
    devices = f"{machine.ranks} x {machine.name}"
    if failed == 1:
        raise RecipeError(
            "batch.micro_batch_size: auto: a micro-batch of 1 ran out of memory in an earlier "
            f"start of this run on {devices}; there is no smaller one. `launcher plan` shows "
            "configurations that need less"
        )
    choice = choose(recipe, machine, failed=failed)
    if choice is None:
        of = f" with {bytes_as_text(machine.memory)} each" if machine.memory is not None else ""
        problem = f"{open_keys(recipe)[0]}: auto: no configuration fits {devices}{of}"
        suggestions = search_configurations(recipe, machine).suggestions
        raise RecipeError([problem, *(f"  {text}" for text in suggestions)])
    return choice


def choose(
    recipe: Recipe, machine: Machine, *, failed: int | None = None
) -> tuple[Recipe, Sequence[str], str] | None:
    """The fastest configuration that was measured, or else that fits by plan, in place of `auto`.

    `failed` is the smallest micro-batch that ran out of memory. Returns the recipe without `auto`,
    the overrides that produce it, and why it was chosen; None if nothing fits, or if the size of
    the memory is not known.
    """
    limit = None if failed is None else failed - 1
    after = f"; micro-batches of {failed} and more ran out of memory before" if failed else ""
    if kept := measured_choice(recipe, machine, limit_micro_batch=limit):
        chosen, overrides, why = kept
        return chosen, overrides, why + after
    best = fastest_that_fits(recipe, machine, limit_micro_batch=limit)
    if best is None:
        return None
    of = "" if machine.memory is None else f" of {bytes_as_text(machine.memory)}"
    why = (
        f"{strategy_text(best.recipe)}; {batch_text(best.recipe, machine.ranks)}. The fastest that "
        f"fits: by plan {bytes_as_text(best.plan.needed)}{of} a rank, "
        f"{speed_text(best.tokens_per_second, best.tokens_per_second_range)}{after}"
    )
    return best.recipe, best.overrides, why


def recorded_settings(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """What events.jsonl records with an out-of-memory failure, besides the number of ranks."""
    checkpointing, offload = recipe.activation_checkpointing, recipe.strategy.cpu_offload
    return {
        "micro_batch_size": recipe.batch.micro_batch_size,
        "device": machine.name,
        "sequence_length": recipe.data.sequence_length,
        "lora": recipe.lora is not None,
        "checkpointing": None if checkpointing is None else checkpointing.mode,
        "cpu_offload": offload is not None and (offload.what == "all" or offload.what),
    }


def failed_micro_batches(
    events: list[dict[str, Any]], *, machine: Machine, recipe: Recipe
) -> list[int]:
    """Micro-batch sizes that ran out of memory in earlier starts of a run, on as many of the same
    devices and with the same settings; with strategy `auto` checkpointing and offload may differ.
    Empty unless the micro-batch of the recipe is `auto`."""
    if recipe.batch.micro_batch_size != "auto":
        return []
    same = recorded_settings(recipe, machine) | {"ranks": machine.ranks}
    same |= {"event": "failed", "reason": "out_of_memory"}
    del same["micro_batch_size"]
    if recipe.strategy.kind == "auto":
        del same["checkpointing"], same["cpu_offload"]
    return [
        event["micro_batch_size"]
        for event in events
        if event.get("micro_batch_size") is not None
        and all(event.get(name) == value for name, value in same.items())
    ]
