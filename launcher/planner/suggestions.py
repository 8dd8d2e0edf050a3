"""What would help where no configuration fits, by the estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from launcher.errors import RecipeError
from launcher.planner.candidates import overrides_between, smallest
from launcher.planner.machine import Machine
from launcher.planner.plan import estimated_plan
from launcher.planner.profile import ModelProfile, profile_model
from launcher.recipe.schema import Lora, Recipe

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of nodes that are tried."""
SHORTEST = 256
"""Tokens of a sequence."""


def suggestions(profile: ModelProfile, written: Recipe, machine: Machine) -> Iterator[str]:
    """More GPUs, shorter sequences, adapters."""
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


def _fitting(
    recipe: Recipe, machine: Machine, profile: ModelProfile | None = None
) -> Recipe | None:
    """The fastest of the smallest configurations that fits; None: none does."""
    try:
        profile = profile or profile_model(recipe, device=machine.device)
    except RecipeError:  # such as sequences too short for the model
        return None
    recipes = smallest(recipe, machine)
    return next((one for one in recipes if estimated_plan(profile, one, machine).fits), None)


def _more_gpus(profile: ModelProfile, written: Recipe, machine: Machine) -> str:
    per_node, size = machine.gpus_per_node, written.batch.global_batch_size
    for nodes in NODES:
        more = dataclasses.replace(machine, nodes=nodes)
        found = _fitting(written, more, profile) if nodes > machine.nodes else None
        if found is not None:
            batch = f"; batch.global_batch_size must be a multiple of {more.ranks}, not {size}"
            return (
                f"more GPUs: {more.ranks} of them (nodes={nodes} gpus_per_node={per_node}), with "
                + " ".join(overrides_between(written, found))
                + (batch if size % more.ranks else "")
            )
    return f"a GPU with more memory: {NODES[-1] * per_node} of these are not enough"
