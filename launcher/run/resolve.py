"""`auto` in a run: rank 0 decides, all ranks take its values, and RUN_DIR/recipe.yaml has them.

`planner/auto.py` decides.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from launcher.checkpoint.resume import ResumePoint, earlier_strategy, recorded_recipe
from launcher.console import bytes_as_text
from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.distributed.process_group import from_rank_0, gather
from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.separate_process import run_in_process
from launcher.errors import RecipeError, TrainingError
from launcher.files import replace_text
from launcher.planner.auto import (
    COLLECTIVES,
    COMPILE,
    SEARCH,
    SIZES,
    Decision,
    choices_text,
    estimates,
    needing,
    open_collectives,
    overrides_of,
    resolve,
    settled,
)
from launcher.planner.facts import Facts, Profiles, Rows
from launcher.planner.machine import Machine, known_machine
from launcher.planner.plan import estimated_plan
from launcher.planner.sizes import count_rows, open_stores, sizes_text, why_not_counted
from launcher.planner.work import Work
from launcher.recipe.derived import Choices, with_value
from launcher.recipe.load import to_yaml
from launcher.recipe.schema import Recipe
from launcher.reliability.run_directory import RunFolder
from launcher.strategies.compilation import why_eager

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

SECONDS = 300
"""Time limit of the choice."""
OWN_CONTEXT = 2**30
"""Bytes of a GPU that the CUDA context and communicators of this process hold. An estimate. A plan
includes them in the memory needed, so they must also be included in the memory available."""


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
    return replace(
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
        plan = estimated_plan(Work(profiles()[0], recipe, ranks=machine.ranks), machine)
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


def resolve_by_rows(
    recipe: Recipe, *, start: ResumePoint, ranks: RankLayout, run: RunFolder, build: bool
) -> Recipe:
    """The recipe with rank 0's choice in place of `auto` in the keys that depend on the recipe or its
    rows; every rank must call this. A resumed run keeps what its decisions keep of the checkpoint.
    Writes the recipe to RUN_DIR/recipe.yaml.

    build: tokenize what is not cached (one process of a node). Raises RecipeError.
    """
    decisions = needing("recipe", "rows")
    if not any(decision.open(recipe) for decision in decisions):
        return recipe
    earlier = from_rank_0(recorded_recipe(run, start) if ranks.rank == 0 else {}, ranks.group)
    if earlier:
        recipe = _with_recorded(recipe, earlier, decisions)
        decisions = [decision for decision in decisions if not decision.kept_on_resume]
        if not any(decision.open(recipe) for decision in decisions):
            _write(recipe, ranks, run)  # the start wrote `auto`
            return recipe
    rows: Rows | str | None = None
    if SIZES.open(recipe):
        rows = why_not_counted(recipe)
        if ranks.rank == 0:
            rows = rows or count_rows(recipe, build=build)
        elif rows is None:  # wait until they are tokenized, which may take longer than a collective
            for _ in open_stores(recipe, build=build):
                pass
    facts = Facts(ranks=ranks.size, rows=rows)
    _, chosen = on_rank_0(lambda: resolve(recipe, facts, decisions), ranks)
    if ranks.rank == 0:
        logger.info(sizes_text(rows, chosen))
    recipe = _with_choices(recipe, chosen)
    _write(recipe, ranks, run)
    return recipe


def resolve_by_machine(
    recipe: Recipe, machine: Machine, *, start: ResumePoint, ranks: RankLayout, run: RunFolder
) -> Recipe:
    """The recipe with rank 0's choice in place of `auto` in the keys that depend on the machine;
    every rank must call this. `start` is `ResumeDecision.start`. Writes the recipe to RUN_DIR/recipe.yaml.

    Raises RecipeError if nothing fits, TrainingError if planning fails.
    """
    written = recipe
    if COMPILE.open(recipe):
        recipe = _resolve_compile(recipe, machine, start=start, ranks=ranks, run=run)
    if SEARCH.open(recipe):
        chosen, choices = on_rank_0(lambda: _search(recipe, machine, run), ranks)
        (why,) = {choice.reason for choice in choices.values()}
        lines = "".join(f"\n      {override}" for override in overrides_of(choices))
        logger.info(f"auto: {why}{lines}")
        recipe = _with_own(chosen, recipe)
    others = [decision for decision in needing("machine") if decision not in (COMPILE, SEARCH)]
    if any(decision.open(recipe) for decision in others):
        earlier = from_rank_0(recorded_recipe(run, start) if ranks.rank == 0 else {}, ranks.group)
        recipe = _with_recorded(recipe, earlier, others)
        others = [each for each in others if not (earlier and each.kept_on_resume)]
        facts = Facts(ranks=ranks.size, machine=machine, events=run.read_events())
        _, every = on_rank_0(lambda: resolve(recipe, facts, others), ranks)
        for choices in every:
            logger.info(f"auto: {choices_text(choices)}")
        recipe = _with_choices(recipe, every)
    if recipe is not written:
        _write(recipe, ranks, run)
    return recipe


def _resolve_compile(
    recipe: Recipe, machine: Machine, *, start: ResumePoint, ranks: RankLayout, run: RunFolder
) -> Recipe:
    reasons = gather(why_eager(ranks.device, check_triton=True), ranks.group)
    recorded = from_rank_0(recorded_recipe(run, start) if ranks.rank == 0 else {}, ranks.group)
    facts = Facts(
        ranks=ranks.size,
        machine=machine,
        why_eager=next((reason for reason in reasons if reason is not None), None),
        recorded=recorded,
    )
    resolved, (choices,) = resolve(recipe, facts, [COMPILE])
    logger.info(f"auto: {choices_text(choices)}")
    if recorded.get("model", {}).get("compile") is True and not resolved.model.compile:
        logger.warning("the checkpoint is of compiled blocks: losses will differ by rounding")
    return resolved


def _search(recipe: Recipe, machine: Machine, run: RunFolder) -> tuple[Recipe, Choices]:
    """The configuration that is chosen, on rank 0."""
    logger.info("auto: looking for the fastest configuration that fits ...")
    facts = Facts(ranks=machine.ranks, machine=machine, must_fit=True, events=run.read_events())
    try:
        chosen, (choices,) = run_in_process(SECONDS, resolve, recipe, facts, [SEARCH])
    except TrainingError as error:
        text = f"auto: the plan failed; set {' and '.join(SEARCH.open(recipe))}. {error}"
        raise TrainingError(text, reason="plan_failed") from None
    return chosen, choices


def resolve_by_model(
    recipe: Recipe,
    profiles: Callable[[], Profiles],
    machine: Machine,
    *,
    start: ResumePoint,
    ranks: RankLayout,
    run: RunFolder,
) -> Recipe:
    """The recipe with rank 0's choice in place of `auto` in the keys that depend on the model; every
    rank must call this. `start` is `ResumeDecision.start`. Writes the recipe to RUN_DIR/recipe.yaml."""
    decisions = needing("model")
    if not any(decision.open(recipe) for decision in decisions):
        return recipe

    facts = Facts(ranks=machine.ranks, machine=machine, profiles=lambda _: profiles())
    if ranks.rank == 0:
        exact = None
        if open_collectives(recipe, ranks=machine.ranks):
            same = {*COLLECTIVES.keys}
            exact = earlier_strategy(recipe, run, start, ranks=machine.ranks, except_for=same)
        facts = replace(facts, events=run.read_events(), exact=exact)
    chosen, every = on_rank_0(lambda: resolve(recipe, facts, decisions), ranks)
    for choices in every:
        logger.info(f"auto: {choices_text(choices)}")
    recipe = _with_own(chosen, recipe)
    if every:
        _write(recipe, ranks, run)
    return recipe


def settle(recipe: Recipe, *, ranks: RankLayout, run: RunFolder) -> Recipe:
    """The recipe without any `auto`, as `settled` makes it. Writes it to RUN_DIR/recipe.yaml."""
    resolved, recipe = recipe, settled(recipe)
    if to_yaml(recipe) != to_yaml(resolved):
        _write(recipe, ranks, run)
    return recipe


def on_rank_0(decide: Callable[[], Answer], ranks: RankLayout) -> Answer:
    """What a function returns on rank 0; every rank must call this. Raises the error of rank 0."""
    answer: Answer | Exception | None = None
    if ranks.rank == 0:
        try:
            answer = decide()
        except (RecipeError, TrainingError) as error:
            answer = error
    answer = from_rank_0(answer, ranks.group)
    if isinstance(answer, Exception):
        raise answer
    return cast(Answer, answer)


def _with_recorded(
    recipe: Recipe, earlier: Mapping[str, Any], decisions: Iterable[Decision]
) -> Recipe:
    """The recipe with the values of another, given as plain values, in place of each `auto` that a run
    keeps when it resumes."""
    for decision in decisions:
        for key in decision.open(recipe) if decision.kept_on_resume else ():
            section, _, name = key.partition(".")
            if name in (earlier.get(section) or {}):
                recipe = with_value(recipe, key, earlier[section][name])
    return recipe


def _with_choices(recipe: Recipe, chosen: Iterable[Choices]) -> Recipe:
    """This rank's recipe, with its own folders, caches and loader processes, and rank 0's choices."""
    for choices in chosen:
        for key, choice in choices.items():
            recipe = with_value(recipe, key, choice.value)
    return recipe


def _with_own(chosen: Recipe, own: Recipe) -> Recipe:
    """Rank 0's recipe with the sections of this rank that no choice changes: machines may have
    other folders, caches and loader processes."""
    model = replace(chosen.model, path=own.model.path)
    return replace(chosen, run=own.run, model=model, lora=own.lora, data=own.data)


def _write(recipe: Recipe, ranks: RankLayout, run: RunFolder) -> None:
    if ranks.rank == 0:
        run.check()
        replace_text(run.path / "recipe.yaml", to_yaml(recipe), durable=True)
