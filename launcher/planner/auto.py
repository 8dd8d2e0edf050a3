"""What `auto` stands for, and why: the function that chooses the values of each key, a table of all
keys that may be `auto`, and `resolve`, which replaces them.

`choose_configuration` chooses strategy and micro-batch, by the search of search.py or by what trials.py
has measured here. Keys that follow from the rows are in sizes.py. recipe/derived.py replaces what the recipe
alone decides when it is loaded, such as `model.compile` beside a key that excludes it. The commands that
plan and a run (`run/resolve.py`) do the rest here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from launcher.console import bytes_as_text, seconds_as_text
from launcher.errors import RecipeError
from launcher.planner.candidates import Configuration
from launcher.planner.facts import Facts, Profiles
from launcher.planner.formatting import batch_text, needs_text, strategy_text
from launcher.planner.machine import DISK, Machine
from launcher.planner.memory import Plan
from launcher.planner.plan import estimated_plan
from launcher.planner.recipe_values import has_reductions_to_choose, micro_batches_of
from launcher.planner.search import concrete, fastest_that_fits, search_configurations
from launcher.planner.sizes import choose_rate, choose_sizes
from launcher.planner.speed import estimate_time
from launcher.planner.trials import measured_choice
from launcher.planner.work import Work, with_most_saved
from launcher.recipe.decode import value_of
from launcher.recipe.derived import Choices, Derived, open_sizes, stands_for, with_value
from launcher.recipe.schema import Recipe
from launcher.recipe.section import AutoFloat, AutoInt
from launcher.recipe.yaml_text import as_override, changes_between, overrides_between
from launcher.reliability.json_files import Json
from launcher.strategies.base import compute_dtype, dtype_name

COST = "each block then launches some 60 more kernels in a micro-batch"
"""Measured on null GPUs: 57 for a Llama block, 76 with full activation checkpointing."""
COLLECTIVE_KEYS = ("sync_every_micro_batch", "reshard_after_forward")
"""Keys of `strategy`. Their `auto` becomes false if `ROOM` of the memory stays free with false, and
else true."""
HOURS_BETWEEN_FAILURES = 45_000
"""Hours between interruptions, times the number of GPUs: 466 in 54 days on 16,384 H100 (Llama 3, 2024, arXiv
2407.21783, section 3.3.4)."""
SAVE_SECONDS = 0.5
"""Time of a save beside its copies: all ranks agree, and wait for the slowest. An estimate."""
ROOM = 0.15
"""Share of the memory that must stay free by estimate, which is good to some 10 %."""
CPU_ROOM = 0.5
"""Share of the host memory that must stay free on CPUs, where other processes need memory too. It
also holds for the configuration that `auto` chooses."""
CPU_SECONDS = 20.0
"""Most seconds of a micro-batch that `auto` chooses on CPUs: progress is logged after each
micro-batch."""
SLOW_STEP = 60.0
"""If a step takes as many seconds by plan, the message of a choice for CPUs names a smaller
batch."""


def open_collectives(recipe: Recipe, *, ranks: int) -> list[str]:
    """The keys in `COLLECTIVE_KEYS` that are `auto` and have an effect; empty if the plan decides."""
    if recipe.strategy.kind != "fsdp" or SEARCH.open(recipe) or recipe.uses_one_rank(ranks):
        return []
    keys = COLLECTIVE_KEYS if has_reductions_to_choose(recipe, ranks=ranks) else COLLECTIVE_KEYS[1:]
    return [key for key in keys if getattr(recipe.strategy, key) == "auto"]


def choose_compile(recipe: Recipe, facts: Facts) -> tuple[Recipe, str]:
    """Replaces `auto` in `model.compile`. Compiled blocks round differently, so a run keeps the value
    of its checkpoint, unless that is true and this machine cannot compile."""
    assert facts.machine is not None
    why, before = facts.why_eager, facts.recorded.get("model", {}).get("compile")
    on = why is None and before is not False
    reason = "" if on else "as in the checkpoint; model.compile=true compiles from here on"
    if why is not None:
        reason = f"{why}; {COST}" if facts.machine.device == "cuda" else why
    return with_value(recipe, "model.compile", on), reason


def choose_collectives(recipe: Recipe, facts: Facts) -> tuple[Recipe, str] | None:
    """Replaces `auto` in `COLLECTIVE_KEYS` by the fewest collectives with which `ROOM` of the memory
    stays free by estimate. On CPUs the host memory of a node must suffice for them, too, together
    with data and checkpoints. On GPUs the host memory does not depend on the collectives. Returns the
    recipe and the reason; None if no key is `auto` that has an effect."""
    machine, earlier = facts.machine, facts.exact
    assert machine is not None
    assert facts.profiles is not None
    if not (keys := open_collectives(recipe, ranks=machine.ranks)):
        return None
    shapes, trace = facts.profiles(recipe)
    # Reducing once a step comes first: with several micro-batches it saves as much traffic or more
    *fewer, most = (
        _with_strategy(recipe, dict(zip(keys, values, strict=True)))
        for values in itertools.product((False, True), repeat=len(keys))
    )
    known, on_cpu = machine.memory or 0, machine.device == "cpu"
    memory = _memory_text(machine)
    # One rank has none: weights in the compute dtype are then kept, and not made for each block
    what = "fewer collectives"
    if machine.ranks == 1:
        what = f"all weights in {dtype_name(compute_dtype(recipe.strategy))}"
    chosen, why = most, f"{what} would leave less than {ROOM:.0%} of {memory} free"
    profiles = shapes, cache(trace)
    host_needed: list[int] = []
    """The host memory that a node would need, of each choice that fits a device but not a node."""

    estimated = False

    def leaves(share: float, choice: Recipe) -> bool:
        nonlocal estimated
        short = 0
        for plan in estimates(choice, machine, profiles):
            estimated = True
            if plan.spare is not None and plan.spare >= share * known:
                if not on_cpu or plan.host_spare is None or plan.host_spare >= 0:
                    return True
                short = plan.host.total
        host_needed.extend([short] * (short > 0))
        return False

    # An earlier version recorded `auto`, which meant true
    kept = _with_strategy(recipe, {key: (earlier or {}).get(key) is not False for key in keys})
    if any(False in map(event.get, COLLECTIVE_KEYS) for event in _failures(recipe, facts)):
        why = f"with {what} an earlier start ran out of memory"
    elif earlier is not None and (not known or kept == most or leaves(0, kept)):
        chosen, why = kept, "as in the checkpoint, so that the resume is exact"
    elif not known:
        why = "the size of the memory is not known"
    elif choice := next((each for each in fewer if leaves(ROOM, each)), None):
        chosen, why = choice, f"by estimate {ROOM:.0%} of {memory} or more stay free"
    elif host_needed:
        of = f"{bytes_as_text(machine.host_memory or 0)} of host memory"
        why = f"{what} would need {bytes_as_text(min(host_needed))} of a node's {of}"
    elif not estimated:
        why = _NO_ESTIMATE
    return chosen, why


def _memory_text(machine: Machine) -> str:
    """`79.6 GiB of GPU memory`: the memory of a rank's device."""
    kind = "host memory a rank" if machine.device == "cpu" else "GPU memory"
    return f"{bytes_as_text(machine.memory or 0)} of {kind}"


