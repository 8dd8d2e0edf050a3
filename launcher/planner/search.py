"""What else a recipe could be: every way to spread it, the few that are worth a look, the fastest that fits.

The arithmetic ranks all ways; only what is shown is traced. Nothing here changes what is learned but the offer of mixed
precision to a float32 recipe, and that is marked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.data.synthetic import rows_of
from launcher.errors import RecipeError
from launcher.planner.components import StepMemory
from launcher.planner.estimate import ModelProfile, compute_dtype, micro_batches_of, step_memory
from launcher.planner.footprint import profile_model
from launcher.planner.machine import Machine
from launcher.planner.plan import Plan
from launcher.planner.speed import StepTime, step_seconds, tokens_per_step
from launcher.recipe.schema import ActivationCheckpointing, CpuOffload, Lora, MixedPrecision, Recipe, Strategy

PlanOf = Callable[[Recipe, Machine], Plan]

LIKE = 0.02
"""Two ways whose speeds differ by less count as equally fast: the simpler one is taken."""
STEP = 0.8
"""The next rung needs at most so much of the memory of the one before."""
RUNGS = 7
TRIES = 4
"""Traces that the search for what fits may cost."""
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""That are tried where nothing fits."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way to run the recipe."""

    overrides: tuple[str, ...]
    """To paste after recipe=...; none: as it is written."""
    recipe: Recipe
    plan: Plan
    seconds: StepTime
    tokens_per_second: float
    """All ranks, predicted."""
    changes_numerics: bool = False
    """Mixed precision in the place of float32."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The ways worth a look."""

    asked: Rung
    """The recipe as written."""
    rungs: tuple[Rung, ...]
    """The fastest first; each needs clearly less memory than the one before. Where nothing fits: the most frugal."""
    best: Rung | None
    """The fastest that fits, traced; None where nothing does, or where no memory is known."""
    considered: int
    remedies: tuple[str, ...]
    """What would help where nothing fits, in words and overrides."""


@dataclass(frozen=True, kw_only=True)
class _Way:
    """A candidate, by arithmetic."""

    recipe: Recipe
    memory: StepMemory
    seconds: StepTime
    peak: int
    simplicity: tuple[int, ...]
    """Lower is tried earlier in practice."""


def make_ladder(recipe: Recipe, machine: Machine, *, plan_of: PlanOf, traced: int = 4) -> Ladder:
    """Ranks all ways by arithmetic, and traces the fastest that fits and the next `traced` - 1 rungs.

    plan_of: the traced plan of a recipe; some seconds each. Raises RecipeError as `prepare_model`.
    """
    written = _concrete(recipe)
    profile = profile_model(written, device=machine.device)
    plan = plan_of(written, machine)
    search = _Search(profile, written, machine, plan, plan_of)
    ways = list(_ways(profile, written, machine, strategies=True, micro_batches=True, precisions=True))
    best = search.fastest(ways)
    chosen = _few([way for way in ways if search.may_fit(way)]) if best is not None or machine.memory is None else []
    if not chosen:  # nothing fits: what comes nearest
        chosen = sorted(ways, key=lambda way: (way.peak, way.seconds.total))[:1]
    rungs = [search.rung(way, trace=index < traced) for index, way in enumerate(chosen)]
    if best is not None and all(rung.recipe != best.recipe for rung in rungs):
        rungs.append(best)
    rungs = _undominated([best if best is not None and rung.recipe == best.recipe else rung for rung in rungs], keep=best)
    asked = search.rung_of(written, plan)
    remedies: tuple[str, ...] = ()
    if best is None and machine.memory is not None:
        remedies = tuple(_remedies(search, written, machine))
    return Ladder(asked=asked, rungs=tuple(rungs), best=best, considered=len(ways), remedies=remedies)


def fastest_that_fits(recipe: Recipe, machine: Machine, *, plan_of: PlanOf, limit_micro_batch: int | None = None) -> Rung | None:
    """What `auto` stands for: the fastest way that fits, traced; None where nothing does.

    Only what is `auto` varies: with strategy.kind the strategy and the checkpointing, with batch.micro_batch_size that.
    limit_micro_batch: no more sequences than this.
    """
    written = _concrete(recipe)
    profile = profile_model(written, device=machine.device)
    ways = [
        way
        for way in _ways(
            profile,
            written,
            machine,
            strategies=recipe.strategy.kind == "auto",
            micro_batches=not isinstance(recipe.batch.micro_batch_size, int) and recipe.batch.micro_batch_tokens is None,
            precisions=False,
        )
        if limit_micro_batch is None or rows_of(way.recipe.batch, sequence_length=recipe.data.sequence_length) <= limit_micro_batch
    ]
    if not ways:
        return None
    search = _Search(profile, recipe, machine, None, plan_of)
    return search.fastest(ways)


