"""Detects the machine of a run, and chooses the settings that are `auto` for it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch

from launcher.checkpoint.resume import earlier_strategy
from launcher.console import bytes_as_text
from launcher.distributed import host_memory
from launcher.distributed.environment import Environment
from launcher.distributed.process_group import DataParallel, from_rank_0, gather
from launcher.distributed.separate_process import run_in_process
from launcher.errors import RecipeError, TrainingError
from launcher.planner.candidates import overrides_between
from launcher.planner.fastest import measured_choice
from launcher.planner.formatting import batch_text, speed_text, strategy_text
from launcher.planner.machine import Machine, known_machine
from launcher.planner.memory import Plan
from launcher.planner.plan import estimated_plan
from launcher.planner.profile import ModelProfile, profile_of_shapes, with_saved
from launcher.planner.recipes import micro_batches_of
from launcher.planner.search import fastest_that_fits, search_configurations
from launcher.planner.work import Work, with_most_saved
from launcher.recipe.load import to_yaml
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import open_keys
from launcher.reliability.json_files import Json, replace_text
from launcher.reliability.run_directory import RunFolder
from launcher.run.compilation import resolve_compile
from launcher.strategies.base import compute_dtype
from launcher.training.prepare import PreparedModel

logger = logging.getLogger(__name__)

COLLECTIVES = ("sync_every_micro_batch", "reshard_after_forward")
"""Keys of `strategy` whose `auto` means: false if that leaves `ROOM`."""
ROOM = 0.15
"""Share of the memory that must stay free by estimate, which is good to some 10 %."""
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
    recipe: Recipe, machine: Machine, *, resume: str, ranks: DataParallel, run: RunFolder
) -> Recipe:
    """The recipe with rank 0's choice in place of `auto`; every rank must call this. `resume` is
    `Decision.source`.

    Writes the recipe to RUN_DIR/recipe.yaml. Micro-batch sizes that ran out of memory in an earlier
    start of this run, on as many of the same devices, are not chosen again, nor are larger ones.
    Raises RecipeError if nothing fits, TrainingError if planning fails.
    """
    written, recipe = recipe, resolve_compile(recipe, resume=resume, ranks=ranks, run=run)
    if open_keys(recipe):
        recipe = _resolve_by_plan(recipe, machine, ranks=ranks, run=run)
    if recipe is not written and ranks.rank == 0:
        run.check()
        replace_text(run.path / "recipe.yaml", to_yaml(recipe))
    return recipe


def _resolve_by_plan(
    recipe: Recipe, machine: Machine, *, ranks: DataParallel, run: RunFolder
) -> Recipe:
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
    lines = "".join(f"\n      {override}" for override in overrides)
    logger.info(f"auto: {why}{lines}")
    return chosen


def open_collectives(recipe: Recipe, *, ranks: int) -> list[str]:
    """Those of `COLLECTIVES` that are `auto` and matter, unless the plan decides them, too."""
    if recipe.strategy.kind != "fsdp" or open_keys(recipe):
        return []
    keys = COLLECTIVES if micro_batches_of(recipe, ranks=ranks) > 1 else COLLECTIVES[1:]
    return [key for key in keys if getattr(recipe.strategy, key) == "auto"]


def resolve_collectives(
    recipe: Recipe,
    prepared: PreparedModel,
    machine: Machine,
    *,
    resume: str,
    ranks: DataParallel,
    run: RunFolder,
) -> Recipe:
    """The recipe with rank 0's choice in place of `auto` in `COLLECTIVES` and `model.keep_logits`;
    every rank must call this. `resume` is `Decision.source`. Writes the recipe to
    RUN_DIR/recipe.yaml."""
    collectives = open_collectives(recipe, ranks=machine.ranks)
    if not collectives and recipe.model.keep_logits != "auto":
        return recipe
    answer: tuple[Recipe, list[str]] | None = None
    if ranks.rank == 0:
        shapes = profile_of_shapes(prepared, recipe, device=machine.device)

        @cache
        def with_activations() -> ModelProfile:
            model, blocks = copy.deepcopy((prepared.model, prepared.blocks))
            copied = dataclasses.replace(prepared, model=model, blocks=blocks)
            return with_saved(shapes, copied, recipe, dtypes={compute_dtype(recipe.strategy)})

        profiles, same = (shapes, with_activations), {"strategy." + key for key in COLLECTIVES}
        chosen, events, reasons = recipe, run.read_events(), []
        if collectives:
            chosen, why = choose_collectives(
                recipe,
                machine,
                profiles,
                earlier=earlier_strategy(recipe, run, resume, ranks=machine.ranks, except_for=same),
                failed=_failed_with_fewer(events, machine=machine, recipe=recipe),
            )
            reasons.append(why)
        failed = _failed_with_logits(events, machine=machine, recipe=recipe)
        if (logits := choose_logits(chosen, machine, profiles, failed=failed)) is not None:
            chosen, why = logits
            reasons.append(why)
        if reasons:
            run.check()
            replace_text(run.path / "recipe.yaml", to_yaml(chosen))
        answer = chosen, reasons
    chosen, reasons = cast("tuple[Recipe, list[str]]", from_rank_0(answer, ranks.group))
    for why in reasons:
        logger.info(f"auto: {why}")
    return chosen


def choose_collectives(
    recipe: Recipe,
    machine: Machine,
    profiles: tuple[ModelProfile, Callable[[], ModelProfile]],
    *,
    earlier: Mapping[str, Any] | None = None,
    failed: bool = False,
) -> tuple[Recipe, str]:
    """The fewest collectives that leave `ROOM` by estimate, in place of `auto` in `COLLECTIVES`.

    `profiles` are the model's profile without what blocks save and, called if it is needed, with
    it. `earlier` is the strategy of the checkpoint that is resumed from, if a resume can be exact.
    `failed`: fewer collectives ran out of memory before. Returns the recipe, and the overrides that
    produce it with the reason.
    """
    keys = open_collectives(recipe, ranks=machine.ranks)
    # Reducing once a step comes first: with several micro-batches it saves as much traffic or more
    *fewer, most = (
        _with_strategy(recipe, dict(zip(keys, values, strict=True)))
        for values in itertools.product((False, True), repeat=len(keys))
    )
    known = machine.memory or 0
    memory = bytes_as_text(known)
    chosen, why = most, f"fewer collectives would leave less than {ROOM:.0%} of {memory} free"
    traced = cache(profiles[1])

    def leaves(share: float, choice: Recipe) -> bool:
        plans = _estimates(choice, machine, (profiles[0], traced))
        return any(plan.fits and (plan.spare or 0) >= share * known for plan in plans)

    # An earlier version recorded `auto`, which meant true
    kept = _with_strategy(recipe, {key: (earlier or {}).get(key) is not False for key in keys})
    if failed:
        why = "with fewer collectives an earlier start ran out of memory"
    elif earlier is not None and (not known or kept == most or leaves(0, kept)):
        chosen, why = kept, "as in the checkpoint, so that the resume is exact"
    elif not known:
        why = "the size of the memory is not known"
    elif choice := next((each for each in fewer if leaves(ROOM, each)), None):
        chosen, why = choice, f"by estimate {ROOM:.0%} of {memory} or more stay free"
    return chosen, f"{' '.join(overrides_between(recipe, chosen))}: {why}"


def choose_logits(
    recipe: Recipe,
    machine: Machine,
    profiles: tuple[ModelProfile, Callable[[], ModelProfile]],
    *,
    failed: bool = False,
) -> tuple[Recipe, str] | None:
    """`model.keep_logits` in place of `auto`: true if that leaves `ROOM` by estimate. None if it is
    not `auto`, if no logits would be computed again, or if the size of the memory is not known.

    A resume need not keep the choice, which changes no bits. `profiles` are as in
    `choose_collectives`. `failed`: with kept logits an earlier start ran out of memory. Returns the
    recipe, and the override that produces it with the reason.
    """
    chunked = Work(profiles[0], recipe, ranks=machine.ranks).chunked
    if recipe.model.keep_logits != "auto" or recipe.distillation is not None or not chunked:
        return None
    if not (known := machine.memory or 0):
        return None
    kept, again = (
        dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, keep_logits=keeps))
        for keeps in (True, False)
    )
    memory = bytes_as_text(known)
    chosen, why = again, f"kept logits would leave less than {ROOM:.0%} of {memory} free"
    if failed:
        why = "with kept logits an earlier start ran out of memory"
    elif any(
        plan.fits and (plan.spare or 0) >= ROOM * known
        for plan in _estimates(kept, machine, profiles)
    ):
        chosen, why = kept, f"by estimate {ROOM:.0%} of {memory} or more stay free"
    return chosen, f"{' '.join(overrides_between(recipe, chosen))}: {why}"


def _with_strategy(recipe: Recipe, values: Mapping[str, bool]) -> Recipe:
    strategy: Any = dataclasses.replace(recipe.strategy, **values)  # type: ignore[arg-type]
    return dataclasses.replace(recipe, strategy=strategy)


def _estimates(
    recipe: Recipe, machine: Machine, profiles: tuple[ModelProfile, Callable[[], ModelProfile]]
) -> Iterator[Plan]:
    """Estimates of the memory: first one that is too high but quick, then a good one. None for
    models of the user's own code, of which only a trace knows what they save."""
    shapes, checkpointing = profiles[0], recipe.activation_checkpointing
    if recipe.model.builder is not None or recipe.data.builder is not None:
        return
    if shapes.packed_attention and (checkpointing is None or checkpointing.budget is None):
        yield estimated_plan(with_most_saved(shapes, recipe), recipe, machine)
    if (traced := profiles[1]()).saved:
        yield estimated_plan(traced, recipe, machine)


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
        result = search_configurations(recipe, machine)
        suggestions = result.suggestions
        if (best := result.best) is not None:  # in which more changes than what is auto
            suggestions = (f"{strategy_text(best.recipe)}: {' '.join(best.overrides)}",)
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
    if best.plan.has_room is False:
        after = f"; slow, because less than {bytes_as_text(best.plan.room)} are to spare{after}"
    why = (
        f"{strategy_text(best.recipe)}; {batch_text(best.recipe, machine.ranks)}. The fastest that "
        f"fits: by plan {bytes_as_text(best.plan.needed)}{of} a rank, "
        f"{speed_text(best.tokens_per_second, best.tokens_per_second_range)}{after}"
    )
    return best.recipe, best.overrides, why


