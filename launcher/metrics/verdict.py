"""What limits the speed of a run, and the override that most likely helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.recipe.schema import Recipe

TOLERATED = {
    "data": 0.05,
    "communication": 0.15,
    "recomputation": 0.15,
    "optimizer": 0.15,
    "logging": 0.05,
}
"""Shares of a step up to which a part is no bottleneck."""
FREE_MEMORY = 0.25
"""Share of a GPU's memory that must be free for an override that needs more of it."""


@dataclass(frozen=True)
class Measured:
    """Shares of a step on rank 0 by part, which add up to 1, and the shape of the run."""

    shares: Mapping[str, float]
    """Those of TOLERATED, and compute: forward and backward without communication and
    recomputation. With CPU offload, communication includes copies between host and device."""
    ranks: int = 1
    nodes: int = 1
    micro_batches: int = 1
    """Of a step, on each rank."""
    free_memory: float | None = None
    """Share of a GPU's memory that was not allocated at the peak; None on CPUs."""
    slow_rank: str | None = None


def measure(
    totals: Mapping[str, float], *, recomputed_share: float, **shape: Any
) -> Measured | None:
    """totals: `StepRecorder.totals`. recomputed_share: of the operations of forward and backward.
    shape: the other fields. None if there is only the first record."""
    if not totals["step"]:
        return None
    shares = {name: totals[name] / totals["step"] for name in ("data", "optimizer", "logging")}
    waits = totals["communication"] / totals["timed"] if totals["timed"] else 0.0
    passes = 1 - sum(shares.values())
    shares["communication"] = min(waits, passes)
    shares["compute"] = (passes - shares["communication"]) * (1 - recomputed_share)
    shares["recomputation"] = 1 - sum(shares.values())
    return Measured(shares, **shape)


def verdict(measured: Measured, recipe: Recipe) -> str:
    """One sentence."""
    over = {name: measured.shares[name] / most for name, most in TOLERATED.items()}
    name = max(over, key=lambda name: over[name])
    name = name if over[name] > 1 else "compute"
    override = next((text for fits, text in _overrides(name, measured, recipe) if fits), None)
    advice = "no override is likely to help" if override is None else f"try {override}"
    if name == "communication" and measured.slow_rank is not None:
        advice = f"the other ranks wait for one, look at it first: {measured.slow_rank}"
    copies = name == "communication" and recipe.strategy.cpu_offload is not None
    shown = {"compute": "compute (forward and backward)"}.get(name, name)
    shown = "host copies and communication" if copies else shown
    return f"bottleneck: {shown}, {measured.shares[name]:.0%} of a step; {advice}"


def _overrides(name: str, measured: Measured, recipe: Recipe) -> list[tuple[bool, str]]:
    """Candidates, the most effective first, and whether each applies."""
    strategy, batch, checkpointing = recipe.strategy, recipe.batch, recipe.activation_checkpointing
    memory = measured.free_memory is None or measured.free_memory >= FREE_MEMORY
    accumulates, gpu = measured.micro_batches > 1, measured.free_memory is not None
    fsdp, offload = strategy.kind != "ddp" and memory, strategy.cpu_offload is not None and memory
    micro = batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else 0
    more = (True, f"batch.global_batch_size={2 * batch.global_batch_size}")
    syncs = accumulates and strategy.sync_every_micro_batch is not False
    syncs = syncs and (fsdp or strategy.sync_every_micro_batch is True)
    workers, prefetch = recipe.data.workers, recipe.data.prefetch_factor
    mode = None if checkpointing is None else checkpointing.mode
    return {
        "data": [
            (workers < 8, f"data.workers={max(2, 2 * workers)}"),
            (True, f"data.prefetch_factor={2 * prefetch}"),
        ],
        "communication": [
            (offload, "strategy.cpu_offload=null"),
            (
                fsdp and measured.nodes > 1 and strategy.replicate == 1,
                f"strategy.replicate={measured.nodes}",
            ),
            (syncs, "strategy.sync_every_micro_batch=false"),
            (
                fsdp and accumulates and strategy.reshard_after_backward,
                "strategy.reshard_after_backward=false",
            ),
            (
                fsdp and strategy.reshard_after_forward is not False,
                "strategy.reshard_after_forward=false",
            ),
            more,
        ],
        "recomputation": [
            (mode == "full", "activation_checkpointing.mode=selective"),
            (mode is not None and memory, "activation_checkpointing=null"),
            (mode is None and memory, "model.chunked_loss=false"),
        ],
        "optimizer": [
            (offload, "strategy.cpu_offload=null"),
            (
                strategy.kind == "ddp" and measured.ranks > 1 and not strategy.shard_optimizer,
                "strategy.shard_optimizer=true",
            ),
            (memory and recipe.optimizer.state_dtype != "float32", "optimizer.state_dtype=float32"),
            more,
        ],
        "logging": [(True, f"logging.every_steps={10 * recipe.logging.every_steps}")],
        "compute": [
            (
                gpu and strategy.mixed_precision is None,
                "strategy.mixed_precision={param_dtype: bfloat16}",
            ),
            (gpu and not recipe.model.compile, "model.compile=true"),
            (gpu and memory and accumulates and micro > 0, f"batch.micro_batch_size={2 * micro}"),
        ],
    }[name]
