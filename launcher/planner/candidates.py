"""The candidate configurations of a recipe.

None of them changes the result of training, except mixed precision, which is offered in place of
float32.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from launcher.distributed.rank_layout import PARALLEL_SIZES, PIPELINE, Dimension, layout_sizes
from launcher.planner.machine import Machine
from launcher.planner.memory import Plan
from launcher.planner.recipe_values import has_reductions_to_choose, micro_batches_of
from launcher.planner.speed import RANGE, StepTime, tokens_per_step
from launcher.recipe.rules import check, excluded_by
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    CpuOffload,
    MixedPrecision,
    Recipe,
    Strategy,
)
from launcher.strategies.base import compute_dtype, offloads_parameters

LARGEST_MICRO_BATCH = 512
BUDGETS = (0.2, 0.4, 0.6, 0.8)
"""Shares of what blocks keep without checkpointing, between full checkpointing and none."""
PARALLEL_KEYS = tuple(each.key for each in PARALLEL_SIZES)
"""Keys of `strategy` for context, expert and tensor parallelism."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A recipe with its predicted memory and time."""

    recipe: Recipe
    plan: Plan
    """The memory plan of this configuration, estimated or traced."""
    seconds: StepTime
    """Predicted time of an optimizer step."""
    overrides: tuple[str, ...]
    """Overrides to add to the command; empty if this is the recipe as written."""

    @property
    def tokens_per_second(self) -> float:
        """Predicted throughput of all ranks together."""
        return tokens_per_step(self.recipe) / self.seconds.total

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """The lowest and the highest throughput to expect."""
        low, high = RANGE
        return low * self.tokens_per_second, high * self.tokens_per_second

    @property
    def hours(self) -> float:
        """Predicted duration of `run.max_steps` steps. With `run.epochs`, the number of samples is
        not known, so this is the duration of a billion tokens."""
        steps = self.recipe.run.max_steps
        seconds = steps * self.seconds.total if steps else 1e9 / self.tokens_per_second
        return seconds / 3600

    @property
    def speed_measured(self) -> bool:
        """Whether predicted speeds of such configurations were compared with published ones."""
        return all(getattr(self.recipe.strategy, key) == 1 for key in PARALLEL_KEYS)

    @property
    def offloads(self) -> bool:
        """Whether the optimizer state alone, or also parameters and gradients, are offloaded to
        host memory or files."""
        return self.recipe.strategy.cpu_offload is not None


def variants(
    written: Recipe,
    machine: Machine,
    *,
    strategies: bool = True,
    micro_batches: bool = True,
    reshards: bool = False,
    syncs: bool = False,
    precisions: bool = True,
    compiles: bool = False,
    logits: bool = False,
) -> list[Recipe]:
    """All combinations of settings that have an effect, each once.

    The flags select what may vary. `reshards` is resharding after the forward pass, and `syncs` the
    reduction in each micro-batch, for use without `strategies`, which varies them too. `logits`:
    kept logits may be computed again instead.
    """
    recipes: dict[Any, Recipe] = {}
    for batch in _batches(written, machine) if micro_batches else [written.batch]:
        sized = dataclasses.replace(written, batch=batch)
        accumulates = micro_batches_of(sized, ranks=machine.ranks) > 1
        own, both = written.strategy, (True, False)
        every: Any = [own.sync_every_micro_batch]
        if syncs:
            chooses = has_reductions_to_choose(sized, ranks=machine.ranks)
            every = both if chooses else ["auto"]
        after = both if reshards else (own.reshard_after_forward,)
        pairs = [
            (dataclasses.replace(own, sync_every_micro_batch=s, reshard_after_forward=r), c)
            for s, r, c in itertools.product(every, after, [written.activation_checkpointing])
        ]
        if strategies:
            pairs += _pairs(written, machine, accumulates, precisions=precisions)
        for strategy, checkpointing in pairs:
            strategy = _in_groups(strategy, written)
            recipe = dataclasses.replace(
                sized, strategy=strategy, activation_checkpointing=checkpointing
            )
            if strategy.kind != "ddp" or not excluded_by(recipe, "strategy.kind", "ddp"):
                recipes[batch, strategy, checkpointing] = recipe
    found = list(recipes.values())
    # Compiled already, or not available
    eager = written.model.compile or excluded_by(written, "model.compile", "true")
    if compiles and machine.device == "cuda" and not eager:
        compiled = dataclasses.replace(written.model, compile=True)
        found += [dataclasses.replace(recipe, model=compiled) for recipe in found]
    if logits and written.model.keeps_logits:
        found += [_without_logits(recipe) for recipe in found]
    return found


def _without_logits(recipe: Recipe) -> Recipe:
    """The recipe without logits that are kept."""
    if recipe.model.keep_logits is not True:
        return recipe
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, keep_logits=False))


