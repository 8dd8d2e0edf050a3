"""Searches for the fastest configuration that fits: estimates all, confirms some by a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.data.batching import rows_of
from launcher.distributed.rank_layout import layout_sizes
from launcher.errors import RecipeError
from launcher.planner.candidates import (
    PARALLEL_KEYS,
    Configuration,
    complexity,
    larger_sizes,
    smallest,
    variants,
)
from launcher.planner.machine import Machine
from launcher.planner.plan import estimated_plan, make_plan, trace_ahead
from launcher.planner.profile import ModelProfile, profile_model
from launcher.planner.recipe_values import has_reductions_to_choose
from launcher.planner.speed import estimate_time
from launcher.planner.stages import blocks_that_fit
from launcher.planner.work import Work
from launcher.recipe.rules import check
from launcher.recipe.schema import Lora, Recipe
from launcher.recipe.yaml_text import overrides_between

EQUAL_SPEED = 0.02
"""Relative difference of speeds: of configurations that differ by less, the simplest is chosen."""
LESS_MEMORY = 0.8
"""A slower configuration is shown only if it needs at most this share of the memory of the one
before it."""
SHOWN = 7
SLOW_NETWORK = 0.1
"""Share of a step's time that waits for communication, from which on stages of a pipeline are tried."""
TRACES = 5
"""Maximum number of traces in the search for the fastest configuration."""
OPTIMISM = 0.95
"""Traced relative to estimated memory, until a similar configuration has been traced."""
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of nodes to try where nothing fits."""
SHORTEST = 256
"""Tokens of the shortest sequence that is suggested."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Configurations worth showing."""

    written: Configuration
    configurations: tuple[Configuration, ...]
    """The fastest configurations that fit, each with clearly less memory than the one before, and
    the recipe as written. If nothing fits, the configurations that need the least memory."""
    best: Configuration | None
    """The fastest configuration that fits, traced; None if nothing fits or no memory is known."""
    evaluated: int
    suggestions: tuple[str, ...]
    """If nothing fits: changes that would help, as text with overrides."""


def search_configurations(
    recipe: Recipe, machine: Machine, *, traced: int = 4, keep_written: bool = False
) -> SearchResult:
    """Estimates all configurations, and traces `traced` of the configurations that are shown.

    keep_written: the recipe as written is the best one if it fits and no other is clearly faster.
    Raises RecipeError as `prepare_model`.
    """
    recipe = concrete(recipe, machine)
    search = _Search(recipe, machine)
    estimated = search.estimate(recipe)
    every = variants(recipe, machine, compiles=True, logits=True)
    evaluated = [search.with_stages_that_fit(search.estimate(variant)) for variant in every]
    evaluated_count = len(evaluated)
    search.trace_ahead([estimated, *search.likely(evaluated)[: traced + 1]])
    written = search.trace(estimated)
    best = search.fastest(evaluated)
    fitting = [] if best is None else [best]
    slow = best is not None and best.seconds.communication > SLOW_NETWORK * best.seconds.total
    if machine.memory is not None and (best is None or best.offloads or slow):
        groups = search.divided(only_across_nodes=best is not None and not best.offloads)
        evaluated_count += sum(map(len, groups))
        fitting += search.with_one_pipeline(search.fastest_of(groups))
        best = min(fitting, key=lambda c: c.seconds.total, default=None)
    # A search offloads nothing as long as something fits without; the recipe may know better
    if (
        best is not None
        and written.plan.has_room
        and written.seconds.total * (1 + EQUAL_SPEED) < best.seconds.total
    ):
        fitting, best = [written, *fitting], written
    if keep_written and best is not None and _as_good(written, best):
        fitting, best = [written], written
    nothing_fits = best is None and machine.memory is not None
    shown = [] if nothing_fits else _shown([c for c in evaluated if search.may_fit(c)], recipe)
    if not shown:
        shown = [min(evaluated, key=lambda c: (c.plan.tensors, c.seconds.total))]
    search.trace_ahead(shown[:traced])
    rows = [*map(search.trace, shown[:traced]), *shown[traced:]]
    rows = fitting + [row for row in rows if row.recipe not in [one.recipe for one in fitting]]
    rows = [row for row in rows if row in fitting or not _beaten(row, rows)]
    if best is not None and (option := search.reduced_in_bfloat16(best)) is not None:
        rows.append(option)
    if all(row.recipe != recipe for row in rows):
        rows.append(written)
    return SearchResult(
        written=written,
        configurations=tuple(sorted(rows, key=lambda row: (row.seconds.total, row.plan.needed))),
        best=best,
        evaluated=evaluated_count,
        suggestions=tuple(suggestions(recipe, machine)) if nothing_fits else (),
    )


