"""Measures configurations on this machine (`launcher plan --measure`), and reads the fastest for
`auto`.

The fastest one is kept in `data.cache`, in a file for each recipe and hardware.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.console import bytes_as_text, seconds_as_text
from launcher.distributed.environment import cache_folder
from launcher.errors import TrainingError, first_line
from launcher.files import replace_text
from launcher.planner.candidates import Configuration
from launcher.planner.formatting import batch_text, strategy_text
from launcher.planner.machine import Machine
from launcher.planner.measurement import measure_recipes
from launcher.planner.plan import make_plan
from launcher.planner.plan_as_json import configuration_as_json
from launcher.planner.recipe_values import cache_key, has_reductions_to_choose
from launcher.planner.search import allowed, fastest_of_each_kind
from launcher.planner.speed import tokens_per_step
from launcher.recipe.schema import Recipe
from launcher.reliability.causes import ran_out_of_memory
from launcher.reliability.json_files import Json

MOST = 6
"""Maximum number of configurations that are measured."""
SECONDS = 900
"""Time limit of all measurements. Each has an equal share of what is left."""


def measure_fastest(
    overrides: Sequence[str],
    recipe: Recipe,
    machine: Machine,
    *,
    show: Callable[[str], None] = lambda text: None,
) -> Json:
    """Measures the configurations that should be fastest, and keeps the fastest for `auto`.

    `overrides` are the arguments that make the recipe. show: is called with what is measured, before
    each configuration. Returns plain values; docs/memory.md
    documents the keys.
    """
    configurations = fastest_of_each_kind(recipe, machine, most=MOST)
    end, rows = time.monotonic() + SECONDS, []
    for index, configuration in enumerate(configurations):
        seconds = max(1.0, (end - time.monotonic()) / (len(configurations) - index))
        what = strategy_text(configuration.recipe, machine.ranks)
        size = configuration.recipe.batch.micro_batch_size
        show(
            f"measuring {index + 1} of {len(configurations)}: {what}, micro-batch {size} "
            f"(at most {seconds_as_text(seconds)})"
        )
        measured, problem = _measure(overrides, configuration, machine, seconds=seconds)
        planned = configuration_as_json(configuration, recipe)
        planned["planned_peak"] = configuration.plan.tensors
        rows.append(planned | {"measured": measured, "problem": problem})
    speeds = [row["measured"]["tokens_per_second"] if row["measured"] else 0 for row in rows]
    if not any(speeds):
        return {"best": None, "file": None, "rows": rows}
    best, file = speeds.index(max(speeds)), _file(recipe, machine)
    settings = _settings(configurations[best].recipe, machine)
    kept = {"day": time.strftime("%Y-%m-%d"), "settings": settings}
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, json.dumps(rows[best]["measured"] | kept, indent=1))
    return {"best": best, "file": str(file), "rows": rows}


def _measure(
    overrides: Sequence[str], configuration: Configuration, machine: Machine, *, seconds: float
) -> tuple[Json | None, str]:
    """Peak and speed of a configuration, or None and why it could not be measured."""
    arguments, gpus = [*overrides, *configuration.overrides], machine.device == "cuda"
    try:
        (measured,) = measure_recipes(
            [arguments], ranks=machine.ranks, gpus=gpus, timeout=seconds, timed=True
        )
    except TrainingError as error:
        memory = ran_out_of_memory(RuntimeError(str(error)))
        return None, "out of memory" if memory else first_line(error)
    assert measured.seconds is not None
    speed = tokens_per_step(configuration.recipe) / measured.seconds
    return {"peak": measured.peak, "tokens_per_second": speed}, ""


def _file(recipe: Recipe, machine: Machine) -> Path:
    """The file of the result: named by a hash of all that speed and memory depend on, except for
    the settings that `auto` decides."""
    run, data, optimizer = recipe.run, recipe.data, recipe.optimizer
    depends = (
        machine.name,
        machine.device,
        machine.nodes,
        machine.gpus_per_node,
        recipe.model,
        recipe.lora,
        recipe.strategy.mixed_precision,
        dataclasses.replace(optimizer, learning_rate=0.0),
        recipe.batch.global_batch_size,
        data.kind,
        data.packing,
        data.row_length,
        data.builder,
        data.arguments,
        run.deterministic,
        run.float32_matmul,
    )
    name = hashlib.sha256(cache_key(*depends).encode()).hexdigest()[:32]
    return cache_folder(data.cache) / "measured" / f"{name}.json"


def _settings(recipe: Recipe, machine: Machine) -> str:
    """The settings that `auto` decides, as text."""
    size, tokens = recipe.batch.micro_batch_size, recipe.batch.micro_batch_tokens
    strategy = recipe.strategy
    if not has_reductions_to_choose(recipe, ranks=machine.ranks):
        strategy = dataclasses.replace(strategy, sync_every_micro_batch="auto")
    return cache_key(strategy, recipe.activation_checkpointing, size, tokens)


def measured_choice(
    recipe: Recipe, machine: Machine, *, limit_micro_batch: int | None = None
) -> tuple[Recipe, str] | None:
    """The fastest measured configuration in place of `auto`, and the reason.

    Returns None if the recipe was not measured on such a machine, if `auto` does not cover the
    measured settings in this recipe, or if by plan they do not fit the machine's memory.
    """
    file = _file(recipe, machine)
    try:
        kept = json.loads(file.read_text())
        settings, speed, peak = (kept[key] for key in ("settings", "tokens_per_second", "peak"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    for chosen in allowed(recipe, machine, limit_micro_batch=limit_micro_batch):
        if _settings(chosen, machine) == settings and make_plan(chosen, machine).fits is not False:
            why = (
                f"{strategy_text(chosen, machine.ranks)}; {batch_text(chosen, machine.ranks)}. "
                f"The fastest measured, on {kept.get('day')}: {bytes_as_text(peak)} of tensors a rank, "
                f"{speed:,.0f} tokens/s ({file})"
            )
            return chosen, why
    return None