def choose_logits(recipe: Recipe, facts: Facts) -> tuple[Recipe, str] | None:
    """Replaces `auto` in `model.keep_logits`: by true if `ROOM` of the memory, on CPUs `CPU_ROOM`,
    stays free by estimate with kept logits. Returns the recipe and the reason; None if no logits would
    be computed again, or if the size of the memory is not known.

    A resume need not keep the choice, which changes no bits.
    """
    machine = facts.machine
    assert machine is not None
    assert facts.profiles is not None
    if recipe.distillation is not None or not (known := machine.memory or 0):
        return None
    profiles = facts.profiles(recipe)
    if not Work(profiles[0], recipe, ranks=machine.ranks).chunked:
        return None
    kept, again = (with_value(recipe, "model.keep_logits", keeps) for keeps in (True, False))
    memory = _memory_text(machine)
    room = CPU_ROOM if machine.device == "cpu" else ROOM
    chosen, why = again, f"kept logits would leave less than {room:.0%} of {memory} free"
    if any(event.get("keep_logits") is True for event in _failures(recipe, facts)):
        why = "with kept logits an earlier start ran out of memory"
    elif not (plans := list(estimates(kept, machine, profiles))):
        why = _NO_ESTIMATE
    elif any(plan.spare is not None and plan.spare >= room * known for plan in plans):
        chosen, why = kept, f"by estimate {room:.0%} of {memory} or more stay free"
    return chosen, why


