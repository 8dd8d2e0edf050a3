"""The configurations worth a look, and the fastest that fits: estimated, confirmed by traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.data.synthetic import rows_of
from launcher.planner.candidates import (
    Candidate,
    candidate,
    candidates,
    complexity,
    overrides_between,
)
from launcher.planner.machine import Machine
from launcher.planner.memory import Plan
from launcher.planner.profile import profile_model
from launcher.planner.speed import StepTime, tokens_per_step
from launcher.planner.suggestions import suggestions
from launcher.recipe.schema import Recipe

PlanOf = Callable[[Recipe, Machine], Plan]

EQUAL_SPEED = 0.02
"""Configurations whose speeds differ by less count as equally fast: the simpler one is taken."""
LESS_MEMORY = 0.8
"""Each configuration shown needs at most this share of the memory of the one before."""
SHOWN = 7
TRACES = 5
"""Traces that the search for the fastest may take, some seconds each."""
OPTIMISM = 0.95
"""Traced over estimated memory that is assumed until a similar configuration was traced: one that
hardly fails to fit is worth a trace."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to run the recipe."""

    overrides: tuple[str, ...]
    """To add to the command; empty: as written."""
    recipe: Recipe
    plan: Plan
    seconds: StepTime
    tokens_per_second: float
    """Of all ranks, predicted."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The configurations worth a look."""

    asked: Configuration
    """The recipe as written."""
    configurations: tuple[Configuration, ...]
    """The fastest first, each with clearly less memory than the one before. Where nothing fits: the
    smallest."""
    best: Configuration | None
    """The fastest that fits, traced; None: nothing does, or no memory is known."""
    evaluated: int
    suggestions: tuple[str, ...]
    """What would help where nothing fits, in words and overrides."""

    def all(self) -> list[Configuration]:
        """With the recipe as written among them, the fastest first."""
        found = list(self.configurations)
        if not any(self.is_written(one) for one in found):
            found.append(self.asked)
        return sorted(found, key=lambda one: -one.tokens_per_second)

    def is_written(self, one: Configuration) -> bool:
        """Whether this is the recipe as written."""
        return not one.overrides or one.recipe == self.asked.recipe

    def is_best(self, one: Configuration) -> bool:
        """Whether this is the fastest that fits."""
        return self.best is not None and one.overrides == self.best.overrides


def make_ladder(recipe: Recipe, machine: Machine, *, plan_of: PlanOf, traced: int = 4) -> Ladder:
    """Estimates all configurations, and traces the fastest that fits and the next `traced` - 1.

    plan_of: traces a recipe. Raises RecipeError as `prepare_model`.
    """
    search = _Search(concrete(recipe), machine, plan_of)
    asked = search.configuration(candidate(search.profile, search.written, machine), trace=True)
    found = candidates(search.profile, search.written, machine)
    best = search.fastest(found)
    shown = []
    if best is not None or machine.memory is None:
        shown = _shown([one for one in found if search.may_fit(one)], search.written)
    if not shown:
        shown = [min(found, key=lambda one: (one.tensors, one.seconds.total))]
    rows = [search.configuration(one, trace=number < traced) for number, one in enumerate(shown)]
    if best is not None:
        rows = [best, *(one for one in rows if one.recipe != best.recipe)]
    helps: tuple[str, ...] = ()
    if best is None and machine.memory is not None:
        helps = tuple(suggestions(search.profile, search.written, machine))
    return Ladder(
        asked=asked,
        configurations=tuple(_undominated(rows, best)),
        best=best,
        evaluated=len(found),
        suggestions=helps,
    )


def fastest_that_fits(
    recipe: Recipe, machine: Machine, *, plan_of: PlanOf, limit_micro_batch: int | None = None
) -> Configuration | None:
    """What `auto` stands for: the fastest that fits, traced; None where nothing does.

    Only what is `auto` varies: with strategy.kind the strategy and the checkpointing, with
    batch.micro_batch_size that. limit_micro_batch: the most sequences of a micro-batch.
    """
    search = _Search(concrete(recipe), machine, plan_of)
    length, batch = recipe.data.sequence_length, recipe.batch
    found = candidates(
        search.profile,
        search.written,
        machine,
        strategies=recipe.strategy.kind == "auto",
        micro_batches=batch.micro_batch_size == "auto",
        precisions=False,
    )
    if limit_micro_batch is not None:
        rows = [rows_of(one.recipe.batch, sequence_length=length) for one in found]
        found = [one for one, n in zip(found, rows, strict=True) if n <= limit_micro_batch]
    search.written = recipe  # overrides change what was written
    return search.fastest(found)


