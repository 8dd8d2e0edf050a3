"""What limits the speed of a run, by the times in metrics.jsonl, and the override that most likely
helps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.console import finite
from launcher.distributed.rank_layout import layout_sizes
from launcher.recipe.derived import why_not_compiled
from launcher.recipe.schema import Recipe
from launcher.reliability.json_files import Json

TOLERATED = {
    "data": 0.05,
    "communication": 0.15,
    "stages": 0.15,
    "recomputation": 0.15,
    "optimizer": 0.15,
    "logging": 0.05,
}
"""Shares of a step up to which a part is no bottleneck."""
FREE_MEMORY = 0.25
"""Share of a GPU's memory that must be free for an override that needs more of it."""
RECORDS = 15
"""Records in which the same rank must be the slowest, so that the others wait for it."""
SLOW_RANK = 1.3
"""How many times as long as the fastest rank it must take."""


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a step goes, and the shape of the run."""

    shares: Mapping[str, float]
    """The result of `step_shares`."""
    ranks: int = 1
    nodes: int = 1
    micro_batches: int = 1
    """Micro-batches of a step on each rank."""
    free_memory: float | None = None
    """Share of a GPU's memory that was not allocated at the peak; None on CPUs."""
    slow_rank: str | None = None
    retries: float = 0.0
    """Retried allocations of a step, each of which waits for the GPU; 0 on CPUs."""
    segments_grow: bool = True
    """Whether the allocator's segments can grow (PYTORCH_ALLOC_CONF)."""