def choose_saves(recipe: Recipe, facts: Facts) -> tuple[Recipe, str] | None:
    """Replaces `auto` in `checkpoint.every_steps`, if fewer steps than those that the rows suggest lose
    least time: to saves, and to the steps that a failure of a GPU takes back. The best time between
    saves is sqrt(2 * time of a save * time between failures) (Young, 1974). Returns the recipe and the
    reason; None if the steps stay."""
    machine, usual = facts.machine, recipe.checkpoint.every_steps
    assert machine is not None
    assert facts.profiles is not None
    if machine.device != "cuda" or usual is None or not recipe.checkpoint.saves:
        return None
    profiles = facts.profiles(recipe)
    if (plan := next(estimates(recipe, machine, profiles), None)) is None:
        return None
    part = plan.checkpoint_bytes / machine.ranks
    save = SAVE_SECONDS + part / machine.rates.host_bandwidth  # then it is written beside training
    if not recipe.checkpoint.asynchronous:
        save = SAVE_SECONDS + part * machine.gpus_per_node / DISK
    step = estimate_time(Work(profiles[0], recipe, ranks=machine.ranks), machine).total
    failing = HOURS_BETWEEN_FAILURES / machine.ranks
    every = max(1, round(math.sqrt(2 * save * 3600 * failing) / step))
    if every >= usual:
        return None
    why = (
        f"a step takes about {step:.2g} s and a save {save:.2g} s by plan, and one of "
        f"{machine.ranks:,} GPUs fails about every {failing:.2g} hours"
    )
    return with_value(recipe, "checkpoint.every_steps", every), why


_NO_ESTIMATE = "what the blocks of this model save is not known without a trace"


def _with_strategy(recipe: Recipe, values: Mapping[str, bool]) -> Recipe:
    strategy: Any = dataclasses.replace(recipe.strategy, **values)  # type: ignore[arg-type]
    return dataclasses.replace(recipe, strategy=strategy)


def estimates(recipe: Recipe, machine: Machine, profiles: Profiles) -> Iterator[Plan]:
    """Estimates of the memory: first a quick one that is too high, then a good one. There are no
    estimates for models of the user's own code: only a trace finds out what such a model saves."""
    shapes, checkpointing = profiles[0], recipe.activation_checkpointing
    if recipe.model.builder is not None or recipe.data.builder is not None:
        return
    if shapes.packed_attention and (checkpointing is None or checkpointing.budget is None):
        most = with_most_saved(shapes, recipe)
        yield estimated_plan(Work(most, recipe, ranks=machine.ranks), machine)
    if (traced := profiles[1]()).saved:
        yield estimated_plan(Work(traced, recipe, ranks=machine.ranks), machine)


def choose_configuration(recipe: Recipe, facts: Facts) -> tuple[Recipe, str] | None:
    """Replaces `auto` in strategy and micro-batch by the fastest configuration that was measured.
    Without measurements, by the fastest one that fits by plan.

    Micro-batch sizes that ran out of memory in an earlier start of the run, on as many of the same
    devices, are not chosen again, nor are larger ones. Returns the recipe and the reason; None if
    nothing fits, or if the size of the memory is not known.
    """
    machine = facts.machine
    assert machine is not None
    failed = min(failed_micro_batches(recipe, facts), default=None)
    if failed == 1 and facts.must_fit:
        raise RecipeError(
            "batch.micro_batch_size: auto: a micro-batch of 1 ran out of memory in an earlier "
            f"start of this run on {machine.ranks} x {machine.name}; there is no smaller one. "
            "`launcher plan` shows configurations that need less"
        )
    limit = None if failed is None else failed - 1
    after = f"; micro-batches of {failed} and more ran out of memory before" if failed else ""
    if kept := measured_choice(recipe, machine, limit_micro_batch=limit):
        chosen, why = kept
        return chosen, why + after
    find = _fastest_on_cpu if machine.device == "cpu" else fastest_that_fits
    best = find(recipe, machine, limit_micro_batch=limit)
    if best is None:
        if facts.must_fit:
            raise _nothing_fits(recipe, machine)
        return None
    if machine.device == "cpu" and best.seconds.total > SLOW_STEP:
        after += _slow_step_text(best)
    if best.plan.has_room is False:
        after = f"; slow, because less than {bytes_as_text(best.plan.room)} are to spare{after}"
    why = (
        f"{strategy_text(best.recipe, machine.ranks)}; {batch_text(best.recipe, machine.ranks)}. "
        f"The fastest that fits: by plan {needs_text(best, machine.memory, machine.device)}{after}"
    )
    return best.recipe, why


