"""A plan as plain values: what `launcher plan --json` prints. Does not import torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from launcher.distributed.rank_layout import layout_sizes
from launcher.planner.formatting import NAMES, batch_text, micro_batches, moment_text, strategy_text
from launcher.planner.memory import Moment, Plan, compare, peak_holds
from launcher.recipe.schema import Recipe
from launcher.reliability.json_files import Json

if TYPE_CHECKING:
    from launcher.planner.candidates import Configuration
    from launcher.planner.measurement import Measurement
    from launcher.planner.search import SearchResult


def as_json(
    recipe: Recipe, plan: Plan, result: SearchResult | None, measured: Measurement | None = None
) -> Json:
    """A plan as plain values; docs/memory.md documents the keys."""
    machine, step, estimate = plan.machine, plan.step, plan.arithmetic
    groups = layout_sizes(recipe.strategy, ranks=machine.ranks).data_parallel_size
    peak = moment_text(step.peak, micro_batches=micro_batches(recipe.batch, groups))
    return {
        "recipe": recipe.run.name,
        "strategy": strategy_text(recipe, machine.ranks),
        "batch": batch_text(recipe, machine.ranks),
        "machine": asdict(machine) | {"ranks": machine.ranks},
        "fits": plan.fits,
        "needed": plan.needed,
        "spare": plan.spare,
        "room": plan.room,
        "has_room": plan.has_room,
        "peak": _moment(step.peak) | {"text": peak},
        "before": plan.before,
        "context": plan.context,
        "margin": plan.margin,
        "phases": {phase: _moment(moment) for phase, moment in step.phases.items()},
        "held": asdict(step.held),
        "after_forward": asdict(step.after_forward),
        "timeline": [_moment(moment) for moment in step.timeline],
        "method": "traced" if plan.traced else "arithmetic",
        "arithmetic": None if estimate is None else _moment(estimate.peak),
        "host": asdict(plan.host) | {"total": plan.host.total, "spare": plan.host_spare},
        "checkpoint": {"bytes": plan.checkpoint_bytes, "kept": plan.checkpoints},
        "state_files": step.disk * machine.gpus_per_node,
        "notes": list(plan.notes),
        "verified": None if measured is None else _verified(plan, measured),
        "search": None if result is None else _search(result),
    }


def _moment(moment: Moment) -> Json:
    return asdict(moment) | {"total": moment.total}


def _verified(plan: Plan, measured: Measurement) -> Json:
    *rows, peak = compare(plan.step, measured)
    if measured.context is not None and measured.reserved is not None:
        rows.append((NAMES["context"], plan.context, measured.context))
        rows.append(("with margin", peak[1] + plan.margin, measured.reserved))
    compared = [{"what": what, "planned": p, "measured": m} for what, p, m in (*rows, peak)]
    return {"true": peak_holds(plan.step, measured), "compared": compared}


def _search(result: SearchResult) -> Json:
    rows, best, written = result.configurations, result.best, result.written
    return {
        "considered": result.evaluated,
        "best": None if best is None else rows.index(best),
        "suggestions": list(result.suggestions),
        "written_seconds": asdict(written.seconds) | {"total": written.seconds.total},
        "steps": written.recipe.run.max_steps,
        "configurations": [configuration_as_json(row, written.recipe) for row in rows],
    }


def configuration_as_json(configuration: Configuration, written: Recipe) -> Json:
    """A configuration as plain values. `written` is the recipe as written."""
    recipe, plan, seconds = configuration.recipe, configuration.plan, configuration.seconds
    return {
        "overrides": list(configuration.overrides),
        "strategy": strategy_text(recipe, plan.machine.ranks),
        "micro_batch_size": recipe.batch.micro_batch_size,
        "micro_batch_tokens": recipe.batch.micro_batch_tokens,
        "fits": plan.fits,
        "has_room": plan.has_room,
        "fits_device": plan.spare is None or plan.spare >= 0,
        "as_written": recipe == written,
        "less_exact": _reduces_in_half(recipe) and not _reduces_in_half(written),
        "speed_measured": configuration.speed_measured,
        "needed": plan.needed,
        "host": plan.host.total,
        "seconds": asdict(seconds) | {"total": seconds.total},
        "tokens_per_second": configuration.tokens_per_second,
        "tokens_per_second_range": list(configuration.tokens_per_second_range),
        "hours": configuration.hours,
        "gpu_hours": configuration.hours * plan.machine.ranks,
    }


def _reduces_in_half(recipe: Recipe) -> bool:
    """Whether gradients are reduced in 16 bits."""
    mixed = recipe.strategy.mixed_precision
    return mixed is not None and mixed.reduce_dtype != "float32"
