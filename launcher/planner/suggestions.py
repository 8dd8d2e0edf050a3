"""What would have fitted, where memory ran out: rungs of the ladder below what the plan gives the recipe that did not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from launcher.errors import RecipeError
from launcher.planner.machine import Machine
from launcher.planner.plan import Plan
from launcher.planner.planning import make_plan
from launcher.planner.search import Rung, make_ladder
from launcher.recipe.schema import Recipe

REMEDIES = 3
BELOW = 0.97
"""Of what the recipe that ran out needs by plan: what needs hardly less would run out as well."""


def explain(recipe: Recipe, machine: Machine, *, phase: str, measured: int | None, outside: int | None) -> Iterator[dict[str, Any]]:
    """First the plan beside which memory ran out, then what fits, as plain values.

    phase: of the step that it ran out in. measured: bytes of tensors on the device, with those that were asked for; None:
    not known. outside: bytes of the device that are neither tensors nor kept for them; None: not known.
    """
    plan = make_plan(recipe, machine)
    components = next((moment.components for name, moment in plan.step.phases.items() if name == phase), plan.step.peak.components)
    yield {
        "components": dataclasses.asdict(components),
        "context": plan.context,
        "margin": plan.margin,
        "needed": plan.needed,
        "host": dataclasses.asdict(plan.host),
    }
    rungs = what_fits(recipe, machine, plan, measured=measured, outside=outside)
    yield {
        "remedies": [
            {"overrides": list(rung.overrides), "needed": rung.plan.needed, "tokens_per_second": rung.tokens_per_second} for rung in rungs
        ]
    }


def what_fits(recipe: Recipe, machine: Machine, plan: Plan, *, measured: int | None = None, outside: int | None = None) -> list[Rung]:
    """The fastest rungs that need less than this recipe, which ran out of memory: two or three, or fewer where there are no more.

    plan: the recipe's. Where more was measured than it says (or taken outside of tensors), the device counts as so much smaller.
    """
    tensors = plan.step.peak.components.total
    limits = [plan.needed - round((1 - BELOW) * tensors)]
    if machine.memory is not None:
        beside = max(plan.context, outside or 0)
        share = min(1.0, tensors / measured) if measured else 1.0
        limits.append(plan.context + round((machine.memory - beside) * share))
    smaller = dataclasses.replace(machine, memory=min(limits))

    def plan_of(other: Recipe, machine: Machine) -> Plan:
        return dataclasses.replace(plan, machine=machine) if other == recipe else make_plan(other, machine)

    ladder = make_ladder(recipe, smaller, plan_of=plan_of, traced=REMEDIES)
    # Those that were only estimated are not shown to fit
    shown = [rung for rung in ladder.rungs if rung.plan.fits and rung.overrides and rung.plan.step.method == plan.step.method]
    return sorted(shown, key=lambda rung: -rung.tokens_per_second)[:REMEDIES]


def refused_with_remedies(what: str, rungs: list[Rung]) -> RecipeError:
    """The error of a recipe that cannot go on as it is."""
    lines = [f"  {' '.join(rung.overrides)}" for rung in rungs]
    return RecipeError([what, "what needs less by the memory plan, the fastest first:", *lines] if lines else [what])