def _nothing_fits(recipe: Recipe, machine: Machine) -> RecipeError:
    """With suggestions."""
    of = f" with {bytes_as_text(machine.memory)} each" if machine.memory is not None else ""
    if machine.host_memory is not None:
        of += f" and {bytes_as_text(machine.host_memory)} of host memory a node"
    devices = f"{machine.ranks} x {machine.name}"
    problem = f"{SEARCH.open(recipe)[0]}: auto: no configuration fits {devices}{of}"
    result = search_configurations(recipe, machine)
    suggestions = result.suggestions
    if (best := result.best) is not None:  # it changes more keys than those that are auto
        suggestions = (f"{strategy_text(best.recipe, machine.ranks)}: {' '.join(best.overrides)}",)
    return RecipeError([problem, *(f"  {text}" for text in suggestions)])


def _fastest_on_cpu(
    recipe: Recipe, machine: Machine, *, limit_micro_batch: int | None
) -> Configuration | None:
    """Like `fastest_that_fits`, but with micro-batches of at most `CPU_SECONDS`, and in half of the
    memory if a configuration fits there."""

    def half(size: int | None) -> int | None:
        return None if size is None else round(CPU_ROOM * size)

    smaller = dataclasses.replace(
        machine, memory=half(machine.memory), host_memory=half(machine.host_memory)
    )
    for on in (smaller, machine):
        best = fastest_that_fits(recipe, on, limit_micro_batch=limit_micro_batch)
        if best is None:
            continue
        size = best.recipe.batch.micro_batch_size
        micro_batches = micro_batches_of(best.recipe, ranks=machine.ranks)
        seconds = best.seconds.total / micro_batches
        if isinstance(size, int) and size > 1 and seconds > CPU_SECONDS:
            most = max(1, int(size * CPU_SECONDS / seconds))
            best = fastest_that_fits(recipe, on, limit_micro_batch=most) or best
        return best
    return None


def _slow_step_text(best: Configuration) -> str:
    seconds, batch = best.seconds.total, best.recipe.batch.global_batch_size
    text = f"; a step takes about {seconds_as_text(seconds)} by plan"
    if (fewer := max(1, int(batch * CPU_SECONDS / seconds))) < batch:
        text += f", with batch.global_batch_size={fewer} about {seconds_as_text(seconds * fewer / batch)}"
    return text


def recorded_settings(recipe: Recipe, machine: Machine) -> Json:
    """What events.jsonl records with an out-of-memory failure, besides the number of ranks."""
    checkpointing, offload = recipe.activation_checkpointing, recipe.strategy.cpu_offload
    return {
        "micro_batch_size": recipe.batch.micro_batch_size,
        "device": machine.name,
        "sequence_length": recipe.data.sequence_length,
        "lora": recipe.lora is not None,
        "checkpointing": None if checkpointing is None else checkpointing.mode,
        "cpu_offload": offload is not None and (offload.what == "all" or offload.what),
        "keep_logits": recipe.model.keep_logits,
    } | {key: getattr(recipe.strategy, key) for key in COLLECTIVE_KEYS}


def failed_micro_batches(recipe: Recipe, facts: Facts) -> list[int]:
    """Micro-batch sizes of `_failures`, if that of the recipe is `auto`. With strategy `auto`
    checkpointing and offload may differ."""
    if recipe.batch.micro_batch_size != "auto":
        return []
    others = ("checkpointing", "cpu_offload") if recipe.strategy.kind == "auto" else ()
    failures = _failures(recipe, facts, "micro_batch_size", *others)
    sizes = (event.get("micro_batch_size") for event in failures)
    return [size for size in sizes if size is not None]


def _failures(recipe: Recipe, facts: Facts, *except_for: str) -> list[Json]:
    """Earlier starts of a run, on as many of the same devices and with the same settings, that ran
    out of memory. Their collectives and kept logits may differ, and the settings `except_for`."""
    assert facts.machine is not None
    same = recorded_settings(recipe, facts.machine) | {"ranks": facts.ranks}
    same |= {"event": "failed", "reason": "out_of_memory"}
    for key in ("keep_logits", *COLLECTIVE_KEYS, *except_for):
        del same[key]
    return [
        event
        for event in facts.events
        if all(event.get(name) == value for name, value in same.items())
    ]


# The table of decisions, and what makes them


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
    keys=tuple(f"strategy.{key}" for key in COLLECTIVE_KEYS),
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