def fastest_that_fits(
    recipe: Recipe, machine: Machine, *, limit_micro_batch: int | None = None
) -> Configuration | None:
    """The configuration that replaces `auto`: the fastest that fits, traced, with micro-batches of
    at most `limit_micro_batch` sequences; None if none fits."""
    search = _Search(recipe, machine)
    recipes = allowed(recipe, machine, limit_micro_batch=limit_micro_batch)
    return search.fastest([search.estimate(recipe) for recipe in recipes])


def allowed(recipe: Recipe, machine: Machine, *, limit_micro_batch: int | None) -> list[Recipe]:
    """Recipes that may replace `auto`: only what is `auto` varies, with strategy.kind also the
    checkpointing."""
    strategy, sharded = recipe.strategy, recipe.strategy.kind != "ddp"
    recipes = variants(
        concrete(recipe, machine),
        machine,
        strategies=strategy.kind == "auto",
        micro_batches=recipe.batch.micro_batch_size == "auto",
        reshards=sharded and strategy.reshard_after_forward == "auto",
        syncs=sharded and strategy.sync_every_micro_batch == "auto",
        precisions=False,
    )
    length, most = recipe.data.row_length, limit_micro_batch or math.inf
    return [r for r in recipes if rows_of(r.batch, row_length=length) <= most]


def fastest_of_each_kind(recipe: Recipe, machine: Machine, *, most: int) -> list[Configuration]:
    """Configurations to measure, which fit by trace: the recipe as written, then the fastest of
    each strategy, resharding and checkpointing, the fastest first and CPU offload last."""
    recipe = concrete(recipe, machine)
    search = _Search(recipe, machine)
    kinds: dict[Any, list[Configuration]] = {}
    for candidate in map(search.estimate, variants(recipe, machine, precisions=False)):
        strategy, checkpointing = (
            candidate.recipe.strategy,
            candidate.recipe.activation_checkpointing,
        )
        kind = (candidate.offloads, strategy.kind, strategy.reshard_after_forward, checkpointing)
        kinds.setdefault(kind, []).append(candidate)
    written = search.trace(search.estimate(recipe))
    chosen = [] if written.plan.fits is False else [written]

    def cost(group: list[Configuration]) -> tuple[bool, float]:
        return min((candidate.offloads, candidate.seconds.total) for candidate in group)

    for group in sorted(kinds.values(), key=cost):
        if len(chosen) >= most:
            break
        fits = search.fastest(group)
        if fits is not None and all(fits.recipe != other.recipe for other in chosen):
            chosen.append(fits)
    return chosen


def concrete(recipe: Recipe, machine: Machine) -> Recipe:
    """The recipe with the least memory in place of `auto`: fsdp, one sequence, resharding, and a
    reduction in each micro-batch."""
    strategy, batch = recipe.strategy, recipe.batch
    if strategy.kind == "auto":
        strategy = dataclasses.replace(strategy, kind="fsdp")
    fsdp = strategy.kind == "fsdp"
    if strategy.reshard_after_forward == "auto" and fsdp:
        strategy = dataclasses.replace(strategy, reshard_after_forward=True)
    if batch.micro_batch_size == "auto":
        batch = dataclasses.replace(batch, micro_batch_size=1)
    recipe = dataclasses.replace(recipe, strategy=strategy, batch=batch)
    accumulates = has_reductions_to_choose(recipe, ranks=machine.ranks)
    if strategy.sync_every_micro_batch == "auto" and accumulates:
        strategy = dataclasses.replace(strategy, sync_every_micro_batch=fsdp)
    return dataclasses.replace(recipe, strategy=strategy)


