"""What would help where no configuration fits: estimated, in words and overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from launcher.errors import RecipeError
from launcher.metrics.console import bytes_as_text
from launcher.planner.candidates import overrides_between, smallest
from launcher.planner.machine import Machine
from launcher.planner.plan import estimated_plan
from launcher.planner.profile import ModelProfile, profile_model
from launcher.recipe.schema import Lora, Recipe

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Tried where nothing fits."""
MANY_RANKS = 2**20
"""So many that shards take no memory."""
SHORTEST = 256
"""Tokens of a sequence."""


def suggestions(profile: ModelProfile, written: Recipe, machine: Machine) -> Iterator[str]:
    """More GPUs, shorter sequences, adapters; or what this launcher cannot do."""
    without_shards = dataclasses.replace(
        machine, nodes=max(1, MANY_RANKS // machine.gpus_per_node), host_memory=None
    )
    hopeless = _fitting(written, without_shards, profile) is None
    if not hopeless:
        yield _more_gpus(profile, written, machine)
    length = written.data.sequence_length // 2
    while length >= SHORTEST:
        data = dataclasses.replace(written.data, sequence_length=length)
        found = _fitting(dataclasses.replace(written, data=data), machine)
        if found is not None:
            yield f"shorter sequences: {' '.join(overrides_between(written, found))}"
            break
        length //= 2
    if written.lora is None and written.model.freeze is None:
        found = _fitting(dataclasses.replace(written, lora=Lora()), machine)
        if found is not None:
            overrides = " ".join(overrides_between(written, found))
            yield f"adapters instead of all weights: {overrides}"
    if hopeless:
        recipes = smallest(written, machine)
        steps = [estimated_plan(profile, one, without_shards).step for one in recipes]
        parts = min((step.peak.components for step in steps), key=lambda parts: parts.total)
        logits = parts.logits > parts.total / 2
        what = "the logits and their loss" if logits else "one block with weights and activations"
        yield (
            f"tensor parallelism, which this launcher does not have: on any number of GPUs {what} "
            f"need {bytes_as_text(parts.logits if logits else parts.total)} of "
            f"{bytes_as_text(parts.total)} a rank; or a GPU with more memory than "
            f"{bytes_as_text(machine.memory or 0)}"
        )


def _fitting(
    recipe: Recipe, machine: Machine, profile: ModelProfile | None = None
) -> Recipe | None:
    """The fastest of the smallest configurations that fits by the estimate; None: none does."""
    try:
        profile = profile or profile_model(recipe, device=machine.device)
    except RecipeError:  # such as sequences too short for the model
        return None
    for one in smallest(recipe, machine):
        if estimated_plan(profile, one, machine).fits:
            return one
    return None


def _more_gpus(profile: ModelProfile, written: Recipe, machine: Machine) -> str:
    for nodes in NODES:
        more = dataclasses.replace(machine, nodes=nodes)
        found = _fitting(written, more, profile) if nodes > machine.nodes else None
        if found is not None:
            size = written.batch.global_batch_size
            batch = f"; batch.global_batch_size must be a multiple of {more.ranks}, not {size}"
            return (
                f"more GPUs: {more.ranks} of them (nodes={nodes} "
                f"gpus_per_node={machine.gpus_per_node}), with "
                + " ".join(overrides_between(written, found))
                + (batch if size % more.ranks else "")
            )
    most = NODES[-1] * machine.gpus_per_node
    return f"more GPUs: {most} are not enough; pipeline parallelism is not available"
