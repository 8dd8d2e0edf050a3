"""`auto`: what a recipe leaves to the plan, chosen for the devices that are there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from launcher.errors import RecipeError
from launcher.metrics.console import bytes_as_text
from launcher.planner.formatting import batch_in_words, strategy_in_words
from launcher.planner.machine import Machine
from launcher.planner.planning import make_plan
from launcher.planner.search import Rung, fastest_that_fits, make_ladder
from launcher.planner.suggestions import refused_with_remedies, what_fits
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import leaves_open


@dataclass(frozen=True)
class Resolved:
    """A recipe without `auto`."""

    recipe: Recipe
    overrides: tuple[str, ...]
    """What was chosen, as it would be written on a command line."""
    why: str
    """The choice in words, a line."""


def resolve(recipe: Recipe, machine: Machine, *, limit_micro_batch: int | None = None) -> Resolved:
    """The fastest that fits the machine by plan, of what the recipe leaves open. Seconds to minutes of work; there must be no
    default process group.

    limit_micro_batch: the largest micro-batch that may be chosen, since larger ones ran out of memory; 0: the smallest did.
    Raises RecipeError, with what would help, where nothing fits.
    """
    if not leaves_open(recipe):
        return Resolved(recipe, (), "")
    if limit_micro_batch == 0:
        smallest = resolve(dataclasses.replace(recipe, batch=dataclasses.replace(recipe.batch, micro_batch_size=1)), machine).recipe
        raise refused_with_remedies(
            "batch.micro_batch_size: auto: a micro-batch of 1 ran out of memory already, in an earlier start of this run on "
            f"{machine.ranks} x {machine.name}; there is no smaller one",
            what_fits(smallest, machine, make_plan(smallest, machine)),
        )
    rung = fastest_that_fits(recipe, machine, plan_of=make_plan, limit_micro_batch=limit_micro_batch)
    if rung is None:
        raise RecipeError(_nothing_fits(recipe, machine))
    assert not leaves_open(rung.recipe)
    return Resolved(rung.recipe, tuple(rung.overrides), describe(rung, machine))


def describe(rung: Rung, machine: Machine) -> str:
    """`fsdp, bf16; 4 sequences of 2,048 tokens x 2 micro-batches x 8 ranks = 64 a step: 61.2 of 79.6 GiB ...`."""
    recipe, plan = rung.recipe, rung.plan
    of = "" if machine.memory is None else f" of {bytes_as_text(machine.memory)}"
    return (
        f"{strategy_in_words(recipe)}; {batch_in_words(recipe, machine.ranks)}. The fastest that fits: by plan {bytes_as_text(plan.needed)}"
        f"{of} a rank, {rung.tokens_per_second:,.0f} tokens/s"
    )


def _nothing_fits(recipe: Recipe, machine: Machine) -> list[str]:
    """What to say, the ladder's remedies included."""
    ladder = make_ladder(recipe, machine, plan_of=make_plan)
    what = "strategy.kind" if recipe.strategy.kind == "auto" else "batch.micro_batch_size"
    devices = f"{machine.ranks} x {machine.name}" + (f" with {bytes_as_text(machine.memory)} each" if machine.memory is not None else "")
    return [f"{what}: auto: nothing that the plan knows fits {devices}", *(f"  {remedy}" for remedy in ladder.remedies)]