def concrete(recipe: Recipe) -> Recipe:
    """With the default in place of `auto`: fsdp, one sequence."""
    strategy, batch = recipe.strategy, recipe.batch
    if strategy.kind == "auto":
        strategy = dataclasses.replace(strategy, kind="fsdp")
    if batch.micro_batch_size == "auto":
        batch = dataclasses.replace(batch, micro_batch_size=1)
    return dataclasses.replace(recipe, strategy=strategy, batch=batch)


class _Search:
    """Traces candidates, and corrects the estimates of those like them."""

    def __init__(self, written: Recipe, machine: Machine, plan_of: PlanOf) -> None:
        self.written, self.machine = written, machine
        self.profile = profile_model(written, device=machine.device)
        self._plan_of = plan_of
        self._plans: list[tuple[Recipe, Plan]] = []
        self._scales: dict[tuple[str, str | None], float] = {}
        """Traced over estimated bytes of tensors, by strategy and checkpointing."""

    def trace(self, one: Candidate) -> Plan:
        """The traced plan, once for each recipe."""
        for known, plan in self._plans:
            if known == one.recipe:
                return plan
        plan = self._plan_of(one.recipe, self.machine)
        self._plans.append((one.recipe, plan))
        scale = plan.step.peak.components.total / max(1, one.tensors)
        self._scales[_like(one.recipe)] = max(self._scales.get(_like(one.recipe), 0.0), scale)
        return plan

    def may_fit(self, one: Candidate) -> bool:
        """Whether the corrected estimate fits, where memory is known."""
        extra = (self._scales.get(_like(one.recipe), OPTIMISM) - 1) * one.tensors
        spare, host_spare = one.plan.spare, one.plan.host_spare
        return (spare is None or extra <= spare) and (host_spare is None or host_spare >= 0)

    def fastest(self, found: Sequence[Candidate]) -> Configuration | None:
        """The fastest whose traced plan fits; CPU offload only where nothing fits without."""
        if self.machine.memory is None and self.machine.host_memory is None:
            return None
        for offloads in (False, True):
            group = [c for c in found if (c.recipe.strategy.cpu_offload is not None) == offloads]
            for _ in range(TRACES):
                group = [one for one in group if self.may_fit(one)]
                if not group:
                    break
                one = _simplest_of_the_fastest(group, self.written)
                if self.trace(one).fits:
                    return self.configuration(one, trace=True)
                group.remove(one)
            # The estimates are wrong about this model: then the smallest
            group = [one for one in group if self.may_fit(one)]
            smallest = min(group, key=lambda one: one.tensors, default=None)
            if smallest is not None and self.trace(smallest).fits:
                return self.configuration(smallest, trace=True)
        return None

    def configuration(self, one: Candidate, *, trace: bool) -> Configuration:
        """With the traced plan, or the estimated one."""
        return Configuration(
            overrides=overrides_between(self.written, one.recipe),
            recipe=one.recipe,
            plan=self.trace(one) if trace else one.plan,
            seconds=one.seconds,
            tokens_per_second=tokens_per_step(one.recipe) / one.seconds.total,
        )


def _like(recipe: Recipe) -> tuple[str, str | None]:
    """Recipes for which the estimate is about equally wrong."""
    checkpointing = recipe.activation_checkpointing
    return recipe.strategy.kind, None if checkpointing is None else checkpointing.mode


def _simplest_of_the_fastest(group: Sequence[Candidate], written: Recipe) -> Candidate:
    limit = min(one.seconds.total for one in group) * (1 + EQUAL_SPEED)
    fast = [one for one in group if one.seconds.total <= limit]
    return min(fast, key=lambda c: (complexity(c.recipe, written), c.seconds.total, c.tensors))


def _shown(found: Sequence[Candidate], written: Recipe) -> list[Candidate]:
    """From the fastest down, each with clearly less memory than the one before; offload last."""
    chosen: list[Candidate] = []
    for offloads in (False, True):
        left = [c for c in found if (c.recipe.strategy.cpu_offload is not None) == offloads]
        while len(chosen) < SHOWN:
            least = chosen[-1].tensors if chosen else None
            left = [c for c in left if least is None or c.tensors <= LESS_MEMORY * least]
            if not left:
                break
            chosen.append(_simplest_of_the_fastest(left, written))
    return chosen


def _undominated(rows: Sequence[Configuration], keep: Configuration | None) -> list[Configuration]:
    """Without those that another one beats in memory and in speed; the fastest first."""

    def beaten(one: Configuration) -> bool:
        return any(
            other.plan.needed < one.plan.needed and other.seconds.total < one.seconds.total
            for other in rows
        )

    kept = [one for one in rows if one is keep or not beaten(one)]
    return sorted(kept, key=lambda one: (one.seconds.total, one.plan.needed))