def _in_groups(strategy: Strategy, written: Recipe) -> Strategy:
    """The strategy with the written `PARALLEL_KEYS` and stages, which `variants` does not vary."""
    keys = (*PARALLEL_KEYS, "pipeline_schedule", "pipeline_blocks")
    kept: Any = {key: getattr(written.strategy, key) for key in keys}
    return dataclasses.replace(strategy, **kept)


def larger_sizes(written: Recipe, machine: Machine) -> Iterator[tuple[Dimension, list[Recipe]]]:
    """For each dimension the recipes with larger sizes, the smallest size first: within a node, or as
    many as there are nodes. They are like the recipes of `smallest`, but without CPU offload. A list
    is empty if the rules for recipes allow no larger size."""
    for each in PARALLEL_SIZES:
        before, recipes = getattr(written.strategy, each.key), list[Recipe]()
        most = machine.nodes if each.across_nodes else machine.gpus_per_node
        sizes = [n for n in range(before + 1, most + 1) if most % n == 0]
        for size in sizes:
            changed: Any = {each.key: size}
            if each is PIPELINE:
                changed |= {"pipeline_schedule": "1f1b", "pipeline_blocks": None}
            strategy = dataclasses.replace(written.strategy, **changed)
            recipe = next(smallest(dataclasses.replace(written, strategy=strategy), machine))
            if excluded_by(recipe, "model.compile", "true"):
                model = dataclasses.replace(recipe.model, compile=False)
                recipe = dataclasses.replace(recipe, model=model)
            if not check(recipe, ranks=machine.ranks, unsound=set(), files=False):
                recipes.append(recipe)
        yield each, recipes


