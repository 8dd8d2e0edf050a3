"""The fastest configuration that fits, and others worth showing: estimated, confirmed by traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.data.synthetic import rows_of
from launcher.planner.candidates import Configuration, complexity, estimated, variants
from launcher.planner.machine import Machine
from launcher.planner.memory import Plan
from launcher.planner.profile import profile_model
from launcher.planner.suggestions import suggestions
from launcher.recipe.schema import Recipe

PlanOf = Callable[[Recipe, Machine], Plan]

EQUAL_SPEED = 0.02
"""Configurations whose speeds differ by less count as equally fast: the simplest is taken."""
LESS_MEMORY = 0.8
"""Each configuration shown needs at most this share of the memory of the one before."""
SHOWN = 7
TRACES = 5
"""Traces that the search for the fastest may take, some seconds each."""
OPTIMISM = 0.95
"""Traced over estimated memory that is assumed until a similar configuration was traced: one that
barely does not fit is worth a trace."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Configurations worth showing."""

    written: Configuration
    """The recipe as written."""
    configurations: tuple[Configuration, ...]
    """The recipe as written, and others, each with clearly less memory than the one before. Where
    nothing fits: the smallest. The fastest first."""
    best: Configuration | None
    """The fastest that fits, traced; None: nothing fits, or no memory is known."""
    evaluated: int
    suggestions: tuple[str, ...]
    """What would help where nothing fits, in words and overrides."""


def make_ladder(recipe: Recipe, machine: Machine, *, plan_of: PlanOf, traced: int = 4) -> Ladder:
    """Estimates all configurations, and traces the fastest that fits and the next `traced` - 1.

    plan_of: traces a recipe. Raises RecipeError as `prepare_model`.
    """
    recipe = concrete(recipe)
    search = _Search(recipe, machine, plan_of)
    written = search.trace(search.estimate(recipe))
    found = [search.estimate(one) for one in variants(recipe, machine)]
    best = search.fastest(found)
    shown = []
    if best is not None or machine.memory is None:
        shown = _shown([one for one in found if search.may_fit(one)], recipe)
    if not shown:
        shown = [min(found, key=lambda one: (one.plan.tensors, one.seconds.total))]
    rows = [search.trace(one) if n < traced else one for n, one in enumerate(shown)]
    if best is not None:
        rows = [best, *(one for one in rows if one.recipe != best.recipe)]
    rows = [one for one in rows if one is best or not _beaten(one, rows)]
    if all(one.recipe != recipe for one in rows):
        rows.append(written)
    helps = best is None and machine.memory is not None
    return Ladder(
        written=written,
        configurations=tuple(sorted(rows, key=lambda one: (one.seconds.total, one.plan.needed))),
        best=best,
        evaluated=len(found),
        suggestions=tuple(suggestions(search.profile, recipe, machine)) if helps else (),
    )


def fastest_that_fits(
    recipe: Recipe, machine: Machine, *, plan_of: PlanOf, limit_micro_batch: int | None = None
) -> Configuration | None:
    """What `auto` stands for: the fastest that fits, traced; None where nothing does.

    Only what is `auto` varies: with strategy.kind the strategy and the checkpointing, with
    batch.micro_batch_size that. limit_micro_batch: the most sequences of a micro-batch.
    """
    search = _Search(recipe, machine, plan_of)
    recipes = variants(
        concrete(recipe),
        machine,
        strategies=recipe.strategy.kind == "auto",
        micro_batches=recipe.batch.micro_batch_size == "auto",
        precisions=False,
    )
    length = recipe.data.sequence_length
    return search.fastest(
        [
            search.estimate(one)
            for one in recipes
            if limit_micro_batch is None
            or rows_of(one.batch, sequence_length=length) <= limit_micro_batch
        ]
    )


def concrete(recipe: Recipe) -> Recipe:
    """With the default in place of `auto`: fsdp, one sequence."""
    strategy, batch = recipe.strategy, recipe.batch
    if strategy.kind == "auto":
        strategy = dataclasses.replace(strategy, kind="fsdp")
    if batch.micro_batch_size == "auto":
        batch = dataclasses.replace(batch, micro_batch_size=1)
    return dataclasses.replace(recipe, strategy=strategy, batch=batch)