class _Search:
    """Estimates and traces configurations; traces correct the estimates of similar ones."""

    def __init__(self, written: Recipe, machine: Machine) -> None:
        self._written, self._machine = written, machine
        self._profile = profile_model(concrete(written, machine), device=machine.device)
        self._scales: dict[tuple[object, ...], float] = {}
        """Ratio of traced to estimated bytes of tensors, by `_like`."""

    def estimate(self, recipe: Recipe) -> Configuration:
        """A configuration with its estimated memory and time."""
        work = Work(self._profile_of(recipe), recipe, ranks=self._machine.ranks)
        return Configuration(
            recipe=recipe,
            plan=estimated_plan(work, self._machine),
            seconds=estimate_time(work, self._machine),
            overrides=overrides_between(self._written, recipe),
        )

    def _profile_of(self, recipe: Recipe) -> ModelProfile:
        if recipe.strategy.tensor_parallel_size != self._written.strategy.tensor_parallel_size:
            return profile_model(recipe, device=self._machine.device)
        return self._profile

    def trace(self, estimated: Configuration, *, stages: bool = True) -> Configuration:
        """The configuration with a traced plan. stages: see `make_plan`."""
        plan = make_plan(estimated.recipe, self._machine, stages=stages)
        key, scale = _like(estimated.recipe), plan.tensors / max(1, estimated.plan.tensors)
        self._scales[key] = max(self._scales.get(key, 0.0), scale)
        return dataclasses.replace(estimated, plan=plan)

    def trace_ahead(self, configurations: Iterable[Configuration]) -> None:
        """Traces these configurations at the same time, so that `trace` finds the results."""
        trace_ahead([configuration.recipe for configuration in configurations], self._machine)

    def likely(self, candidates: Sequence[Configuration]) -> list[Configuration]:
        """What a search will trace if the estimates are right: the fastest that fits, then the
        configurations that are shown."""
        plain = [c for c in candidates if not c.offloads and self.may_fit(c, with_room=True)]
        fastest = [_simplest_of_the_fastest(plain, self._written)] if plain else []
        shown = _shown([c for c in candidates if self.may_fit(c)], self._written)
        return fastest + shown

    def may_fit(self, estimated: Configuration, *, with_room: bool = False) -> bool:
        """Whether the corrected estimate fits the memory, if its size is known. With `with_room`,
        the room for the allocator must fit, too."""
        plan = estimated.plan
        extra = (self._scales.get(_like(estimated.recipe), OPTIMISM) - 1) * plan.tensors
        extra += plan.room if with_room else 0
        host_fits = plan.host_spare is None or plan.host_spare >= 0
        return host_fits and (plan.spare is None or extra <= plan.spare)

    def fastest(self, candidates: Sequence[Configuration]) -> Configuration | None:
        """The fastest configuration whose traced plan fits: with room for the allocator if any such
        plan fits, and with CPU offload only if nothing fits without it."""
        if self._machine.memory is None and self._machine.host_memory is None:
            return None
        for offloads, with_room in itertools.product((False, True), (True, False)):
            group = [candidate for candidate in candidates if candidate.offloads == offloads]
            for attempt in range(TRACES + 1):
                group = [c for c in group if self.may_fit(c, with_room=with_room)]
                if not group:
                    break
                chosen = _simplest_of_the_fastest(group, self._written)
                if attempt == TRACES:  # the estimates are wrong about this model
                    chosen = min(group, key=lambda candidate: candidate.plan.tensors)
                staged = self._written.strategy.pipeline_parallel_size > 1
                traced = self.trace(chosen, stages=staged)
                if traced.plan.has_room if with_room else traced.plan.fits:
                    return traced
                group.remove(chosen)
        return None

    def reduced_in_bfloat16(self, best: Configuration) -> Configuration | None:
        """The configuration with gradients reduced in bfloat16, if it is clearly faster. It is shown
        as an option, and never chosen: the gradients are less exact."""
        strategy = best.recipe.strategy
        mixed = strategy.mixed_precision
        if mixed is None or strategy.kind != "fsdp" or mixed.reduce_dtype != "float32":
            return None
        mixed = dataclasses.replace(mixed, reduce_dtype="bfloat16")
        strategy = dataclasses.replace(strategy, mixed_precision=mixed)
        option = self.estimate(dataclasses.replace(best.recipe, strategy=strategy))
        faster = option.seconds.total * (1 + EQUAL_SPEED) < best.seconds.total
        return self.trace(option) if faster else None

    def divided(self, *, only_across_nodes: bool = False) -> list[list[Configuration]]:
        """For each dimension estimates of the configurations without CPU offload, for one size: the
        smallest with which a configuration fits with room, or else the smallest with which one fits.
        Across nodes for each size. only_across_nodes: leaves out the other dimensions."""
        found = []
        for dimension, recipes in larger_sizes(self._written, self._machine):
            if dimension.across_nodes:
                found += [self._without_offload(recipe) for recipe in recipes]
            if dimension.across_nodes or only_across_nodes:
                continue
            for with_room, recipe in itertools.product((True, False), recipes):
                few = [r for r in smallest(recipe, self._machine) if not r.strategy.cpu_offload]
                with contextlib.suppress(RecipeError):  # the model's layers cannot be divided
                    if any(self.may_fit(self.estimate(r), with_room=with_room) for r in few):
                        found.append(self._without_offload(recipe))
                        break
        return found

    def _without_offload(self, recipe: Recipe) -> list[Configuration]:
        """Estimates of the configurations of a recipe without CPU offload; none if the model cannot be
        divided so."""
        every = variants(
            concrete(recipe, self._machine),
            self._machine,
            precisions=False,
            # Many small micro-batches keep the stages of a pipeline busy
            micro_batches=recipe.strategy.pipeline_parallel_size == 1,
        )
        plain = [each for each in every if each.strategy.cpu_offload is None]
        try:
            return [self.with_stages_that_fit(self.estimate(each)) for each in plain]
        except RecipeError:
            return []

    def with_stages_that_fit(self, estimated: Configuration) -> Configuration:
        """A configuration, with other numbers of blocks in its stages if only so each stage fits."""
        if estimated.recipe.strategy.pipeline_parallel_size == 1 or self.may_fit(estimated):
            return estimated
        work = Work(self._profile_of(estimated.recipe), estimated.recipe, ranks=self._machine.ranks)
        blocks = blocks_that_fit(work, self._machine)
        if blocks is None:
            return estimated
        strategy = dataclasses.replace(estimated.recipe.strategy, pipeline_blocks=blocks)
        return self.estimate(dataclasses.replace(estimated.recipe, strategy=strategy))

    def with_one_pipeline(self, found: Sequence[Configuration]) -> list[Configuration]:
        """The configurations, of those with stages of a pipeline only the fastest, which may become
        interleaved: there is one for each number of stages."""
        staged = [one for one in found if one.recipe.strategy.pipeline_parallel_size > 1]
        others = [one for one in found if one not in staged]
        if not staged:
            return others
        fastest = self.trace(min(staged, key=lambda one: one.seconds.total))
        strategy = dataclasses.replace(
            fastest.recipe.strategy, pipeline_schedule="interleaved_1f1b", pipeline_blocks=None
        )
        with contextlib.suppress(RecipeError):  # fewer blocks than stages
            interleaved = dataclasses.replace(fastest.recipe, strategy=strategy)
            option = self.trace(self.estimate(interleaved))
            if option.plan.fits and option.seconds.total < fastest.seconds.total:
                fastest = option
        return [*others, fastest] if fastest.plan.fits else others

    def fastest_of(self, groups: Iterable[Sequence[Configuration]]) -> list[Configuration]:
        """The fastest of each group, if it fits and the model supports it."""
        found = []
        self.trace_ahead(one for group in groups for one in self.likely(group)[:1])
        for group in groups:
            with contextlib.suppress(RecipeError):
                if (fastest := self.fastest(group)) is not None:
                    found.append(fastest)
        return found


