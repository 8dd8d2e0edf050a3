"""What `auto` stands for: a table of all keys that may be `auto`, and `resolve`, which replaces them.

recipe/decisions.py replaces what the recipe alone decides when it is loaded, such as `model.compile`
beside a key that excludes it. The commands that plan and a run (`run/resolve.py`) do the rest here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.planner.candidates import changes_between, overrides_between
from launcher.planner.choice import (
    Profiles,
    choose,
    choose_collectives,
    choose_logits,
    choose_or_refuse,
    failed_micro_batches,
    failed_with_fewer,
    failed_with_logits,
    open_collectives,
)
from launcher.planner.machine import Machine
from launcher.planner.profile import profile_model
from launcher.planner.search import concrete
from launcher.planner.sizes import Rows, choose_rate, choose_sizes
from launcher.recipe.combinations import value_of
from launcher.recipe.decisions import Choices, Derived, open_sizes, stands_for, with_value
from launcher.recipe.schema import Recipe
from launcher.recipe.section import AutoFloat, AutoInt
from launcher.recipe.yaml_text import as_override
from launcher.reliability.json_files import Json

COST = "each block then launches some 60 more kernels in a micro-batch"
"""Measured on null GPUs: 57 for a Llama block, 76 with full activation checkpointing."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decisions are made from. None: not known yet."""

    ranks: int
    rows: Rows | str | None = None
    """The rows of the training data, or why they cannot be counted."""
    machine: Machine | None = None
    why_eager: str | None = None
    """Why blocks cannot be compiled on this machine; None: they can."""
    profiles: Callable[[Recipe], Profiles] | None = None
    """Sizes of the tensors of the model, for estimates of its memory."""
    must_fit: bool = False
    """Raise RecipeError, with what would help, if no configuration fits; False: leave `auto`."""
    events: Sequence[Json] = ()
    """Events of earlier starts of the run, some of which may have run out of memory."""
    recorded: Mapping[str, Any] = field(default_factory=dict)
    """The recipe of the checkpoint that the run resumes from; empty: none."""
    exact: Mapping[str, Any] | None = None
    """Section `strategy` of that recipe, if a resume with the same collectives is exact."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Who replaces `auto` in some keys, which are decided together."""

    keys: tuple[str, ...]
    needs: Literal["recipe", "rows", "machine", "model"]
    """The last fact that must be known."""
    kept_on_resume: bool
    """Whether a run that resumes takes the values of its checkpoint, where it can."""
    choose: Callable[[Recipe, Facts], tuple[Recipe, Choices] | None]
    """The recipe with values in place of `auto`; None: there is nothing to choose, or it cannot be
    chosen."""

    def open(self, recipe: Recipe) -> list[str]:
        """The keys that are `auto`."""
        return [key for key in self.keys if is_auto(value_of(recipe, key))]


def is_auto(value: object) -> bool:
    """Whether a value of a recipe is `auto`."""
    return value == "auto" or isinstance(value, AutoInt | AutoFloat)


def _rate(recipe: Recipe, facts: Facts) -> tuple[Recipe, Choices]:
    return choose_rate(recipe)


def _sizes(recipe: Recipe, facts: Facts) -> tuple[Recipe, Choices]:
    assert facts.rows is not None
    return choose_sizes(recipe, facts.rows, ranks=facts.ranks)


def _compile(recipe: Recipe, facts: Facts) -> tuple[Recipe, Choices]:
    """Compiled blocks round differently, so a run keeps the value of its checkpoint, unless that is
    true and this machine cannot compile."""
    assert facts.machine is not None
    why, before = facts.why_eager, facts.recorded.get("model", {}).get("compile")
    on, reason = why is None and before is not False, ""
    if why is not None:
        reason = f"{why}; {COST}" if facts.machine.device == "cuda" else why
    elif not on:
        reason = "as in the checkpoint; model.compile=true compiles from here on"
    return with_value(recipe, "model.compile", on), {"model.compile": Derived(on, reason)}


def _search(recipe: Recipe, facts: Facts) -> tuple[Recipe, Choices] | None:
    """Micro-batch sizes that ran out of memory in an earlier start of the run, on as many of the same
    devices, are not chosen again, nor are larger ones."""
    assert facts.machine is not None
    failures = failed_micro_batches([*facts.events], machine=facts.machine, recipe=recipe)
    search = choose_or_refuse if facts.must_fit else choose
    return _because(recipe, search(recipe, facts.machine, failed=min(failures, default=None)))


def _collectives(recipe: Recipe, facts: Facts) -> tuple[Recipe, Choices] | None:
    assert facts.machine is not None
    assert facts.profiles is not None
    if not open_collectives(recipe, ranks=facts.ranks):
        return None
    failed = failed_with_fewer([*facts.events], machine=facts.machine, recipe=recipe)
    profiles = facts.profiles(recipe)
    found = choose_collectives(recipe, facts.machine, profiles, earlier=facts.exact, failed=failed)
    return _because(recipe, found)


def _logits(recipe: Recipe, facts: Facts) -> tuple[Recipe, Choices] | None:
    assert facts.machine is not None
    assert facts.profiles is not None
    if not facts.machine.memory:
        return None
    failed = failed_with_logits([*facts.events], machine=facts.machine, recipe=recipe)
    found = choose_logits(recipe, facts.machine, facts.profiles(recipe), failed=failed)
    return _because(recipe, found)


def _because(before: Recipe, found: tuple[Recipe, str] | None) -> tuple[Recipe, Choices] | None:
    """A choice, with what it changes: all for the same reason."""
    if found is None:
        return None
    chosen, why = found
    return chosen, {key: Derived(value, why) for key, value in changes_between(before, chosen)}


RATE = Decision(
    keys=("optimizer.learning_rate",), needs="recipe", kept_on_resume=True, choose=_rate
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
    choose=_sizes,
)
COMPILE = Decision(keys=("model.compile",), needs="machine", kept_on_resume=True, choose=_compile)
SEARCH = Decision(
    keys=("strategy.kind", "batch.micro_batch_size"),
    needs="machine",
    kept_on_resume=False,
    choose=_search,
)
"""It also chooses the keys of COLLECTIVES that are `auto`, and with the strategy the activation
checkpointing."""
COLLECTIVES = Decision(
    keys=("strategy.sync_every_micro_batch", "strategy.reshard_after_forward"),
    needs="model",
    kept_on_resume=True,
    choose=_collectives,
)
LOGITS = Decision(keys=("model.keep_logits",), needs="model", kept_on_resume=False, choose=_logits)
"""The bits are the same with each value, so a run that resumes may choose again."""

DECISIONS = (RATE, SIZES, COMPILE, SEARCH, COLLECTIVES, LOGITS)
"""All of them, in the order in which they are made."""

NAMES = {
    "run.device": "distributed/process_group.py",
    "model.attention": "models/build.py",
    "data.prompt_format": "data/encoder.py",
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
            recipe, choices = found
            chosen.append(choices)
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


def profiled(machine: Machine) -> Callable[[Recipe], Profiles]:
    """`Facts.profiles` for a plan."""

    def profiles(recipe: Recipe) -> Profiles:
        full = profile_model(recipe, device=machine.device)
        return dataclasses.replace(full, saved={}), lambda: full

    return profiles