def _concrete(recipe: Recipe) -> Recipe:
    """`auto` as what it is by default: fsdp, one sequence."""
    strategy, batch = recipe.strategy, recipe.batch
    if strategy.kind == "auto":
        strategy = dataclasses.replace(strategy, kind="fsdp")
    if not isinstance(batch.micro_batch_size, int) and batch.micro_batch_tokens is None:
        batch = dataclasses.replace(batch, micro_batch_size=1)
    return dataclasses.replace(recipe, strategy=strategy, batch=batch)


class _Search:
    """Asks for traced plans, and learns from them how far to trust the arithmetic."""

    def __init__(self, profile: ModelProfile, written: Recipe, machine: Machine, plan: Plan | None, plan_of: PlanOf) -> None:
        self.profile, self.written, self.machine = profile, written, machine
        self._plan_of = plan_of
        self._plans: list[tuple[Recipe, Plan]] = []
        self._scales: dict[tuple[str, str], float] = {}
        """How many times the arithmetic's tensors a trace found, by strategy and checkpointing."""
        self._known: Plan | None = None
        if plan is not None:
            self._learn(written, plan)

    def _learn(self, recipe: Recipe, plan: Plan) -> None:
        self._plans.append((recipe, plan))
        self._known = plan if self._known is None else self._known

    def plan(self, recipe: Recipe) -> Plan:
        """Traced, once."""
        for known, plan in self._plans:
            if known == recipe:
                return plan
        plan = self._plan_of(recipe, self.machine)
        self._learn(recipe, plan)
        return plan

    def estimate(self, way: _Way, *, staged: float = 1.0) -> Plan | None:
        """Without a trace: what comes beside tensors as in the plan of the recipe as written. staged: a rank's part of a
        checkpoint, to that recipe's."""
        known = self._known
        if known is None:
            return None
        tensors = known.step.peak.components.total
        ratio = known.margin / tensors if tensors else 0.0
        offload = way.memory.host * self.machine.gpus_per_node
        host = dataclasses.replace(known.host, offload=offload, staging=round(known.host.staging * staged))
        if self.machine.device == "cpu":  # the ranks' tensors are host memory
            host = dataclasses.replace(host, processes=host.processes + (way.peak - tensors) * self.machine.gpus_per_node)
        return dataclasses.replace(
            known,
            step=way.memory,
            arithmetic=None,
            margin=round(ratio * way.peak),
            host=host,
        )

    def may_fit(self, way: _Way, *, staged: float = 1.0) -> bool:
        """By arithmetic, corrected by the traces so far. Without a known memory everything may."""
        estimate = self.estimate(way, staged=staged)
        tensors = way.peak * self._scales.get(_sort(way.recipe), 1.0)
        memory, host = self.machine.memory, self.machine.host_memory
        if estimate is None:
            fits = memory is None or tensors <= 0.95 * memory
            return fits and (host is None or way.memory.host * self.machine.gpus_per_node <= host)
        if memory is not None and estimate.context + estimate.margin + tensors > memory:
            return False
        return host is None or estimate.host.total <= host

    def fastest(self, ways: Sequence[_Way]) -> Rung | None:
        """The fastest whose traced plan fits; with CPU offload only where nothing does without."""
        if self.machine.memory is None and self.machine.host_memory is None:
            return None
        without = [way for way in ways if way.recipe.strategy.cpu_offload is None]
        with_offload = [way for way in ways if way.recipe.strategy.cpu_offload is not None]
        return self._fastest(without) or self._fastest(with_offload)

    def _fastest(self, ways: Sequence[_Way]) -> Rung | None:
        left = list(ways)
        for _ in range(TRIES):
            left = [way for way in left if self.may_fit(way)]
            way = _simplest_of_the_fastest(left)
            if way is None:
                return None
            plan = self.plan(way.recipe)
            if plan.fits:
                return self.rung(way, trace=True)
            left.remove(way)
            sort, found = _sort(way.recipe), plan.step.peak.components.total / max(1, way.peak)
            self._scales[sort] = max(self._scales.get(sort, 1.0), found)
        left = [way for way in left if self.may_fit(way)]  # the arithmetic misses something: then the most frugal
        frugal = min(left, key=lambda way: way.peak, default=None)
        if frugal is not None and self.plan(frugal.recipe).fits:
            return self.rung(frugal, trace=True)
        return None

    def rung(self, way: _Way, *, trace: bool) -> Rung:
        """With its plan: traced, or the arithmetic's."""
        estimate = None if trace else self.estimate(way)
        return self.rung_of(way.recipe, self.plan(way.recipe) if estimate is None else estimate)

    def rung_of(self, recipe: Recipe, plan: Plan) -> Rung:
        """A rung of any recipe that the profile covers."""
        seconds = step_seconds(self.profile, recipe, self.machine)
        return Rung(
            overrides=overrides_between(self.written, recipe),
            recipe=recipe,
            plan=plan,
            seconds=seconds,
            tokens_per_second=tokens_per_step(recipe) / seconds.total,
            changes_numerics=compute_dtype(recipe.strategy) != compute_dtype(self.written.strategy),
        )


