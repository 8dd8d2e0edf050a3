"""What `auto` stands for: a table of all keys that may be `auto`, and `resolve`, which replaces them.

recipe/derived.py replaces what the recipe alone decides when it is loaded, such as `model.compile`
beside a key that excludes it. The commands that plan and a run (`run/resolve.py`) do the rest here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from launcher.planner.choice import (
    choose_collectives,
    choose_compile,
    choose_configuration,
    choose_logits,
    choose_saves,
)
from launcher.planner.facts import Facts
from launcher.planner.search import concrete
from launcher.planner.sizes import choose_rate, choose_sizes
from launcher.recipe.decode import value_of
from launcher.recipe.derived import Choices, Derived, open_sizes, stands_for, with_value
from launcher.recipe.schema import Recipe
from launcher.recipe.section import AutoFloat, AutoInt
from launcher.recipe.yaml_text import as_override, changes_between, overrides_between


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Who replaces `auto` in some keys, which are decided together."""

    keys: tuple[str, ...]
    needs: Literal["recipe", "rows", "machine", "model"]
    """The last fact that must be known."""
    kept_on_resume: bool
    """Whether a run that resumes takes the values of its checkpoint. Those of COMPILE and COLLECTIVES
    may be impossible there, so their functions see to it."""
    choose: Callable[[Recipe, Facts], tuple[Recipe, str | Choices] | None]
    """The recipe with values in place of `auto`, and the reason, or the choices with a reason each.
    None: there is nothing to choose, or it cannot be chosen."""

    def open(self, recipe: Recipe) -> list[str]:
        """The keys that are `auto`."""
        return [key for key in self.keys if is_auto(value_of(recipe, key))]


def is_auto(value: object) -> bool:
    """Whether a value of a recipe is `auto`."""
    return value == "auto" or isinstance(value, AutoInt | AutoFloat)


RATE = Decision(
    keys=("optimizer.learning_rate",), needs="recipe", kept_on_resume=True, choose=choose_rate
)
SIZES = Decision(
    keys=(
        "data.validation_split",
        "data.sequence_length",
        "data.packing",
        "batch.global_batch_size",
        "run.epochs",
        "schedule.warmup_steps",
        "evaluation.every_steps",
        "checkpoint.every_steps",
    ),
    needs="rows",
    kept_on_resume=True,
    choose=choose_sizes,
)
COMPILE = Decision(
    keys=("model.compile",), needs="machine", kept_on_resume=True, choose=choose_compile
)
SEARCH = Decision(
    keys=("strategy.kind", "batch.micro_batch_size"),
    needs="machine",
    kept_on_resume=False,
    choose=choose_configuration,
)
"""It also chooses the keys of COLLECTIVES that are `auto`, and with the strategy the activation
checkpointing."""
COLLECTIVES = Decision(
    keys=("strategy.sync_every_micro_batch", "strategy.reshard_after_forward"),
    needs="model",
    kept_on_resume=True,
    choose=choose_collectives,
)
LOGITS = Decision(
    keys=("model.keep_logits",), needs="model", kept_on_resume=False, choose=choose_logits
)
"""The bits are the same with each value, so a run that resumes may choose again."""
SAVES = Decision(
    keys=("checkpoint.every_steps",), needs="model", kept_on_resume=True, choose=choose_saves
)

DECISIONS = (RATE, SIZES, COMPILE, SEARCH, COLLECTIVES, LOGITS, SAVES)
"""All of them, in the order in which they are made."""

NAMES = {
    "run.device": "distributed/process_group.py",
    "model.attention": "models/build.py",
    "data.prompt_format": "data/encoder.py",
    "embedding.pooling": "objectives/embedding.py",
    "checkpoint.resume": "checkpoint/resume.py",
}
"""Keys in which `auto` is one of several names: a recipe keeps it, and this module acts by it."""


def needing(*facts: str) -> list[Decision]:
    """The decisions for which these are the last facts."""
    return [decision for decision in DECISIONS if decision.needs in facts]


def resolve(
    recipe: Recipe, facts: Facts, decisions: Iterable[Decision]
) -> tuple[Recipe, list[Choices]]:
    """The recipe with values in place of each `auto` that has an effect, as far as these decisions
    go, and what each of them chose. Raises RecipeError as they do."""
    chosen = []
    for decision in decisions:
        if decision.open(recipe) and (found := decision.choose(recipe, facts)) is not None:
            before, (recipe, why) = recipe, found
            if isinstance(why, str):  # for all that has changed
                changes = changes_between(before, recipe)
                why = {key: Derived(value, why) for key, value in changes}
            chosen.append(why)
    return recipe, chosen


def resolve_for_plan(
    recipe: Recipe, facts: Facts, *, logits: bool = True
) -> tuple[Recipe, list[str], list[str]]:
    """The recipe with values in place of each `auto` that depends on machine and model, the overrides
    that do the same, and notes. If nothing fits, the recipe has the values that need the least
    memory. logits: also decide whether logits are kept."""
    assert facts.machine is not None
    resolved, chosen = resolve(recipe, facts, needing("machine"))
    notes = [f"auto stands for {choices_text(choices)}" for choices in chosen]
    if SEARCH.open(resolved):
        open_, resolved = resolved, concrete(resolved, facts.machine)
        unknown = facts.machine.memory is None and facts.machine.host_memory is None
        why = "no memory is known to choose for" if unknown else "nothing fits"
        shown = " ".join(overrides_between(open_, resolved))
        notes.append(f"auto is shown as {shown}: {why}")
    resolved, chosen = resolve(resolved, facts, needing("model") if logits else [COLLECTIVES])
    notes += [f"auto stands for {choices_text(choices)}" for choices in chosen]
    return resolved, [*overrides_between(recipe, resolved)], notes


def settled(recipe: Recipe) -> Recipe:
    """A resolved recipe in which the keys that have no effect in this run have values, too: those
    that they act as. So nothing in it is `auto` any more."""
    strategy, model = recipe.strategy, recipe.model
    acts_as: dict[str, Any] = {
        "model.keep_logits": model.keeps_logits,
        "strategy.reshard_after_forward": strategy.reshards_after_forward,
        "strategy.sync_every_micro_batch": strategy.syncs_every_micro_batch,
    }
    # Sizes are open where a run resumes from a checkpoint that is older than the key
    acts_as |= {key: stands_for(recipe, key) for key in open_sizes(recipe)}
    for key, value in acts_as.items():
        recipe = with_value(recipe, key, value)
    return recipe


def overrides_of(choices: Choices) -> list[str]:
    """The overrides that make the choices."""
    return [as_override(key, choice.value) for key, choice in choices.items()]


def choices_text(choices: Choices) -> str:
    """`KEY=VALUE KEY=VALUE: reason`, of choices that have the same reason."""
    (reason,) = {choice.reason for choice in choices.values()}
    return " ".join(overrides_of(choices)) + (f": {reason}" if reason else "")