def profile_of_run(
    records: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, float],
    built: Json,
    *,
    ranks: int,
    retries: int,
) -> StepProfile | None:
    """The profile of a start of a run; None without records of its steps.

    records: its lines in metrics.jsonl, without the first one, whose steps load, compile and
    allocate. seconds: what `timed_parts` finds in them. built: its event `built`. retries: repeated
    allocations after the warm-up, as status.json has them.
    """
    if not records or not sum(seconds.values()):
        return None
    shares = step_shares(seconds, recomputed_share=built.get("recomputed_share") or 0.0)
    peak = max(record.get("peak_memory_bytes") or 0 for record in records)
    memory = built.get("device_memory")
    per_node = built.get("ranks_per_node") or ranks
    return StepProfile(
        shares,
        ranks=ranks,
        nodes=max(1, ranks // per_node),
        micro_batches=built.get("micro_batches") or 1,
        free_memory=1 - peak / memory if memory else None,
        slow_rank=_slow_rank(records[-RECORDS:]),
        retries=retries / max(1, records[-1]["step"] - records[0]["step"]),
        segments_grow=built.get("segments_grow") is not False,
    )


def _slow_rank(records: Sequence[Mapping[str, Any]]) -> str | None:
    """The rank that was the slowest in all of these records, if the others wait for it."""
    slowest = {record.get("slowest_rank") for record in records}
    rank = slowest.pop()
    if slowest or rank is None:
        return None
    slow, fast = (
        statistics.median(finite(record.get(f"{name}_rank_seconds")) or 0.0 for record in records)
        for name in ("slowest", "fastest")
    )
    if slow < SLOW_RANK * fast:
        return None
    return f"rank {rank} takes {slow / max(fast, 1e-9):.1f} times as long as the fastest"


def step_shares(seconds: Mapping[str, float], *, recomputed_share: float) -> dict[str, float]:
    """Shares of a step on rank 0, which add up to 1: the parts in TOLERATED, and compute. Compute
    is the forward and the backward pass without communication and recomputation. With CPU offload,
    communication includes copies between host and device. Waits for other stages of a pipeline, `stages`,
    are no part of it.

    seconds are from `timed_parts`. recomputed_share is the share of the operations of forward and
    backward that are recomputation.
    """
    step = sum(value for name, value in seconds.items() if name != "communication")
    shares = {name: seconds.get(name, 0.0) / step for name in ("data", "optimizer", "logging")}
    passes = 1 - sum(shares.values())
    waits = min(seconds.get("communication", 0.0) / step, passes)
    shares["stages"] = min(seconds.get("stages", 0.0) / step, waits)
    shares["communication"] = waits - shares["stages"]
    shares["compute"] = (passes - waits) * (1 - recomputed_share)
    shares["recomputation"] = 1 - sum(shares.values())
    return shares


def bottleneck(profile: StepProfile, recipe: Recipe) -> str:
    """The part of a step that limits the speed, and the override that most likely helps."""
    if profile.retries >= 1:
        why = f"{profile.retries:,.0f} retried allocations a step, which wait for the GPU"
        return f"memory, {why}; {_advice('memory', profile, recipe)}"
    over = {name: profile.shares[name] / most for name, most in TOLERATED.items()}
    name = max(over, key=lambda name: over[name])
    if over[name] <= 1:
        name = "compute"
    helps = _advice(name, profile, recipe)
    if name == "communication" and profile.slow_rank is not None:
        helps = f"look first at the rank that the others wait for: {profile.slow_rank}"
    copies = name == "communication" and recipe.strategy.cpu_offload is not None
    shown = "host copies and communication" if copies else name
    shown = "waits for other stages" if name == "stages" else shown
    return f"{shown}, {profile.shares[name]:.0%} of a step; {helps}"


def _advice(name: str, profile: StepProfile, recipe: Recipe) -> str:
    """The override that most likely helps against a bottleneck, or `memory`: retried
    allocations."""
    candidates = _overrides(name, profile, recipe).items()
    override = next((text for text, applies in candidates if applies), None)
    return "no override is likely to help" if override is None else f"try {override}"


def _overrides(name: str, profile: StepProfile, recipe: Recipe) -> dict[str, bool]:
    """Whether each candidate applies. The most effective comes first."""
    strategy, batch, checkpointing = recipe.strategy, recipe.batch, recipe.activation_checkpointing
    gpu, accumulates = profile.free_memory is not None, profile.micro_batches > 1
    memory = profile.free_memory is None or profile.free_memory >= FREE_MEMORY
    fsdp, offload = strategy.kind != "ddp" and memory, strategy.cpu_offload is not None and memory
    gathers = strategy.reshards_after_forward
    gathers_again = accumulates and strategy.reshard_after_backward
    mode = None if checkpointing is None else checkpointing.mode
    whole_state = strategy.kind == "ddp" and not strategy.shard_optimizer
    sizes = layout_sizes(strategy, ranks=profile.ranks)
    eager = why_not_compiled(recipe) is not None
    workers, low = recipe.data.workers, recipe.optimizer.state_dtype != "float32"
    micro = batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else 0
    larger = f"batch.global_batch_size={2 * batch.global_batch_size}"
    return {
        "memory": _less_memory(profile, recipe),
        "data": {
            f"data.workers={max(2, 2 * workers)}": workers < 8,
            f"data.prefetch_factor={2 * recipe.data.prefetch_factor}": True,
        },
        "communication": {
            "strategy.cpu_offload=null": offload,
            f"strategy.replicate={profile.nodes}": (
                fsdp
                and profile.nodes > 1
                and strategy.replicate == 1
                and sizes.allows_replicas(profile.nodes)
            ),
            "strategy.sync_every_micro_batch=false": (
                accumulates
                and strategy.syncs_every_micro_batch
                and (fsdp or strategy.kind == "ddp")
            ),
            "strategy.reshard_after_backward=false": fsdp and gathers_again,
            "strategy.reshard_after_forward=false": fsdp and gathers,
            larger: True,
        },
        "stages": {
            f"batch.micro_batch_size={micro // 2}": micro > 1 and micro % 2 == 0,
            "strategy.pipeline_schedule=interleaved_1f1b": (
                strategy.stages_of_rank == 1 and strategy.pipeline_blocks is None
            ),
            larger: True,
        },
        "recomputation": {
            "activation_checkpointing.mode=selective": mode in ("full", "all_but_attention"),
            "activation_checkpointing=null": mode is not None and memory,
            "model.keep_logits=true": (
                mode is None
                and memory
                and recipe.model.keep_logits is False
                and recipe.distillation is None
            ),
        },
        "optimizer": {
            "strategy.cpu_offload=null": offload,
            "strategy.shard_optimizer=true": whole_state and profile.ranks > 1,
            "optimizer.state_dtype=float32": memory and low,
            larger: True,
        },
        "logging": {f"logging.every_steps={10 * recipe.logging.every_steps}": True},
        "compute": {
            "strategy.mixed_precision={param_dtype: bfloat16}": (
                gpu and strategy.mixed_precision is None
            ),
            "model.compile=true": gpu and recipe.model.compile is False and not eager,
            f"batch.micro_batch_size={2 * micro}": gpu and memory and accumulates and micro > 0,
        },
    }[name]


def _less_memory(profile: StepProfile, recipe: Recipe) -> dict[str, bool]:
    """The candidates against retried allocations."""
    strategy, batch, checkpointing = recipe.strategy, recipe.batch, recipe.activation_checkpointing
    ddp, mode = strategy.kind == "ddp", None if checkpointing is None else checkpointing.mode
    micro = batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else 0
    tokens, kept = batch.micro_batch_tokens or 0, checkpointing and checkpointing.budget
    several = profile.ranks > 1
    return {
        "the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True": not profile.segments_grow,
        "strategy.reshard_after_backward=true": not strategy.reshard_after_backward,
        "model.keep_logits=false": recipe.model.keep_logits is True,
        "strategy.reshard_after_forward=true": strategy.reshard_after_forward is False,
        f"batch.micro_batch_size={micro // 2}": micro > 1 and micro % 2 == 0,
        f"batch.micro_batch_tokens={tokens // 2}": tokens >= 2 * recipe.data.row_length,
        "activation_checkpointing.mode=selective": mode is None,
        "activation_checkpointing={mode: full, budget: null}": kept is not None,
        "activation_checkpointing.mode=full": mode in ("selective", "all_but_attention"),
        "strategy.shard_optimizer=true": ddp and not strategy.shard_optimizer and several,
        "strategy.kind=fsdp": ddp and several,
        "strategy.cpu_offload={}": not ddp and strategy.cpu_offload is None,
    }