def _sort(recipe: Recipe) -> tuple[str, str]:
    """What the arithmetic may be wrong about alike."""
    checkpointing = recipe.activation_checkpointing
    return recipe.strategy.kind, "none" if checkpointing is None else checkpointing.mode


def _ways(
    profile: ModelProfile, written: Recipe, machine: Machine, *, strategies: bool, micro_batches: bool, precisions: bool
) -> Iterator[_Way]:
    """All combinations that do something, each once, with memory and seconds by arithmetic."""
    seen: set[tuple[Any, ...]] = set()
    for batch in list(_batches(written, machine)) if micro_batches else [written.batch]:
        sized = dataclasses.replace(written, batch=batch)
        accumulates = micro_batches_of(sized, ranks=machine.ranks) > 1
        if strategies:
            pairs = _pairs(written, machine, accumulates=accumulates, precisions=precisions)
        else:
            pairs = _as_written(written, accumulates=accumulates)
        for strategy, checkpointing in pairs:
            key = (batch, strategy, checkpointing)
            if key in seen:
                continue
            seen.add(key)
            recipe = dataclasses.replace(sized, strategy=strategy, activation_checkpointing=checkpointing)
            memory = step_memory(profile, recipe, ranks=machine.ranks, drawn=False)
            yield _Way(
                recipe=recipe,
                memory=memory,
                seconds=step_seconds(profile, recipe, machine),
                peak=memory.peak.components.total,
                simplicity=_simplicity(recipe, written),
            )


def _as_written(written: Recipe, *, accumulates: bool) -> Iterator[tuple[Strategy, ActivationCheckpointing | None]]:
    """As written; with CPU offload also with one reduction a step, where `auto` leaves that open."""
    strategy, checkpointing = written.strategy, written.activation_checkpointing
    yield strategy, checkpointing
    if strategy.cpu_offload is not None and accumulates and strategy.sync_every_micro_batch == "auto":
        yield dataclasses.replace(strategy, sync_every_micro_batch=False), checkpointing


def _batches(written: Recipe, machine: Machine) -> Iterator[Any]:
    """The same global batch in micro-batches of other sizes."""
    batch, length = written.batch, written.data.sequence_length
    yield batch
    if batch.micro_batch_tokens is not None:
        tokens = batch.micro_batch_tokens
        while tokens // 2 >= length:
            tokens //= 2
            yield dataclasses.replace(batch, micro_batch_tokens=tokens)
        for larger in (2, 4, 8):
            tokens = batch.micro_batch_tokens * larger
            if tokens // length * machine.ranks <= batch.global_batch_size:
                yield dataclasses.replace(batch, micro_batch_tokens=tokens)
        return
    share, rest = divmod(batch.global_batch_size, machine.ranks)
    for size in range(1, share + 1):
        if not rest and share % size == 0 and size <= 512:
            yield dataclasses.replace(batch, micro_batch_size=size)


def _pairs(
    written: Recipe, machine: Machine, *, accumulates: bool, precisions: bool
) -> Iterator[tuple[Strategy, ActivationCheckpointing | None]]:
    """Strategies and checkpointing."""
    yield written.strategy, written.activation_checkpointing
    on_gpu = machine.device == "cuda"
    mixed = [written.strategy.mixed_precision]
    if precisions and on_gpu and compute_dtype(written.strategy) == "float32":
        mixed.append(MixedPrecision())
    plain: list[ActivationCheckpointing | None] = [None]
    plain += [ActivationCheckpointing(mode="selective"), ActivationCheckpointing(mode="full")]
    if written.activation_checkpointing is not None:
        plain.append(written.activation_checkpointing)
    to_host = [ActivationCheckpointing(mode="full", offload_to_cpu=True)] if on_gpu else []
    for precision in mixed:
        wide = None if precision is None else dataclasses.replace(precision, reduce_dtype="float32")
        for sync in ("auto", True) if accumulates else ("auto",):
            for checkpointing in (*plain, *to_host):
                yield Strategy(kind="ddp", mixed_precision=wide, sync_every_micro_batch=sync), checkpointing
        for replicate in _replicates(written, machine):
            for keeps_forward, keeps_backward, sync in _reshardings(accumulates=accumulates):
                strategy = Strategy(
                    kind="fsdp",
                    mixed_precision=precision,
                    reshard_after_forward=not keeps_forward,
                    reshard_after_backward=not keeps_backward,
                    replicate=replicate,
                    sync_every_micro_batch="auto" if sync else False,
                )
                for checkpointing in (*plain, *to_host):
                    yield strategy, checkpointing
                if on_gpu and not keeps_forward and replicate in (1, written.strategy.replicate):
                    offload = written.strategy.cpu_offload or CpuOffload()
                    for checkpointing in (*plain[1:], *to_host):
                        yield dataclasses.replace(strategy, cpu_offload=offload), checkpointing


