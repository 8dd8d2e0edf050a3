"""What a run asks the planner: a choice for `auto`, the peak, what fits after memory ran out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from launcher.errors import RecipeError
from launcher.metrics.console import bytes_as_text
from launcher.planner.formatting import batch_in_words, micro_batches, strategy_in_words, where
from launcher.planner.machine import Machine
from launcher.planner.memory import Plan
from launcher.planner.plan import make_plan
from launcher.planner.search import Configuration, fastest_that_fits, make_ladder
from launcher.recipe.load import to_yaml
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import leaves_open

SUGGESTIONS = 3
"""Configurations that are suggested after memory ran out."""
CLEARLY_LESS = 0.03
"""Of its tensors, that a suggestion must need less than the recipe that ran out."""


def choose(recipe: Recipe, machine: Machine, *, limit_micro_batch: int | None) -> dict[str, Any]:
    """The recipe with the fastest choice that fits in place of `auto`, as YAML, and why.

    limit_micro_batch: the largest micro-batch that may be chosen, as larger ones ran out of memory;
    0: the smallest did. Raises RecipeError, with what would help, where nothing fits.
    """
    if limit_micro_batch == 0:
        batch = dataclasses.replace(recipe.batch, micro_batch_size=1)
        alone = dataclasses.replace(recipe, batch=batch)
        best = fastest_that_fits(alone, machine, plan_of=make_plan) if leaves_open(alone) else None
        smallest = alone if best is None else best.recipe
        problem = (
            "batch.micro_batch_size: auto: a micro-batch of 1 ran out of memory already, in an "
            f"earlier start of this run on {machine.ranks} x {machine.name}; there is no smaller "
            "one"
        )
        rows = what_fits(smallest, machine, make_plan(smallest, machine))
        lines = [f"  {' '.join(one.overrides)}" for one in rows]
        less = ["what needs less by the memory plan, the fastest first:", *lines] if lines else []
        raise RecipeError([problem, *less])
    best = fastest_that_fits(
        recipe, machine, plan_of=make_plan, limit_micro_batch=limit_micro_batch
    )
    if best is None:
        raise RecipeError(_nothing_fits(recipe, machine))
    assert not leaves_open(best.recipe)
    why = describe(best, machine)
    return {"recipe": to_yaml(best.recipe), "overrides": list(best.overrides), "why": why}


def describe(best: Configuration, machine: Machine) -> str:
    """`fsdp, bf16; 4 sequences of 2,048 tokens x ... The fastest that fits: by plan 6 GiB ...`."""
    of = "" if machine.memory is None else f" of {bytes_as_text(machine.memory)}"
    return (
        f"{strategy_in_words(best.recipe)}; {batch_in_words(best.recipe, machine.ranks)}. "
        f"The fastest that fits: by plan {bytes_as_text(best.plan.needed)}{of} a rank, "
        f"{best.tokens_per_second:,.0f} tokens/s"
    )


def _nothing_fits(recipe: Recipe, machine: Machine) -> list[str]:
    ladder = make_ladder(recipe, machine, plan_of=make_plan)
    kind = recipe.strategy.kind == "auto"
    what = "strategy.kind" if kind else "batch.micro_batch_size"
    each = "" if machine.memory is None else f" with {bytes_as_text(machine.memory)} each"
    problem = (
        f"{what}: auto: nothing that the plan knows fits {machine.ranks} x {machine.name}{each}"
    )
    return [problem, *(f"  {text}" for text in ladder.suggestions)]


def foresee(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """Bytes of tensors at the peak, and where it is."""
    peak = make_plan(recipe, machine).step.peak
    place = where(peak, micro_batches=micro_batches(recipe, machine.ranks))
    return {"peak": peak.components.total, "where": place}


def explain(
    recipe: Recipe, machine: Machine, *, phase: str, measured: int | None, outside: int | None
) -> Iterator[dict[str, Any]]:
    """First the plan of the recipe that ran out of memory, then what fits.

    phase: of the step that it ran out in. measured: bytes of tensors on the device, with the
    request. outside: bytes of the device outside of the allocator. None: not known.
    """
    plan = make_plan(recipe, machine)
    moment = next((m for name, m in plan.step.phases.items() if name == phase), plan.step.peak)
    yield {
        "components": dataclasses.asdict(moment.components),
        "context": plan.context,
        "margin": plan.margin,
        "needed": plan.needed,
        "host": plan.host.total,
    }
    names = ("overrides", "needed", "tokens_per_second")
    rows = what_fits(recipe, machine, plan, measured=measured, outside=outside)
    values = [(list(one.overrides), one.plan.needed, one.tokens_per_second) for one in rows]
    yield {"suggestions": [dict(zip(names, value, strict=True)) for value in values]}


def what_fits(
    recipe: Recipe,
    machine: Machine,
    plan: Plan,
    *,
    measured: int | None = None,
    outside: int | None = None,
) -> list[Configuration]:
    """The fastest configurations that need less than this recipe, which ran out of memory.

    plan: the recipe's. Where more was measured than planned, or taken outside of the allocator, the
    device counts as so much smaller.
    """
    tensors = plan.step.peak.components.total
    limits = [plan.needed - round(CLEARLY_LESS * tensors)]
    if machine.memory is not None:
        beside = max(plan.context, outside or 0)
        share = min(1.0, tensors / measured) if measured else 1.0
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