def _batches(written: Recipe, machine: Machine) -> Iterator[Batch]:
    """Divisions of the global batch into micro-batches; the recipe's own division first."""
    batch, length = written.batch, written.data.row_length
    ranks = layout_sizes(written.strategy, ranks=machine.ranks).data_parallel_size
    yield batch
    if batch.micro_batch_tokens is not None:
        tokens = batch.micro_batch_tokens
        most = max(tokens, (batch.global_batch_size // ranks + 1) * length - 1)
        smaller = [tokens // 2**n for n in range(1, tokens.bit_length())]
        for size in (*smaller, 2 * tokens, 4 * tokens, 8 * tokens):
            if length <= size <= most:
                yield dataclasses.replace(batch, micro_batch_tokens=size)
        return
    share, rest = divmod(batch.global_batch_size, ranks)
    for size in range(1, 1 if rest else min(share, LARGEST_MICRO_BATCH) + 1):
        if share % size == 0:
            yield dataclasses.replace(batch, micro_batch_size=size)


def _pairs(
    written: Recipe, machine: Machine, accumulates: bool, *, precisions: bool
) -> Iterator[tuple[Strategy, ActivationCheckpointing | None]]:
    """Pairs of a strategy and an activation checkpointing (None: no checkpointing)."""
    on_gpu = machine.device == "cuda"
    mixed = [written.strategy.mixed_precision]
    if precisions and on_gpu and compute_dtype(written.strategy) == torch.float32:
        mixed.append(MixedPrecision())
    modes = [ActivationCheckpointing(mode="selective"), ActivationCheckpointing(mode="full")]
    if written.activation_checkpointing is not None:
        modes.append(written.activation_checkpointing)
    if on_gpu:
        modes.append(ActivationCheckpointing(mode="full", offload_to_cpu=True))
        if written.strategy.pipeline_parallel_size == 1:
            modes += [ActivationCheckpointing(mode="selective", budget=b) for b in BUDGETS]
    for precision in mixed:
        for strategy in _strategies(written, machine, precision, accumulates):
            yield from ((strategy, checkpointing) for checkpointing in modes)
            if not offloads_parameters(strategy.cpu_offload):
                yield strategy, None


def _strategies(
    written: Recipe, machine: Machine, precision: MixedPrecision | None, accumulates: bool
) -> Iterator[Strategy]:
    """DDP, and FSDP with all settings of hybrid sharding, resharding and CPU offload."""
    wide = precision and dataclasses.replace(precision, reduce_dtype="float32")
    syncs: list[Any] = [False, True] if accumulates else ["auto"]
    offloads = {"all": CpuOffload()}
    # No other optimizer's state can be streamed
    if written.optimizer.name in ("adamw", "sgd", "lion"):
        offloads["optimizer"] = CpuOffload(what="optimizer")
    if written.strategy.cpu_offload is not None:
        offloads[written.strategy.cpu_offload.what] = written.strategy.cpu_offload
    if machine.ranks == 1:
        yield Strategy(kind="ddp", mixed_precision=wide)
        yield from _fsdp_on_one_rank(machine, precision, syncs, offloads)
        return
    for sync, zero in itertools.product(syncs, (False, True)):
        yield Strategy(
            kind="ddp", mixed_precision=wide, sync_every_micro_batch=sync, shard_optimizer=zero
        )
    per_node = machine.gpus_per_node
    ranks = machine.ranks // written.strategy.pipeline_parallel_size
    shards = [n for n in range(2, per_node + 1) if per_node % n == 0]
    # Several nodes: the way around a ring of all nodes takes long
    doubled = (per_node * 2**n for n in range(1, ranks.bit_length()))
    inside = {ranks // n for n in (*shards, *doubled) if n < ranks and ranks % n == 0}
    sizes = layout_sizes(written.strategy, ranks=machine.ranks)
    inside |= {1, written.strategy.replicate}
    copies = sorted(n for n in inside if sizes.allows_replicas(n))
    reshards = [True, False] if accumulates else [True]
    for replicate, forward, backward, sync in itertools.product(
        copies, (True, False), reshards, syncs
    ):
        sharded = Strategy(
            kind="fsdp",
            mixed_precision=precision,
            reshard_after_forward=forward,
            reshard_after_backward=backward,
            replicate=replicate,
            sync_every_micro_batch=sync,
        )
        yield sharded
        if machine.device == "cuda" and forward and replicate in (1, written.strategy.replicate):
            for offload in offloads.values():
                yield dataclasses.replace(sharded, cpu_offload=offload)


def _fsdp_on_one_rank(
    machine: Machine,
    precision: MixedPrecision | None,
    syncs: Sequence[Any],
    offloads: Mapping[str, CpuOffload],
) -> Iterator[Strategy]:
    """FSDP on one rank. Without offload, it frees weights after the forward pass: FSDP that keeps
    them becomes the strategy for one rank, as DDP does. With offload of the optimizer state, it
    frees or keeps them. With offload of all, there is a strategy for each way to move weights and
    gradients between host and device."""
    freed = Strategy(kind="fsdp", mixed_precision=precision, reshard_after_forward=True)
    yield freed
    if machine.device != "cuda":
        return
    if (state := offloads.get("optimizer")) is not None:
        yield dataclasses.replace(freed, cpu_offload=state)
        yield dataclasses.replace(freed, cpu_offload=state, reshard_after_forward=False)
    reshards = (True, False) if len(syncs) > 1 else (True,)
    for backward, sync in itertools.product(reshards, syncs):
        yield dataclasses.replace(
            freed,
            cpu_offload=offloads["all"],
            reshard_after_backward=backward,
            sync_every_micro_batch=sync,
        )


def complexity(configuration: Configuration, written: Recipe) -> tuple[int, ...]:
    """A sort key for configurations of equal speed; the simplest configuration has the smallest.

    In order of weight: CPU offload, activations on the host, unusual settings, precision, compile,
    checkpointing, sharding, number of overrides.
    """
    recipe = configuration.recipe
    strategy, checkpointing = recipe.strategy, recipe.activation_checkpointing
    ranks = configuration.plan.machine.ranks
    fsdp = strategy.kind == "fsdp" and not recipe.uses_one_rank(ranks)
    # Among configurations of equal speed, `auto` prefers fewer collectives
    usual_reshard = written.strategy.reshard_after_forward != "auto"
    usual_sync = fsdp and written.strategy.sync_every_micro_batch is True
    accumulates = has_reductions_to_choose(recipe, ranks=ranks)
    other_sizes = [
        getattr(strategy, key) != getattr(written.strategy, key) for key in PARALLEL_KEYS
    ]
    unusual = (
        *other_sizes,
        strategy.replicate > 1,
        fsdp and strategy.reshard_after_forward is not usual_reshard,
        not strategy.reshard_after_backward,
        accumulates and strategy.sync_every_micro_batch is not usual_sync,
    )
    return (
        int(configuration.offloads),
        int(checkpointing is not None and checkpointing.offload_to_cpu),
        sum(unusual),
        int(compute_dtype(strategy) != compute_dtype(written.strategy)),
        int(recipe.model.compile != written.model.compile),
        0 if checkpointing is None else 1 if checkpointing.mode == "selective" else 2,
        2 if fsdp else int(strategy.shard_optimizer),
        len(configuration.overrides),
    )


def smallest(written: Recipe, machine: Machine) -> Iterator[Recipe]:
    """The configurations that need the least memory, the faster ones first: micro-batches of one
    sequence, full activation checkpointing, FSDP over all ranks."""
    size: dict[str, Any] = {"micro_batch_size": 1}
    if written.batch.micro_batch_tokens is not None:
        size = {"micro_batch_tokens": written.data.row_length}
    batch, mixed = dataclasses.replace(written.batch, **size), written.strategy.mixed_precision
    choices = itertools.product((None, CpuOffload()), (False, True))
    for offload, to_host in choices if machine.device == "cuda" else [(None, False)]:
        strategy = Strategy(kind="fsdp", mixed_precision=mixed, cpu_offload=offload)
        yield dataclasses.replace(
            _without_logits(written),
            batch=batch,
            strategy=_in_groups(strategy, written),
            activation_checkpointing=ActivationCheckpointing(offload_to_cpu=to_host),
        )
