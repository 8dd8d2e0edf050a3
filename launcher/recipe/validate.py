"""Checks the rules that join several keys of a recipe.

The rules of model and data are in `rules_model.py` and `rules_data.py`. A rule is a generator of
problems: (dotted key, what is wrong with it).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from launcher.recipe import rules_data, rules_model
from launcher.recipe.decode import KeyPath, Problem
from launcher.recipe.schema import Recipe, Slurm, Strategy

Found = Iterator[tuple[str, str]]

_NODES = re.compile(r"[1-9]\d*(-[1-9]\d*)?")
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)


class _UnsoundError(Exception):
    """A rule reads a key without a sound value."""


class _Sound:
    """A section as rules see it: reading a key without a sound value ends the rule."""

    def __init__(self, section: Any, path: KeyPath, unsound: set[KeyPath]) -> None:
        self._section, self._path, self._unsound = section, path, unsound

    def __getattr__(self, name: str) -> Any:
        path, value = (*self._path, name), getattr(self._section, name)
        is_section = dataclasses.is_dataclass(value)
        for bad in self._unsound:
            if path[: len(bad)] == bad or (bad[: len(path)] == path and not is_section):
                raise _UnsoundError
        return _Sound(value, path, self._unsound) if is_section else value


def check(
    recipe: Recipe, *, ranks: int | None, unsound: set[KeyPath], files: bool = True
) -> list[Problem]:
    """Returns all broken rules.

    ranks: data-parallel ranks; None: not known yet. files: whether the data must exist.
    unsound: keys without a sound value. A rule that reads one, or a key inside it, is skipped.
    """
    rules: list[Callable[[Recipe], Found]] = [*_RULES, *rules_model.RULES, *rules_data.RULES]
    rules += [partial(_batches, ranks=ranks), partial(_strategy, ranks=ranks)]
    rules += rules_data.FILE_RULES if files else ()
    problems = []
    for rule in rules:
        with contextlib.suppress(_UnsoundError):
            for key, message in rule(cast(Recipe, _Sound(recipe, (), unsound))):
                problems.append(Problem(tuple(key.split(".")), message))
    return problems


def resumes(recipe: Recipe) -> bool:
    """Whether there is a checkpoint that the run would resume from."""
    resume = recipe.checkpoint.resume
    return _has_checkpoints(recipe) if resume == "auto" else resume != "never"


def _has_checkpoints(recipe: Recipe) -> bool:
    return next(Path(recipe.run.dir, "checkpoints").glob("step_*"), None) is not None


def leaves_open(recipe: Recipe) -> bool:
    """Whether a key is `auto`, so that the memory plan decides it."""
    return recipe.strategy.kind == "auto" or recipe.batch.micro_batch_size == "auto"


def _name(recipe: Recipe) -> Found:
    name = recipe.run.name
    if any(character in name for character in "/\\\n\t\0") or name in (".", ".."):
        yield "run.name", f"must be usable as a folder's name; got {name!r}"


def _home(recipe: Recipe) -> Found:
    for key, folder in (("run.dir", recipe.run.dir), ("data.cache", recipe.data.cache)):
        if folder is not None and folder.startswith("~"):
            what = "~ is not expanded in a recipe; write the whole path, or ${oc.env:HOME}"
            yield key, f"{what}; got {folder!r}"


def _run_dir(recipe: Recipe) -> Found:
    folder = Path(recipe.run.dir).absolute()
    nearest = next((path for path in (folder, *folder.parents) if os.path.exists(path)), None)
    if nearest is not None and not nearest.is_dir():
        what = "is a file, and must be a folder; give another, or move the file away"
        yield "run.dir", f"{nearest} {what}"


def _length(recipe: Recipe) -> Found:
    steps, epochs = recipe.run.max_steps, recipe.run.epochs
    if steps is None and epochs is None:
        yield "run.max_steps", "missing; give max_steps or epochs"
    if steps is not None and epochs is not None:
        yield "run.epochs", f"max_steps {steps} is given too; set one of the two to null"


def _micro_batch_tokens(recipe: Recipe) -> Found:
    batch, data = recipe.batch, recipe.data
    tokens, key = batch.micro_batch_tokens, "batch.micro_batch_tokens"
    if tokens is None:
        if batch.micro_batch_size is None:
            what = "missing; must be given: a whole number (or give micro_batch_tokens)"
            yield "batch.micro_batch_size", what
        return
    if batch.micro_batch_size is not None:
        given = f"micro_batch_size {batch.micro_batch_size} is given too"
        yield key, f"{given}; set one of the two to null"
    if data.builder is not None or data.streaming:
        other = "data.builder" if data.builder is not None else "data.streaming"
        what = "where lengths are not known beforehand; use micro_batch_size"
        yield key, f"not available with {other}, {what}"
    elif data.packing and data.kind != "classification":
        what = "whose sequences are all as long; use micro_batch_size"
        yield key, f"not available with data.packing: true, {what}"
    elif tokens < data.sequence_length:
        what = f"one sequence of {data.sequence_length} tokens (data.sequence_length)"
        yield key, f"{tokens} does not hold {what}"


def _batches(recipe: Recipe, *, ranks: int | None) -> Found:
    size, micro = recipe.batch.global_batch_size, recipe.batch.micro_batch_size
    if micro is None:  # batches are formed by tokens: of any number of sequences
        return
    if (micro == "auto" or size % micro == 0) and resumes(recipe):
        return  # on other ranks than before: the last micro-batches may be smaller
    unit = (1 if micro == "auto" else micro) * (ranks or 1)
    if size % unit:
        below, above = size // unit * unit, (size // unit + 1) * unit
        advice = f"{below} or {above}" if below else f"{above}"
        product = f"{micro} (micro-batch)"
        if ranks:
            product = f"{micro} (micro-batch) x {ranks} (ranks) = {unit}"
        if micro == "auto":
            product = f"{ranks} (ranks)"
        what = f"{size} is not a multiple of {product}; try {advice}"
        yield "batch.global_batch_size", what


def _strategy(recipe: Recipe, *, ranks: int | None) -> Found:
    strategy, use_fsdp = recipe.strategy, "use kind fsdp"
    if strategy.kind == "ddp":
        names = ("cpu_offload", "replicate", "reshard_after_forward", "reshard_after_backward")
        for name in names:
            if getattr(strategy, name) != getattr(Strategy, name):
                yield f"strategy.{name}", f"not available with kind ddp; {use_fsdp}"
        precision = strategy.mixed_precision
        if precision is not None and precision.reduce_dtype != "float32":
            what = f"not available with kind ddp, which reduces in float32; {use_fsdp}"
            yield "strategy.mixed_precision.reduce_dtype", what
    elif ranks is not None and ranks % strategy.replicate:
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        what = f"{strategy.replicate} does not divide {ranks} (ranks); try one of {divisors}"
        yield "strategy.replicate", what


def _schedule(recipe: Recipe) -> Found:
    schedule = recipe.schedule
    if schedule.decay_steps is not None and schedule.kind != "wsd":
        what = f"not available with kind {schedule.kind}; use kind wsd"
        yield "schedule.decay_steps", what


def _evaluation(recipe: Recipe) -> Found:
    data = recipe.data
    if recipe.evaluation.at_start and data.validation is None and data.builder is None:
        yield "evaluation.at_start", "needs data.validation"


def _checkpoint(recipe: Recipe) -> Found:
    checkpoint, data = recipe.checkpoint, recipe.data
    if checkpoint.keep_best is not None and data.validation is None and data.builder is None:
        yield "checkpoint.keep_best", "needs data.validation, whose loss it goes by"
    if checkpoint.export is None and checkpoint.export_dtype is not None:
        yield "checkpoint.export_dtype", "needs checkpoint.export: at_end"
    if checkpoint.export_merged and (checkpoint.export is None or recipe.lora is None):
        what = "needs checkpoint.export: at_end, and lora, whose adapters it adds in"
        yield "checkpoint.export_merged", what
    resume = checkpoint.resume
    named = resume not in ("auto", "never")
    # A run with checkpoints of its own resumes from these: the named one may be gone by then
    if named and not os.path.isdir(resume) and not _has_checkpoints(recipe):
        what = "give auto, never, or a checkpoint such as runs/NAME/checkpoints/step_00000500"
        yield "checkpoint.resume", f"no such folder: {resume}; {what}"
    if recipe.run.on_divergence == "rewind" and checkpoint.every_steps is None:
        what = "rewind needs checkpoint.every_steps, to have something to go back to"
        yield "run.on_divergence", what


def _profile(recipe: Recipe) -> Found:
    profile, max_steps = recipe.profile, recipe.run.max_steps
    if profile is None or max_steps is None:
        return
    first, last = profile.start_step, profile.start_step + profile.steps - 1
    if last > max_steps:
        yield "profile.steps", f"steps {first} to {last} go beyond run.max_steps {max_steps}"


def _slurm(recipe: Recipe) -> Found:
    slurm = recipe.slurm
    if slurm is None:
        return
    if isinstance(slurm.nodes, str):
        first, _, last = slurm.nodes.partition("-")
        if not _NODES.fullmatch(slurm.nodes) or int(last or first) < int(first):
            yield "slurm.nodes", f"must be a number, or a range such as 2-4; got {slurm.nodes!r}"
    if slurm.time is not None and not _TIME.fullmatch(slurm.time):
        what = "must be minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS"
        yield "slurm.time", f"{what}; got {slurm.time!r}"
    if slurm.host_memory is not None and not _MEMORY.fullmatch(slurm.host_memory):
        what = "must be a number with K, M, G or T, such as 500G"
        yield "slurm.host_memory", f"{what}; got {slurm.host_memory!r}"
    yield from _job_script(slurm)


def _job_script(slurm: Slurm) -> Found:
    """What would break the job script that these texts are written into."""
    keys = ("partition", "account", "qos", "constraint", "exclude", "reservation", "mail")
    for key in (*keys, "interface", "python"):
        text = getattr(slurm, key)
        if text is not None and not text.isprintable():
            what = "holds a character that cannot stand in a job script"
            yield f"slurm.{key}", f"{what}; got {text!r}"
    for key in ("sbatch_extra", "srun_extra"):
        for option in getattr(slurm, key) or ():
            if not re.fullmatch(r"--?[a-zA-Z][\w-]*(=.*)?", option) or not option.isprintable():
                yield f"slurm.{key}", f"must be options, --name or --name=value; got {option!r}"
    for name, value in (slurm.environment or {}).items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield "slurm.environment", f"{name!r} is no name of an environment variable"
        if "\0" in value:
            yield f"slurm.environment.{name}", "holds a null character"


_RULES = (
    _name,
    _home,
    _run_dir,
    _length,
    _micro_batch_tokens,
    _schedule,
    _evaluation,
    _checkpoint,
    _profile,
    _slurm,
)
