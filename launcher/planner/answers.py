"""What a run asks the planner (`separate_process.ask`): a choice for `auto`, the peak, suggestions
after memory ran out. Each function yields its answers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence

from launcher.errors import RecipeError
from launcher.metrics.console import bytes_as_text
from launcher.planner.candidates import Configuration
from launcher.planner.formatting import batch_text, micro_batches, moment_text, strategy_text
from launcher.planner.machine import Machine
from launcher.planner.memory import Plan
from launcher.planner.plan import make_plan
from launcher.planner.search import fastest_that_fits, make_ladder
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import leaves_open

SUGGESTIONS = 3
"""Configurations that are suggested after memory ran out."""
CLEARLY_LESS = 0.03
"""Share of its tensors by which a suggestion must need less than the recipe that ran out."""

Choice = tuple[Recipe, Sequence[str], str]
"""The recipe without `auto`, the overrides that make it, and why it was chosen."""
Suggestion = tuple[Sequence[str], int, float]
"""Overrides, bytes needed per rank, tokens a second."""


def choose(recipe: Recipe, machine: Machine, limit_micro_batch: int | None) -> Iterator[Choice]:
    """The fastest configuration that fits, in place of `auto`.

    limit_micro_batch: the largest micro-batch that may be chosen, as larger ones ran out of memory;
    0: the smallest did. Raises RecipeError, with suggestions, where nothing fits.
    """
    if limit_micro_batch == 0:
        raise RecipeError(
            "batch.micro_batch_size: auto: a micro-batch of 1 ran out of memory in an earlier "
            f"start of this run on {machine.ranks} x {machine.name}; there is no smaller one. "
            "`launcher plan` shows configurations that need less"
        )
    best = fastest_that_fits(
        recipe, machine, plan_of=make_plan, limit_micro_batch=limit_micro_batch
    )
    if best is None:
        ladder = make_ladder(recipe, machine, plan_of=make_plan)
        key = "strategy.kind" if recipe.strategy.kind == "auto" else "batch.micro_batch_size"
        memory = "" if machine.memory is None else f" with {bytes_as_text(machine.memory)} each"
        problem = f"{key}: auto: no configuration fits {machine.ranks} x {machine.name}{memory}"
        raise RecipeError([problem, *(f"  {text}" for text in ladder.suggestions)])
    assert not leaves_open(best.recipe)
    of = "" if machine.memory is None else f" of {bytes_as_text(machine.memory)}"
    why = (
        f"{strategy_text(best.recipe)}; {batch_text(best.recipe, machine.ranks)}. "
        f"The fastest that fits: by plan {bytes_as_text(best.plan.needed)}{of} a rank, "
        f"{best.tokens_per_second:,.0f} tokens/s"
    )
    yield best.recipe, best.overrides, why


def predict_peak(recipe: Recipe, machine: Machine) -> Iterator[tuple[int, str]]:
    """Bytes of tensors at the peak, and where it is."""
    os.nice(10)  # the run is training meanwhile
    peak = make_plan(recipe, machine).step.peak
    count = micro_batches(recipe, machine.ranks)
    yield peak.total, moment_text(peak, micro_batches=count)


def explain(
    recipe: Recipe, machine: Machine, measured: int | None, outside: int | None
) -> Iterator[Plan | list[Suggestion]]:
    """The plan of the recipe that ran out of memory, then what fits, as in `what_fits`."""
    plan = make_plan(recipe, machine)
    yield plan
    rows = what_fits(recipe, machine, plan, measured=measured, outside=outside)
    yield [(one.overrides, one.plan.needed, one.tokens_per_second) for one in rows]


def what_fits(
    recipe: Recipe,
    machine: Machine,
    plan: Plan,
    *,
    measured: int | None = None,
    outside: int | None = None,
) -> list[Configuration]:
    """The fastest configurations that need less than this recipe, which ran out of memory.

    plan: the recipe's. measured: bytes of tensors on the device, with the request; outside: bytes
    of the device outside of the allocator. Where they exceed the plan, the device counts as so
    much smaller. None: not known.
    """
    limits = [plan.needed - round(CLEARLY_LESS * plan.tensors)]
    if machine.memory is not None:
        beside = max(plan.context, outside or 0)
        share = min(1.0, plan.tensors / measured) if measured else 1.0
        limits.append(plan.context + round((machine.memory - beside) * share))
    smaller = dataclasses.replace(machine, memory=min(limits))

    def plan_of(other: Recipe, machine: Machine) -> Plan:
        known = other == recipe
        return dataclasses.replace(plan, machine=machine) if known else make_plan(other, machine)

    ladder = make_ladder(recipe, smaller, plan_of=plan_of, traced=SUGGESTIONS)
    rows = [
        one
        for one in ladder.configurations
        if one.overrides and one.plan.fits and one.plan.step.method == plan.step.method
    ]
    return sorted(rows, key=lambda one: -one.tokens_per_second)[:SUGGESTIONS]