def _like(recipe: Recipe) -> tuple[object, ...]:
    """A key that is the same for recipes whose estimates have similar errors."""
    strategy, checkpointing = recipe.strategy, recipe.activation_checkpointing
    mode = None if checkpointing is None else checkpointing.mode
    sizes = tuple(getattr(strategy, key) for key in PARALLEL_KEYS)
    return strategy.kind, mode, sizes


def _simplest_of_the_fastest(group: Sequence[Configuration], written: Recipe) -> Configuration:
    limit = min(c.seconds.total for c in group) * (1 + EQUAL_SPEED)
    fast = [c for c in group if c.seconds.total <= limit]
    return min(fast, key=lambda c: (complexity(c, written), c.seconds.total, c.plan.tensors))


def _as_good(written: Configuration, best: Configuration) -> bool:
    """Whether a configuration fits as well as the best one, and is about as fast."""
    fits = written.plan.has_room or (written.plan.fits and not best.plan.has_room)
    limit = best.seconds.total * (1 + EQUAL_SPEED)
    return bool(fits) and written.offloads <= best.offloads and written.seconds.total <= limit


def _shown(candidates: Sequence[Configuration], written: Recipe) -> list[Configuration]:
    """From the fastest down, each with clearly less memory; offload last."""
    chosen: list[Configuration] = []
    for offloads in (False, True):
        left = [c for c in candidates if c.offloads == offloads]
        while len(chosen) < SHOWN:
            if chosen:
                limit = LESS_MEMORY * chosen[-1].plan.tensors
                left = [c for c in left if c.plan.tensors <= limit]
            if not left:
                break
            chosen.append(_simplest_of_the_fastest(left, written))
    return chosen