def _reshardings(*, accumulates: bool) -> Iterator[tuple[bool, bool, bool]]:
    """Kept after forward, kept after backward, reduced each time. Without accumulation the last two do nothing."""
    for keeps_forward in (False, True):
        yield keeps_forward, False, True
        if accumulates:
            yield keeps_forward, True, True
            yield keeps_forward, False, False
            yield keeps_forward, True, False


def _replicates(written: Recipe, machine: Machine) -> list[int]:
    """1, as written, and those that shard inside of a node."""
    inside = [machine.ranks // shards for shards in range(2, machine.gpus_per_node + 1) if machine.gpus_per_node % shards == 0]
    wanted = [written.strategy.replicate, *inside]
    return sorted({1, *(n for n in wanted if machine.ranks % n == 0)})


def _simplicity(recipe: Recipe, written: Recipe) -> tuple[int, ...]:
    """Practice's order, the last resort first in the comparison: CPU offload, activations in host memory, whatever keeps
    more or reduces less, sharding, checkpointing, and what differs from the recipe as written."""
    strategy, checkpointing = recipe.strategy, recipe.activation_checkpointing
    again = 0 if checkpointing is None else 1 if checkpointing.mode == "selective" else 2
    unusual = (strategy.replicate > 1) + (not strategy.reshard_after_forward) + (not strategy.reshard_after_backward)
    unusual += strategy.sync_every_micro_batch is (strategy.kind == "ddp")
    return (
        int(strategy.cpu_offload is not None),
        int(checkpointing is not None and checkpointing.offload_to_cpu),
        unusual,
        int(compute_dtype(strategy) != compute_dtype(written.strategy)),
        again,
        int(strategy.kind != "ddp"),
        len(overrides_between(written, recipe)),
    )


def _simplest_of_the_fastest(ways: Sequence[_Way]) -> _Way | None:
    fastest = min((way.seconds.total for way in ways), default=0.0)
    like = [way for way in ways if way.seconds.total <= fastest * (1 + LIKE)]
    return min(like, key=lambda way: (way.simplicity, way.seconds.total, way.peak), default=None)


def _few(ways: Sequence[_Way]) -> list[_Way]:
    """From the fastest down: each of clearly less memory than the one before. CPU offload comes last."""
    chosen: list[_Way] = []
    for offloads in (False, True):
        left = [way for way in ways if (way.recipe.strategy.cpu_offload is not None) == offloads]
        while left and len(chosen) < RUNGS:
            least = chosen[-1].peak if chosen else None
            left = [way for way in left if least is None or way.peak <= STEP * least]
            way = _simplest_of_the_fastest(left)
            if way is not None:
                chosen.append(way)
    return chosen


def _undominated(rungs: list[Rung], *, keep: Rung | None) -> list[Rung]:
    """Without those that another one beats in memory and in speed; the fastest first."""
    kept = [
        rung
        for rung in rungs
        if rung is keep or not any(other.plan.needed < rung.plan.needed and other.seconds.total < rung.seconds.total for other in rungs)
    ]
    return sorted(kept, key=lambda rung: (rung.seconds.total, rung.plan.needed))


def overrides_between(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """What must stand after `recipe=...` to make one of the other, key by key."""
    return tuple(_overrides(before, after, ()))


def _overrides(before: Any, after: Any, path: tuple[str, ...]) -> Iterator[str]:
    if before == after:
        return
    if not dataclasses.is_dataclass(after) or isinstance(after, type):
        yield f"{'.'.join(path)}={_as_text(after)}"
        return
    names = [field.name for field in dataclasses.fields(after)]
    if before is None:  # a section that was off: what is not its default, or its first key
        default = type(after)()
        changed = [name for name in names if getattr(after, name) != getattr(default, name)] or names[:1]
        for name in changed:
            yield from _written_out(getattr(after, name), (*path, name))
        return
    for name in names:
        yield from _overrides(getattr(before, name), getattr(after, name), (*path, name))


def _written_out(value: Any, path: tuple[str, ...]) -> Iterator[str]:
    yield f"{'.'.join(path)}={_as_text(value)}"


def _as_text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _remedies(search: _Search, written: Recipe, machine: Machine) -> Iterator[str]:
    """What would help: by arithmetic, not traced."""
    memory = machine.memory
    assert memory is not None
    profile = search.profile
    frugal = list(_frugal(written, machine))

    def fitting(candidate: ModelProfile, recipes: Sequence[Recipe], on: Machine) -> Recipe | None:
        for recipe in recipes:
            step = step_memory(candidate, recipe, ranks=on.ranks, drawn=False)
            way = _Way(
                recipe=recipe, memory=step, seconds=step_seconds(candidate, recipe, on), peak=step.peak.components.total, simplicity=()
            )
            if search.may_fit(way, staged=candidate.trained / profile.trained * machine.ranks / on.ranks):
                return recipe
        return None

    alone = dataclasses.replace(machine, nodes=max(1, 2**20 // machine.gpus_per_node))
    at_least = min(step_memory(profile, recipe, ranks=alone.ranks, drawn=False).peak.components.total for recipe in frugal)
    hopeless = fitting(profile, frugal, alone) is None
    if not hopeless:
        for nodes in NODES:
            more = dataclasses.replace(machine, nodes=nodes)
            found = fitting(profile, frugal, more) if nodes > machine.nodes else None
            if found is None:
                continue
            batch = written.batch.global_batch_size
            yield (
                f"more GPUs: {more.ranks} of them (nodes={nodes} gpus_per_node={machine.gpus_per_node}), with "
                + " ".join(overrides_between(written, found))
                + (f"; batch.global_batch_size must then be a multiple of {more.ranks}, not {batch}" if batch % more.ranks else "")
            )
            break
        else:
            yield f"more GPUs: {NODES[-1] * machine.gpus_per_node} are not enough; pipeline parallelism, which this launcher does not have"
    length = written.data.sequence_length
    while length > 256:
        length //= 2
        shorter = dataclasses.replace(written, data=dataclasses.replace(written.data, sequence_length=length))
        try:
            found = fitting(profile_model(shorter, device=machine.device), list(_frugal(shorter, machine)), machine)
        except RecipeError:
            break
        if found is not None:
            yield f"shorter sequences: {' '.join(overrides_between(written, found))}"
            break
    if written.lora is None and written.model.freeze is None:
        adapted = dataclasses.replace(written, lora=Lora())
        try:
            found = fitting(profile_model(adapted, device=machine.device), list(_frugal(adapted, machine)), machine)
        except RecipeError:
            found = None
        if found is not None:
            yield f"adapters instead of all weights: {' '.join(overrides_between(written, found))}"
    if hopeless:
        step = min((step_memory(profile, r, ranks=alone.ranks, drawn=False) for r in frugal), key=lambda s: s.peak.components.total)
        parts = step.peak.components
        what = "the logits and their loss" if parts.logits > parts.total / 2 else "one block with its weights and activations"
        share = parts.logits if parts.logits > parts.total / 2 else parts.total
        yield (
            f"tensor parallelism, which this launcher does not have: on any number of GPUs {what} alone need {_gib(share)} of "
            f"{_gib(at_least)} a rank; or a GPU with more memory than {_gib(memory)}"
        )


def _frugal(written: Recipe, machine: Machine) -> Iterator[Recipe]:
    """The ways that need least memory, the faster first: one sequence at a time, all computed again, all sharded."""
    batch = written.batch
    if batch.micro_batch_tokens is not None:
        batch = dataclasses.replace(batch, micro_batch_tokens=written.data.sequence_length)
    else:
        batch = dataclasses.replace(batch, micro_batch_size=1)
    strategy = Strategy(kind="fsdp", mixed_precision=written.strategy.mixed_precision)
    on_gpu = machine.device == "cuda"
    for offload, to_host in ((False, False), (False, True), (True, False), (True, True)) if on_gpu else ((False, False),):
        yield dataclasses.replace(
            written,
            batch=batch,
            strategy=dataclasses.replace(strategy, cpu_offload=CpuOffload() if offload else None),
            activation_checkpointing=ActivationCheckpointing(mode="full", offload_to_cpu=to_host),
        )