def recorded_settings(recipe: Recipe, machine: Machine) -> Json:
    """What events.jsonl records with an out-of-memory failure, besides the number of ranks."""
    checkpointing, offload = recipe.activation_checkpointing, recipe.strategy.cpu_offload
    return {
        "micro_batch_size": recipe.batch.micro_batch_size,
        "device": machine.name,
        "sequence_length": recipe.data.sequence_length,
        "lora": recipe.lora is not None,
        "checkpointing": None if checkpointing is None else checkpointing.mode,
        "cpu_offload": offload is not None and (offload.what == "all" or offload.what),
        "keep_logits": recipe.model.keep_logits,
    } | {key: getattr(recipe.strategy, key) for key in COLLECTIVES}


def failed_micro_batches(events: list[Json], *, machine: Machine, recipe: Recipe) -> list[int]:
    """Micro-batch sizes that ran out of memory in earlier starts of a run, on as many of the same
    devices and with the same settings; with strategy `auto` checkpointing and offload may differ.
    Empty unless the micro-batch of the recipe is `auto`."""
    if recipe.batch.micro_batch_size != "auto":
        return []
    same = recorded_settings(recipe, machine) | {"ranks": machine.ranks}
    same |= {"event": "failed", "reason": "out_of_memory"}
    for key in ("micro_batch_size", "keep_logits", *COLLECTIVES):
        del same[key]
    if recipe.strategy.kind == "auto":
        del same["checkpointing"], same["cpu_offload"]
    return [
        event["micro_batch_size"]
        for event in events
        if event.get("micro_batch_size") is not None
        and all(event.get(name) == value for name, value in same.items())
    ]


def _failed_with_fewer(events: list[dict[str, Any]], *, machine: Machine, recipe: Recipe) -> bool:
    """Whether an earlier start of a run, on as many of the same devices and with the same settings
    but fewer collectives, ran out of memory."""
    return any(
        False in map(event.get, COLLECTIVES)
        for event in _similar_failures(events, machine=machine, recipe=recipe)
    )


def _failed_with_logits(events: list[Json], *, machine: Machine, recipe: Recipe) -> bool:
    """The same of kept logits."""
    return any(
        event.get("keep_logits") is True
        for event in _similar_failures(events, machine=machine, recipe=recipe)
    )


def _similar_failures(events: list[Json], *, machine: Machine, recipe: Recipe) -> Iterator[Json]:
    """Earlier starts of a run, on as many of the same devices and with the same settings, that ran
    out of memory. Their collectives and kept logits may differ."""
    same = recorded_settings(recipe, machine) | {"ranks": machine.ranks}
    same |= {"event": "failed", "reason": "out_of_memory"}
    for key in ("keep_logits", *COLLECTIVES):
        del same[key]
    return (event for event in events if same.items() <= event.items())
