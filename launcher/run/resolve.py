"""`auto` in a run: rank 0 decides, all ranks take its values, and RUN_DIR/recipe.yaml has them.

`planner/decisions.py` decides.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch

from launcher.checkpoint.resume import Start, earlier_strategy, recorded_recipe
from launcher.console import bytes_as_text
from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.distributed.process_group import from_rank_0, gather
from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.separate_process import run_in_process
from launcher.errors import RecipeError, TrainingError
from launcher.files import replace_text
from launcher.planner.choice import (
    COLLECTIVES,
    Profiles,
    choose_collectives,
    choose_logits,
    choose_or_refuse,
    estimates,
    failed_micro_batches,
    failed_with_fewer,
    failed_with_logits,
    open_collectives,
)
from launcher.planner.machine import Machine, known_machine
from launcher.planner.plan import estimated_plan
from launcher.planner.sizes import (
    NOT_NEEDED,
    Rows,
    choices_text,
    choose_sizes,
    count_rows,
    open_stores,
    why_not_counted,
)
from launcher.recipe.combinations import value_of
from launcher.recipe.decisions import open_keys, open_sizes, with_recorded, with_value
from launcher.recipe.load import to_yaml
from launcher.recipe.schema import Recipe
from launcher.reliability.run_directory import RunFolder
from launcher.strategies.compilation import why_eager

logger = logging.getLogger(__name__)

SECONDS = 300
"""Time limit of the choice."""
OWN_CONTEXT = 2**30
"""Bytes of a GPU that the CUDA context and communicators of this process hold. An estimate. A plan
includes them in the memory needed, so they must also be included in the memory available."""


COST = "each block then launches some 60 more kernels in a micro-batch"
"""Measured on null GPUs: 57 for a Llama block, 76 with full activation checkpointing."""


def detect_machine(ranks: RankLayout, environment: Environment) -> Machine:
    """The machine that all ranks run on, with the smallest memory of all devices. Host memory is all
    that nodes and control groups allow, so that a choice does not depend on what other processes
    hold at the moment.

    Every rank must call this.
    """
    device, on_node = ranks.device, environment.local_world_size
    whole = host_memory.allowed()
    host = None if whole is None else whole // on_node
    name, total, memory = "cpu", 0, host
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free, total = torch.cuda.mem_get_info(device)
        memory = min(total, free + OWN_CONTEXT)
    cores = len(os.sched_getaffinity(0))
    every = gather(((name, total), memory, host, on_node, cores), ranks.group)
    devices, memories, hosts, on_nodes, node_cores = zip(*every, strict=True)
    # If the nodes differ, each rank is treated as a node of its own, with its share of the memory
    per_node = on_node if len(set(on_nodes)) == 1 else 1
    name, total = min(devices)
    machine = known_machine(
        name,
        nodes=ranks.size // per_node,
        gpus_per_node=per_node,
        memory=total or None,
        cores=max(1, min(node_cores) * per_node // on_node),
    )
    host = _least(hosts)
    return dataclasses.replace(
        machine,
        memory=_least(memories),
        host_memory=None if host is None else host * per_node,
    )


def warn_of_memory(
    recipe: Recipe,
    profiles: Callable[[], Profiles],
    machine: Machine,
    *,
    exact: bool,
    ranks: RankLayout,
    environment: Environment,
) -> None:
    """Logs a warning if by estimate a GPU or a node needs more memory than is free now; every rank
    must call this, with a recipe without `auto`.

    exact: trace the model if the quick estimate, which is too high, does not fit. False: do not
    delay the start by that, and warn if what is held without activations does not fit.
    """
    left, on_node = host_memory.available(), environment.local_world_size
    own = None if left is None else left // on_node + host_memory.resident()
    share = _least(gather(own, ranks.group))
    own_code = recipe.model.builder is not None or recipe.data.builder is not None
    if ranks.rank != 0 or share is None or own_code:  # of which nothing is known without a trace
        return
    free, whole = share * machine.gpus_per_node, machine.host_memory or 0
    on_device, needed, at_least = 0, 0, ""
    if exact:
        for plan in estimates(recipe, machine, profiles()):
            on_device, needed = plan.needed, plan.host.total
            if needed <= free and (plan.spare is None or plan.spare >= 0):
                return
    else:
        plan = estimated_plan(profiles()[0], recipe, machine)
        on_device, at_least = plan.context + plan.step.held.total, "at least "
        needed = plan.host.total
        if machine.device == "cpu":
            needed -= machine.gpus_per_node * (plan.needed - on_device)
    if machine.device == "cuda" and machine.memory is not None and on_device > machine.memory:
        logger.warning(
            f"memory: by estimate a GPU needs {at_least}{bytes_as_text(on_device)}, and "
            f"{bytes_as_text(machine.memory)} are free; `launcher plan` names what fits"
        )
    if needed > whole:
        a_node = f"and has {bytes_as_text(whole)}"
    else:
        a_node = f"and {bytes_as_text(free)} of its {bytes_as_text(whole)} are free"
    if needed > free:
        size = f"{at_least}{bytes_as_text(needed)}"
        logger.warning(f"host memory: by estimate a node needs {size}, {a_node}")


def _least(sizes: Sequence[int | None]) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def resolve_sizes(
    recipe: Recipe, *, start: Start, ranks: RankLayout, run: RunFolder, build: bool
) -> Recipe:
    """The recipe with rank 0's choice in place of each size that is `auto`; every rank must call
    this. A resumed run keeps the sizes of its checkpoint. Writes the recipe to RUN_DIR/recipe.yaml.

    build: tokenize what is not cached (one process of a node). Raises RecipeError.
    """
    if not open_sizes(recipe):
        return recipe
    earlier = from_rank_0(recorded_recipe(run, start) if ranks.rank == 0 else {}, ranks.group)
    if earlier:
        resumed = with_recorded(recipe, earlier)
        if ranks.rank == 0:  # the start wrote `auto`
            _write(resumed, run)
        return resumed
    why, answer = why_not_counted(recipe), None
    if open_sizes(recipe) == [
        "optimizer.learning_rate"
    ]:  # then a thousand ranks need not count rows
        why = NOT_NEEDED
    if ranks.rank == 0:
        rows = why or count_rows(recipe, build=build)
        answer = _answer(recipe, rows, ranks=ranks.size, run=run)
    elif why is None:  # wait until the rows are tokenized, which may take longer than a collective
        for _ in open_stores(recipe, build=build):
            pass
    chosen = from_rank_0(answer, ranks.group)
    if isinstance(chosen, RecipeError):
        raise chosen
    assert chosen is not None
    # This rank's own folders, caches and loader processes, with rank 0's sizes
    for key in open_sizes(recipe):
        recipe = with_value(recipe, key, value_of(chosen, key))
    return recipe


def _answer(
    recipe: Recipe, rows: Rows | str, *, ranks: int, run: RunFolder
) -> Recipe | RecipeError:
    """The recipe with the sizes that are chosen, which is written and logged; or why none can be."""
    try:
        chosen, choices = choose_sizes(recipe, rows, ranks=ranks)
    except RecipeError as error:
        return error
    _write(chosen, run)
    logger.info(choices_text(rows, choices))
    return chosen


def _write(recipe: Recipe, run: RunFolder) -> None:
    run.check()
    replace_text(run.path / "recipe.yaml", to_yaml(recipe), durable=True)


def resolve_compile(recipe: Recipe, *, start: Start, ranks: RankLayout, run: RunFolder) -> Recipe:
    """The recipe with true or false in place of `model.compile: auto`; every rank must call this.

    A run that resumes keeps the value that its checkpoint was trained with, if this machine can
    compile: compiled blocks round differently.
    """
    if recipe.model.compile != "auto":
        return recipe
    reasons = gather(why_eager(ranks.device, check_triton=True), ranks.group)
    why = next((reason for reason in reasons if reason is not None), None)
    recorded = recorded_recipe(run, start) if ranks.rank == 0 else {}
    before = from_rank_0(recorded.get("model", {}).get("compile"), ranks.group)
    on = why is None and before is not False
    text = f"auto: model.compile={str(on).lower()}"
    if why is not None:
        text += f": {why}" + (f"; {COST}" if ranks.device.type == "cuda" else "")
    elif not on:
        text += ", as in the checkpoint; model.compile=true compiles from here on"
    logger.info(text)
    if before is True and not on:
        logger.warning("the checkpoint is of compiled blocks: losses will differ by rounding")
    return replace(recipe, model=replace(recipe.model, compile=on))


def resolve_auto(
    recipe: Recipe, machine: Machine, *, start: Start, ranks: RankLayout, run: RunFolder
) -> Recipe:
    """The recipe with rank 0's choice in place of `auto`; every rank must call this. `start` is
    `Decision.start`.

    Writes the recipe to RUN_DIR/recipe.yaml. Micro-batch sizes that ran out of memory in an earlier
    start of this run, on as many of the same devices, are not chosen again, nor are larger ones.
    Raises RecipeError if nothing fits, TrainingError if planning fails.
    """
    written, recipe = recipe, resolve_compile(recipe, start=start, ranks=ranks, run=run)
    if open_keys(recipe):
        recipe = _resolve_by_plan(recipe, machine, ranks=ranks, run=run)
    if recipe is not written and ranks.rank == 0:
        run.check()
        replace_text(run.path / "recipe.yaml", to_yaml(recipe), durable=True)
    return recipe


def _resolve_by_plan(
    recipe: Recipe, machine: Machine, *, ranks: RankLayout, run: RunFolder
) -> Recipe:
    answer: tuple[Recipe, Sequence[str], str] | Exception | None = None
    if ranks.rank == 0:
        logger.info("auto: looking for the fastest configuration that fits ...")
        failed = failed_micro_batches(run.read_events(), machine=machine, recipe=recipe)
        try:
            answer = run_in_process(
                SECONDS, choose_or_refuse, recipe, machine, min(failed, default=None)
            )
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
    lines = "".join(f"\n      {override}" for override in overrides)
    logger.info(f"auto: {why}{lines}")
    return _with_own(chosen, recipe)


def _with_own(chosen: Recipe, own: Recipe) -> Recipe:
    """Rank 0's recipe with the sections of this rank that no choice changes: machines may have
    other folders, caches and loader processes."""
    model = dataclasses.replace(chosen.model, path=own.model.path)
    return dataclasses.replace(chosen, run=own.run, model=model, lora=own.lora, data=own.data)


def resolve_collectives(
    recipe: Recipe,
    profiles: Callable[[], Profiles],
    machine: Machine,
    *,
    start: Start,
    ranks: RankLayout,
    run: RunFolder,
) -> Recipe:
    """The recipe with rank 0's choice in place of `auto` in `COLLECTIVES` and `model.keep_logits`;
    every rank must call this. `start` is `Decision.start`. Writes the recipe to
    RUN_DIR/recipe.yaml."""
    collectives = open_collectives(recipe, ranks=machine.ranks)
    if not collectives and recipe.model.keep_logits != "auto":
        return recipe
    answer: tuple[Recipe, list[str]] | None = None
    if ranks.rank == 0:
        same = {"strategy." + key for key in COLLECTIVES}
        found, events = profiles(), run.read_events()
        chosen, reasons = recipe, []
        if collectives:
            chosen, why = choose_collectives(
                recipe,
                machine,
                found,
                earlier=earlier_strategy(recipe, run, start, ranks=machine.ranks, except_for=same),
                failed=failed_with_fewer(events, machine=machine, recipe=recipe),
            )
            reasons.append(why)
        failed = failed_with_logits(events, machine=machine, recipe=recipe)
        if (logits := choose_logits(chosen, machine, found, failed=failed)) is not None:
            chosen, why = logits
            reasons.append(why)
        if reasons:
            run.check()
            replace_text(run.path / "recipe.yaml", to_yaml(chosen), durable=True)
        answer = chosen, reasons
    chosen, reasons = cast("tuple[Recipe, list[str]]", from_rank_0(answer, ranks.group))
    for why in reasons:
        logger.info(f"auto: {why}")
    return _with_own(chosen, recipe)
