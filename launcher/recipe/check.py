"""The rules that join several keys, and the keys whose part is not built yet.

A rule names the keys it reads; where one of them is unsound already, the rule is silent about it.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.recipe.decode import KeyPath, Problem
from launcher.recipe.model_config import config_problems
from launcher.recipe.schema import Checkpoint, Recipe, Strategy

Found = Iterator[tuple[str, str]]
"""Dotted key and what is wrong with it."""


@dataclass(frozen=True)
class _Rule:
    reads: tuple[str, ...]
    test: Callable[[Recipe, int | None], Found]


_RULES: list[_Rule] = []


def _rule(*reads: str) -> Callable[[Callable[[Recipe, int | None], Found]], Callable[[Recipe, int | None], Found]]:
    def register(test: Callable[[Recipe, int | None], Found]) -> Callable[[Recipe, int | None], Found]:
        _RULES.append(_Rule(reads, test))
        return test

    return register


def check(recipe: Recipe, *, ranks: int | None, unsound: set[KeyPath]) -> list[Problem]:
    """All broken rules.

    ranks: data-parallel ranks; None: not known yet.
    unsound: keys that did not decode; rules that read them, or what is inside them, are left out.
    """
    problems = []
    for rule in _RULES:
        paths = [tuple(key.split(".")) for key in rule.reads]
        if any(bad[: len(path)] == path or path[: len(bad)] == bad for path in paths for bad in unsound):
            continue
        problems += [Problem(tuple(key.split(".")), message) for key, message in rule.test(recipe, ranks)]
    return problems


@_rule("run.name")
def _name(recipe: Recipe, ranks: int | None) -> Found:
    if any(character in recipe.run.name for character in "/\\\n\t\0") or recipe.run.name in (".", ".."):
        yield "run.name", f"must be usable as a folder's name; got {recipe.run.name!r}"


@_rule("run.dir", "data.cache")
def _home(recipe: Recipe, ranks: int | None) -> Found:
    for key, folder in (("run.dir", recipe.run.dir), ("data.cache", recipe.data.cache)):
        if folder is not None and folder.startswith("~"):
            yield key, f"~ is not expanded in a recipe; write the whole path, or ${{oc.env:HOME}}; got {folder!r}"


@_rule("run.max_steps", "run.epochs")
def _length(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.run.max_steps is None and recipe.run.epochs is None:
        yield "run.max_steps", "missing; give max_steps or epochs"
    if recipe.run.max_steps is not None and recipe.run.epochs is not None:
        yield "run.epochs", f"max_steps {recipe.run.max_steps} is given too; set one of the two to null"


@_rule("model.path", "model.config")
def _model(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.model.path is None and recipe.model.config is None:
        yield "model.config", "missing; give a config, such as {model_type: llama, hidden_size: 256, ...}"
    if recipe.model.path is not None and recipe.model.config is not None:
        yield "model.config", "model.path is given too; set one of the two to null"
    if recipe.model.path is not None:
        yield "model.path", "not built yet: a run from a Hugging Face checkpoint; give model.config"


@_rule("model.config", "model.init")
def _init(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.model.init == "pretrained" and recipe.model.path is None:
        yield "model.init", "pretrained needs model.path; with model.config the weights are random"


@_rule("model.config")
def _model_config(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.model.config is not None:
        for key, message in config_problems(recipe.model.config):
            yield f"model.config.{key}" if key else "model.config", message


@_rule("data.kind", "data.tokenizer", "model.path")
def _tokenizer(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.data.kind in ("chat", "instruct"):
        yield "data.kind", f"not built yet: {recipe.data.kind}; use text or tokens"
    if recipe.data.kind == "text" and recipe.data.tokenizer is None and recipe.model.path is None:
        yield "data.tokenizer", "missing; a model.config has none of its own: give `bytes` or a folder with a tokenizer"
    tokenizer = recipe.data.tokenizer
    if recipe.data.kind == "text" and tokenizer not in (None, "bytes") and not os.path.isdir(str(tokenizer)):
        yield "data.tokenizer", f"no such folder: {tokenizer}; give `bytes` or a folder with a tokenizer (a hub id: not built yet)"


@_rule("data.kind", "data.tokenizer", "model.config")
def _vocabulary(recipe: Recipe, ranks: int | None) -> Found:
    size = (recipe.model.config or {}).get("vocab_size")
    if recipe.data.kind == "text" and recipe.data.tokenizer == "bytes" and isinstance(size, int) and size < 257:
        yield (
            "model.config.vocab_size",
            f"{size} is too small for the tokenizer `bytes`: 256 bytes and an end of document; give 257 or more",
        )


@_rule("data.train")
def _train_files(recipe: Recipe, ranks: int | None) -> Found:
    yield from _missing_files("data.train", recipe.data.train)


@_rule("data.validation")
def _validation_files(recipe: Recipe, ranks: int | None) -> Found:
    yield from _missing_files("data.validation", recipe.data.validation or ())


def _missing_files(key: str, patterns: tuple[str, ...]) -> Found:
    for index, pattern in enumerate(patterns):
        if not os.path.exists(pattern) and next(glob.iglob(pattern, recursive=True), None) is None:
            what = "matches no file" if any(c in pattern for c in "*?[") else "no such file or folder"
            yield f"{key}.{index}", f"{pattern!r}: {what} (looked for in {Path.cwd()}; a hub data set: not built yet)"


@_rule("data.packing", "model.attention")
def _packing(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.data.packing and recipe.model.attention not in ("sdpa", "eager"):
        yield "model.attention", f"not built yet: packing with {recipe.model.attention}; use sdpa or eager, or packing: false"


@_rule("batch.global_batch_size", "batch.micro_batch_size")
def _batches(recipe: Recipe, ranks: int | None) -> Found:
    size, micro = recipe.batch.global_batch_size, recipe.batch.micro_batch_size
    unit = micro * (ranks or 1)
    if size % unit:
        below, above = size // unit * unit, (size // unit + 1) * unit
        advice = f"{below} or {above}" if below else f"{above}"
        product = f"{micro} (micro-batch) x {ranks} (ranks) = {unit}" if ranks else f"{micro} (micro-batch)"
        yield "batch.global_batch_size", f"{size} is not a multiple of {product}; try {advice}"


@_rule("strategy")
def _strategy(recipe: Recipe, ranks: int | None) -> Found:
    strategy = recipe.strategy
    if strategy.kind == "auto":
        yield "strategy.kind", "not built yet: auto; use ddp or fsdp"
    if strategy.kind == "ddp":
        for name in ("cpu_offload", "replicate", "reshard_after_forward", "reshard_after_backward"):
            default = {field.name: field.default for field in dataclasses.fields(Strategy)}[name]
            if getattr(strategy, name) != default:
                yield f"strategy.{name}", "not available with kind ddp; use kind fsdp"
        if strategy.mixed_precision is not None and strategy.mixed_precision.reduce_dtype != "float32":
            yield "strategy.mixed_precision.reduce_dtype", "not available with kind ddp, which reduces in float32; use kind fsdp"
    elif ranks is not None and ranks % strategy.replicate:
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        yield "strategy.replicate", f"{strategy.replicate} does not divide {ranks} (ranks); try one of {divisors}"


@_rule("schedule")
def _schedule(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.schedule.decay_steps is not None and recipe.schedule.kind != "wsd":
        yield "schedule.decay_steps", f"not available with kind {recipe.schedule.kind}; use kind wsd"


@_rule("evaluation", "data.validation")
def _evaluation(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.evaluation.at_start and recipe.data.validation is None:
        yield "evaluation.at_start", "needs data.validation"


@_rule("checkpoint")
def _checkpoint(recipe: Recipe, ranks: int | None) -> Found:
    defaults = Checkpoint()
    for name in ("every_steps", "keep_last", "asynchronous"):
        if getattr(recipe.checkpoint, name) != getattr(defaults, name):
            yield f"checkpoint.{name}", "not built yet: checkpoints to resume from; leave it out, or use export: at_end"
    if recipe.checkpoint.resume not in ("auto", "never"):
        yield "checkpoint.resume", f"not built yet: resuming; use auto or never, not {recipe.checkpoint.resume!r}"


@_rule("profile", "run.max_steps")
def _profile(recipe: Recipe, ranks: int | None) -> Found:
    profile, last = recipe.profile, recipe.run.max_steps
    if profile is not None and last is not None and profile.start_step + profile.steps - 1 > last:
        yield "profile.steps", f"steps {profile.start_step} to {profile.start_step + profile.steps - 1} go beyond run.max_steps {last}"
