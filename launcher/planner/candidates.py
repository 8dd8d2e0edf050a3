"""All configurations that a recipe could run in, with estimates of memory and time.

None changes what is learned, except mixed precision, which is offered in place of float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.planner.estimate import micro_batches_of
from launcher.planner.machine import Machine
from launcher.planner.memory import Plan
from launcher.planner.plan import estimated_plan
from launcher.planner.profile import ModelProfile, compute_dtype
from launcher.planner.speed import StepTime, step_seconds, tokens_per_step
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    CpuOffload,
    MixedPrecision,
    Recipe,
    Strategy,
)

LARGEST_MICRO_BATCH = 512
Pair = tuple[Strategy, ActivationCheckpointing | None]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A variant of the recipe."""

    recipe: Recipe
    plan: Plan
    """Estimated, or traced."""
    seconds: StepTime
    """Of a step, predicted."""
    overrides: tuple[str, ...]
    """To add to the command; empty: as written."""

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks, predicted."""
        return tokens_per_step(self.recipe) / self.seconds.total

    @property
    def offloads(self) -> bool:
        """Whether parameters are in host memory."""
        return self.recipe.strategy.cpu_offload is not None


def estimated(
    profile: ModelProfile, recipe: Recipe, machine: Machine, *, written: Recipe
) -> Configuration:
    """The estimate of a recipe that the profile covers. written: where overrides start from."""
    return Configuration(
        recipe=recipe,
        plan=estimated_plan(profile, recipe, machine),
        seconds=step_seconds(profile, recipe, machine),
        overrides=overrides_between(written, recipe),
    )


def variants(
    written: Recipe,
    machine: Machine,
    *,
    strategies: bool = True,
    micro_batches: bool = True,
    precisions: bool = True,
) -> list[Recipe]:
    """All combinations that have an effect, each once. The flags say what may vary."""
    found: dict[Any, Recipe] = {}
    for batch in _batches(written, machine) if micro_batches else [written.batch]:
        sized = dataclasses.replace(written, batch=batch)
        accumulates = micro_batches_of(sized, ranks=machine.ranks) > 1
        pairs = _as_written(written, accumulates)
        if strategies:
            pairs = _pairs(written, machine, accumulates, precisions=precisions)
        for strategy, checkpointing in pairs:
            found[batch, strategy, checkpointing] = dataclasses.replace(
                sized, strategy=strategy, activation_checkpointing=checkpointing
            )
    return list(found.values())


def _as_written(written: Recipe, accumulates: bool) -> Iterator[Pair]:
    """With CPU offload also one reduction a step, where `auto` leaves that open."""
    strategy, checkpointing = written.strategy, written.activation_checkpointing
    yield strategy, checkpointing
    if strategy.cpu_offload and accumulates and strategy.sync_every_micro_batch == "auto":
        yield dataclasses.replace(strategy, sync_every_micro_batch=False), checkpointing


def _batches(written: Recipe, machine: Machine) -> Iterator[Batch]:
    """The same global batch in micro-batches of other sizes."""
    batch, length = written.batch, written.data.sequence_length
    yield batch
    if batch.micro_batch_tokens is not None:
        tokens = batch.micro_batch_tokens
        smaller = [tokens // 2**n for n in range(1, tokens.bit_length())]
        for size in (*smaller, 2 * tokens, 4 * tokens, 8 * tokens):
            larger = size > tokens and size // length * machine.ranks > batch.global_batch_size
            if size >= length and not larger:
                yield dataclasses.replace(batch, micro_batch_tokens=size)
        return
    share, rest = divmod(batch.global_batch_size, machine.ranks)
    for size in range(1, 1 if rest else min(share, LARGEST_MICRO_BATCH) + 1):
        if share % size == 0:
            yield dataclasses.replace(batch, micro_batch_size=size)


def _pairs(
    written: Recipe, machine: Machine, accumulates: bool, *, precisions: bool
) -> Iterator[Pair]:
    """Strategies with kinds of checkpointing."""
    yield written.strategy, written.activation_checkpointing
    on_gpu = machine.device == "cuda"
    mixed = [written.strategy.mixed_precision]
    if precisions and on_gpu and compute_dtype(written.strategy) == "float32":
        mixed.append(MixedPrecision())
    modes = [ActivationCheckpointing(mode="selective"), ActivationCheckpointing(mode="full")]
    if written.activation_checkpointing is not None:
        modes.append(written.activation_checkpointing)
    if on_gpu:
        modes.append(ActivationCheckpointing(mode="full", offload_to_cpu=True))
    for precision in mixed:
        wide = precision and dataclasses.replace(precision, reduce_dtype="float32")
        for sync in ("auto", True) if accumulates else ("auto",):
            ddp = Strategy(kind="ddp", mixed_precision=wide, sync_every_micro_batch=sync)
            yield from ((ddp, checkpointing) for checkpointing in (None, *modes))
        for strategy in _sharded(written, machine, precision, accumulates):
            yield from ((strategy, checkpointing) for checkpointing in (None, *modes))
            usual = strategy.replicate in (1, written.strategy.replicate)
            if on_gpu and usual and strategy.reshard_after_forward:
                offload = written.strategy.cpu_offload or CpuOffload()
                offloaded = dataclasses.replace(strategy, cpu_offload=offload)
                yield from ((offloaded, checkpointing) for checkpointing in modes)


def _sharded(
    written: Recipe, machine: Machine, precision: MixedPrecision | None, accumulates: bool
) -> Iterator[Strategy]:
    """FSDP: copies (shards inside of a node), resharding, and when gradients are reduced."""
    per_node = machine.gpus_per_node
    inside = {machine.ranks // n for n in range(2, per_node + 1) if per_node % n == 0}
    copies = {1, written.strategy.replicate, *inside}
    # Without accumulation the last two have no effect
    accumulated: list[tuple[bool, Any]] = [
        (True, "auto"), (False, "auto"), (True, False), (False, False)
    ]  # fmt: skip
    for replicate in sorted(n for n in copies if machine.ranks % n == 0):
        for reshard in (True, False):
            for reshard_backward, sync in accumulated if accumulates else accumulated[:1]:
                yield Strategy(
                    kind="fsdp",
                    mixed_precision=precision,
                    reshard_after_forward=reshard,
                    reshard_after_backward=reshard_backward,
                    replicate=replicate,
                    sync_every_micro_batch=sync,
                )


def complexity(one: Configuration, written: Recipe) -> tuple[int, ...]:
    """To compare configurations of equal speed, the last resort first: CPU offload, activations on
    the host, unusual settings, precision, checkpointing, sharding, number of changes."""
    strategy, checkpointing = one.recipe.strategy, one.recipe.activation_checkpointing
    unusual = (
        strategy.replicate > 1,
        not strategy.reshard_after_forward,
        not strategy.reshard_after_backward,
        strategy.sync_every_micro_batch is (strategy.kind == "ddp"),
    )
    return (
        int(one.offloads),
        int(checkpointing is not None and checkpointing.offload_to_cpu),
        sum(unusual),
        int(compute_dtype(strategy) != compute_dtype(written.strategy)),
        0 if checkpointing is None else 1 if checkpointing.mode == "selective" else 2,
        int(strategy.kind != "ddp"),
        len(one.overrides),
    )


def smallest(written: Recipe, machine: Machine) -> Iterator[Recipe]:
    """The configurations that need least memory, the faster first: one sequence at a time, all
    blocks recomputed, all sharded."""
    batch = dataclasses.replace(written.batch, micro_batch_size=1)
    if written.batch.micro_batch_tokens is not None:
        tokens = written.data.sequence_length
        batch = dataclasses.replace(written.batch, micro_batch_tokens=tokens)
    mixed, on_gpu = written.strategy.mixed_precision, machine.device == "cuda"
    for offload in (None, CpuOffload()) if on_gpu else (None,):
        for to_host in (False, True) if on_gpu else (False,):
            yield dataclasses.replace(
                written,
                batch=batch,
                strategy=Strategy(kind="fsdp", mixed_precision=mixed, cpu_offload=offload),
                activation_checkpointing=ActivationCheckpointing(offload_to_cpu=to_host),
            )


def overrides_between(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """What must follow `recipe=...` to change one into the other, key by key."""
    return tuple(_overrides(before, after, ""))


def _overrides(before: Any, after: Any, path: str) -> Iterator[str]:
    if before == after:
        return
    if not dataclasses.is_dataclass(after) or isinstance(after, type):
        text = "null" if after is None else str(after)
        yield f"{path}={text.lower() if isinstance(after, bool) else text}"
        return
    names = [field.name for field in dataclasses.fields(after)]
    if before is None:  # a section that was off: what is not its default, or its first key
        default = type(after)()
        names = [n for n in names if getattr(after, n) != getattr(default, n)] or names[:1]
    for name in names:
        key = f"{path}.{name}" if path else name
        yield from _overrides(getattr(before, name, _UNSET), getattr(after, name), key)


_UNSET = object()