def _beaten(row: Configuration, rows: Iterable[Configuration]) -> bool:
    """Whether another configuration needs less memory and is faster."""
    needed, seconds = row.plan.needed, row.seconds.total
    return any(other.plan.needed < needed and other.seconds.total < seconds for other in rows)


# Where nothing fits


def suggestions(written: Recipe, machine: Machine) -> Iterator[str]:
    """Suggests more ranks, shorter sequences, or adapters, by the estimate."""
    yield _more_gpus(written, machine)
    length = written.data.sequence_length // 2
    while length >= SHORTEST:
        data = dataclasses.replace(written.data, sequence_length=length)
        if shorter := smallest_that_fits(dataclasses.replace(written, data=data), machine):
            yield f"shorter sequences: {_overrides(written, shorter)}"
            break
        length //= 2
    if written.lora is None and written.model.freeze is None:
        if adapted := smallest_that_fits(dataclasses.replace(written, lora=Lora()), machine):
            yield f"adapters instead of all weights: {_overrides(written, adapted)}"
    elif written.lora is not None and written.lora.quantize is None:
        lora = dataclasses.replace(written.lora, quantize="nf4")
        model = dataclasses.replace(written.model, compile=False)  # not available with it
        recipe = dataclasses.replace(written, lora=lora, model=model)
        allowed = not check(recipe, ranks=machine.ranks, unsound=set(), files=False)
        if allowed and (quantized := smallest_that_fits(recipe, machine)):
            yield f"frozen weights in 4 bits: {_overrides(written, quantized)}"


def _overrides(written: Recipe, changed: Recipe) -> str:
    return " ".join(overrides_between(written, changed))


def smallest_that_fits(recipe: Recipe, machine: Machine) -> Recipe | None:
    """The fastest of the smallest configurations that fits, by the estimate; None if none fits."""
    try:
        profile = profile_model(recipe, device=machine.device)
    except RecipeError:  # such as sequences too short for the model
        return None
    works = (Work(profile, each, ranks=machine.ranks) for each in smallest(recipe, machine))
    return next((work.recipe for work in works if estimated_plan(work, machine).fits), None)


def _more_gpus(written: Recipe, machine: Machine) -> str:
    per_node, size = machine.gpus_per_node, written.batch.global_batch_size
    unit = "GPU" if machine.device == "cuda" else "CPU rank"
    for nodes in NODES:
        more = dataclasses.replace(machine, nodes=nodes)
        fitting = smallest_that_fits(written, more) if nodes > machine.nodes else None
        if fitting is not None:
            hardware = f"{more.ranks} of them (nodes={nodes} gpus={per_node})"
            text = f"more {unit}s: {hardware}, with {_overrides(written, fitting)}"
            sizes = layout_sizes(written.strategy, ranks=more.ranks)
            if size % (groups := sizes.data_parallel_size):
                text += f"; batch.global_batch_size must be a multiple of {groups}, not {size}"
            return text
    return f"a {unit} with more memory: {NODES[-1] * per_node} of these are not enough"
