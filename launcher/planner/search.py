"""Searches for the fastest configuration that fits: estimates all, confirms some by a trace."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.data.batching import rows_of
from launcher.errors import RecipeError
from launcher.planner.candidates import (
    Configuration,
    complexity,
    overrides_between,
    smallest,
    variants,
)
from launcher.planner.machine import Machine
from launcher.planner.plan import estimated_plan, make_plan
from launcher.planner.profile import profile_model
from launcher.planner.speed import estimate_time
from launcher.recipe.schema import Lora, Recipe

EQUAL_SPEED = 0.02
"""Relative difference up to which speeds count as equal; of these, the simplest configuration is
chosen."""
LESS_MEMORY = 0.8
"""Each configuration shown needs at most this share of the memory of the one before."""
SHOWN = 7
TRACES = 5
"""Limit on the traces in the search for the fastest configuration; each takes some seconds."""
OPTIMISM = 0.95
"""Ratio of traced to estimated memory, assumed until a similar configuration has been traced."""
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of nodes that are tried where nothing fits."""
SHORTEST = 256
"""Tokens of the shortest sequence that is suggested."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Configurations worth showing."""

    written: Configuration
    configurations: tuple[Configuration, ...]
    """The fastest first, each with clearly less memory than the one before, and the recipe as
    written. Where nothing fits: the smallest."""
    best: Configuration | None
    """The fastest that fits, traced; None: nothing fits, or no memory is known."""
    evaluated: int
    suggestions: tuple[str, ...]
    """If nothing fits: changes that would help, as text with overrides."""


def search_configurations(recipe: Recipe, machine: Machine, *, traced: int = 4) -> SearchResult:
    """Estimates all configurations, and traces `traced` of those that are shown.

    Raises RecipeError as `prepare_model`.
    """
    recipe = concrete(recipe)
    search = _Search(recipe, machine)
    written = search.trace(search.estimate(recipe))
    found = [search.estimate(one) for one in variants(recipe, machine)]
    best = search.fastest(found)
    helps = best is None and machine.memory is not None
    shown = [] if helps else _shown([one for one in found if search.may_fit(one)], recipe)
    if not shown:
        shown = [min(found, key=lambda one: (one.plan.tensors, one.seconds.total))]
    rows = [search.trace(one) if n < traced else one for n, one in enumerate(shown)]
    if best is not None:
        rows = [best, *(one for one in rows if one.recipe != best.recipe)]
    rows = [one for one in rows if one is best or not _beaten(one, rows)]
    if all(one.recipe != recipe for one in rows):
        rows.append(written)
    return SearchResult(
        written=written,
        configurations=tuple(sorted(rows, key=lambda one: (one.seconds.total, one.plan.needed))),
        best=best,
        evaluated=len(found),
        suggestions=tuple(suggestions(recipe, machine)) if helps else (),
    )


def fastest_that_fits(
    recipe: Recipe, machine: Machine, *, limit_micro_batch: int | None = None
) -> Configuration | None:
    """The configuration that replaces `auto`: the fastest that fits, traced; None if none fits.

    limit_micro_batch: the most sequences of a micro-batch.
    """
    search = _Search(recipe, machine)
    recipes = allowed(recipe, machine, limit_micro_batch=limit_micro_batch)
    return search.fastest([search.estimate(one) for one in recipes])


def allowed(recipe: Recipe, machine: Machine, *, limit_micro_batch: int | None) -> list[Recipe]:
    """Configurations that may replace `auto`: only what is `auto` varies, with strategy.kind also
    the checkpointing."""
    recipes = variants(
        concrete(recipe),
        machine,
        strategies=recipe.strategy.kind == "auto",
        micro_batches=recipe.batch.micro_batch_size == "auto",
        reshards=recipe.strategy.reshard_after_forward == "auto",
        precisions=False,
    )
    length, most = recipe.data.sequence_length, limit_micro_batch or math.inf
    return [one for one in recipes if rows_of(one.batch, sequence_length=length) <= most]


def fastest_of_each_kind(recipe: Recipe, machine: Machine, *, most: int) -> list[Configuration]:
    """Configurations to measure, which fit by trace: the recipe as written, then the fastest of
    each strategy, resharding and checkpointing, the fastest first and CPU offload last."""
    recipe = concrete(recipe)
    search = _Search(recipe, machine)
    kinds: dict[Any, list[Configuration]] = {}
    for one in map(search.estimate, variants(recipe, machine, precisions=False)):
        strategy, checkpointing = one.recipe.strategy, one.recipe.activation_checkpointing
        kind = (one.offloads, strategy.kind, strategy.reshard_after_forward, checkpointing)
        kinds.setdefault(kind, []).append(one)
    written = search.trace(search.estimate(recipe))
    found = [] if written.plan.fits is False else [written]

    def cost(group: list[Configuration]) -> tuple[bool, float]:
        return min((one.offloads, one.seconds.total) for one in group)

    for group in sorted(kinds.values(), key=cost):
        if len(found) >= most:
            break
        fits = search.fastest(group)
        if fits is not None and all(fits.recipe != one.recipe for one in found):
            found.append(fits)
    return found