class _Search:
    """Estimates and traces configurations; traces correct the estimates of similar ones."""

    def __init__(self, written: Recipe, machine: Machine, plan_of: PlanOf) -> None:
        self._written, self._machine, self._plan_of = written, machine, plan_of
        self.profile = profile_model(concrete(written), device=machine.device)
        self._plans: list[tuple[Recipe, Plan]] = []
        self._scales: dict[tuple[str, str | None], float] = {}
        """Traced over estimated bytes of tensors, by strategy and checkpointing."""

    def estimate(self, recipe: Recipe) -> Configuration:
        """The recipe with its estimated plan."""
        return estimated(self.profile, recipe, self._machine, written=self._written)

    def trace(self, one: Configuration) -> Configuration:
        """An estimated configuration with its traced plan, which is made once for each recipe."""
        plan = next((plan for recipe, plan in self._plans if recipe == one.recipe), None)
        if plan is None:
            plan = self._plan_of(one.recipe, self._machine)
            self._plans.append((one.recipe, plan))
            key, scale = _like(one.recipe), plan.tensors / max(1, one.plan.tensors)
            self._scales[key] = max(self._scales.get(key, 0.0), scale)
        return dataclasses.replace(one, plan=plan)

    def may_fit(self, one: Configuration) -> bool:
        """Whether the corrected estimate fits, where memory is known."""
        extra = (self._scales.get(_like(one.recipe), OPTIMISM) - 1) * one.plan.tensors
        spare, host_spare = one.plan.spare, one.plan.host_spare
        return (spare is None or extra <= spare) and (host_spare is None or host_spare >= 0)

    def fastest(self, found: Sequence[Configuration]) -> Configuration | None:
        """The fastest whose traced plan fits; CPU offload only where nothing fits without."""
        if self._machine.memory is None and self._machine.host_memory is None:
            return None
        for offloads in (False, True):
            group = [one for one in found if one.offloads == offloads]
            for attempt in range(TRACES + 1):
                group = [one for one in group if self.may_fit(one)]
                if not group:
                    break
                one = _simplest_of_the_fastest(group, self._written)
                if attempt == TRACES:  # the estimates are wrong about this model
                    one = min(group, key=lambda one: one.plan.tensors)
                traced = self.trace(one)
                if traced.plan.fits:
                    return traced
                group.remove(one)
        return None


def _like(recipe: Recipe) -> tuple[str, str | None]:
    """Recipes for which the estimate is about equally wrong."""
    checkpointing = recipe.activation_checkpointing
    return recipe.strategy.kind, None if checkpointing is None else checkpointing.mode


def _simplest_of_the_fastest(group: Sequence[Configuration], written: Recipe) -> Configuration:
    limit = min(one.seconds.total for one in group) * (1 + EQUAL_SPEED)
    fast = [one for one in group if one.seconds.total <= limit]
    return min(
        fast, key=lambda one: (complexity(one, written), one.seconds.total, one.plan.tensors)
    )


def _shown(found: Sequence[Configuration], written: Recipe) -> list[Configuration]:
    """From the fastest down, each with clearly less memory than the one before; offload last."""
    chosen: list[Configuration] = []
    for offloads in (False, True):
        left = [one for one in found if one.offloads == offloads]
        while len(chosen) < SHOWN:
            if chosen:
                limit = LESS_MEMORY * chosen[-1].plan.tensors
                left = [one for one in left if one.plan.tensors <= limit]
            if not left:
                break
            chosen.append(_simplest_of_the_fastest(left, written))
    return chosen


def _beaten(one: Configuration, rows: Sequence[Configuration]) -> bool:
    """Whether another one needs less memory and is faster."""
    needed, seconds = one.plan.needed, one.seconds.total
    return any(row.plan.needed < needed and row.seconds.total < seconds for row in rows)