def concrete(recipe: Recipe) -> Recipe:
    """With the default in place of `auto`: fsdp, one sequence, resharding."""
    strategy, batch = recipe.strategy, recipe.batch
    if strategy.reshard_after_forward == "auto":
        strategy = dataclasses.replace(strategy, reshard_after_forward=True)
    if strategy.kind == "auto":
        strategy = dataclasses.replace(strategy, kind="fsdp")
    if batch.micro_batch_size == "auto":
        batch = dataclasses.replace(batch, micro_batch_size=1)
    return dataclasses.replace(recipe, strategy=strategy, batch=batch)


class _Search:
    """Estimates and traces configurations; traces correct the estimates of similar ones."""

    def __init__(self, written: Recipe, machine: Machine) -> None:
        self._written, self._machine = written, machine
        self._profile = profile_model(concrete(written), device=machine.device)
        self._scales: dict[tuple[str, str | None], float] = {}
        """Ratio of traced to estimated bytes of tensors, by strategy and checkpointing."""

    def estimate(self, recipe: Recipe) -> Configuration:
        return Configuration(
            recipe=recipe,
            plan=estimated_plan(self._profile, recipe, self._machine),
            seconds=estimate_time(self._profile, recipe, self._machine),
            overrides=overrides_between(self._written, recipe),
        )

    def trace(self, one: Configuration) -> Configuration:
        plan = make_plan(one.recipe, self._machine)
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
    """A key that is equal for recipes whose estimates have similar errors."""
    checkpointing = recipe.activation_checkpointing
    return recipe.strategy.kind, None if checkpointing is None else checkpointing.mode


def _simplest_of_the_fastest(group: Sequence[Configuration], written: Recipe) -> Configuration:
    limit = min(one.seconds.total for one in group) * (1 + EQUAL_SPEED)
    fast = [one for one in group if one.seconds.total <= limit]
    return min(
        fast, key=lambda one: (complexity(one, written), one.seconds.total, one.plan.tensors)
    )


def _shown(found: Sequence[Configuration], written: Recipe) -> list[Configuration]:
    """From the fastest down, each with clearly less memory; offload last."""
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


def _beaten(one: Configuration, rows: Iterable[Configuration]) -> bool:
    """Whether another configuration needs less memory and is faster."""
    needed, seconds = one.plan.needed, one.seconds.total
    return any(row.plan.needed < needed and row.seconds.total < seconds for row in rows)


# Where nothing fits


def suggestions(written: Recipe, machine: Machine) -> Iterator[str]:
    """Suggests more ranks, shorter sequences, or adapters, by the estimate."""
    yield _more_gpus(written, machine)
    length = written.data.sequence_length // 2
    while length >= SHORTEST:
        data = dataclasses.replace(written.data, sequence_length=length)
        if found := _fitting(dataclasses.replace(written, data=data), machine):
            yield f"shorter sequences: {_overrides(written, found)}"
            break
        length //= 2
    if written.lora is None and written.model.freeze is None:
        if found := _fitting(dataclasses.replace(written, lora=Lora()), machine):
            yield f"adapters instead of all weights: {_overrides(written, found)}"


def _overrides(written: Recipe, found: Recipe) -> str:
    return " ".join(overrides_between(written, found))


def _fitting(recipe: Recipe, machine: Machine) -> Recipe | None:
    """The fastest of the smallest configurations that fits; None if none fits."""
    try:
        profile = profile_model(recipe, device=machine.device)
    except RecipeError:  # such as sequences too short for the model
        return None
    recipes = smallest(recipe, machine)
    return next((one for one in recipes if estimated_plan(profile, one, machine).fits), None)


def _more_gpus(written: Recipe, machine: Machine) -> str:
    per_node, size = machine.gpus_per_node, written.batch.global_batch_size
    unit = "GPU" if machine.device == "cuda" else "CPU rank"
    for nodes in NODES:
        more = dataclasses.replace(machine, nodes=nodes)
        found = _fitting(written, more) if nodes > machine.nodes else None
        if found is not None:
            hardware = f"{more.ranks} of them (nodes={nodes} gpus_per_node={per_node})"
            text = f"more {unit}s: {hardware}, with {_overrides(written, found)}"
            if size % more.ranks:
                text += f"; batch.global_batch_size must be a multiple of {more.ranks}, not {size}"
            return text
    return f"a {unit} with more memory: {NODES[-1] * per_node} of these are not enough"
