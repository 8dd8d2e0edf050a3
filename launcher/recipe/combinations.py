"""Keys of a recipe that need, or exclude, other keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launcher.distributed.rank_layout import PARALLEL_SIZES
from launcher.libraries.extras import missing_extra
from launcher.recipe.decode import KeyPath, subsection
from launcher.recipe.layouts import (
    ATTACHMENTS,
    EXPLICIT_ONLY,
    KEYS,
    KINDS,
    NAMES,
    RowKind,
    kinds_where,
    named_columns,
    role_of,
    roles_of,
)
from launcher.recipe.objectives import OBJECTIVES
from launcher.recipe.schema import Recipe

Problems = Iterator[tuple[str | KeyPath, str]]
"""Dotted keys, or paths of keys, and what is wrong with them."""

_FLOAT8 = "strategy.mixed_precision.float8"
_OFFLOADED_STATE = "strategy.cpu_offload.what strategy.cpu_offload.optimizer_path"
_EVERY = ("evaluation", "checkpoint")
"""Sections with `every_steps`, whose default `every_epochs` replaces."""


def _kinds_with(role: str) -> list[str]:
    return [kind for kind in KINDS if role in roles_of(kind)]


def _kinds(holds: Callable[[RowKind], object]) -> str:
    return " ".join(kinds_where(holds))


_Rule = tuple[str, str, bool | str]


def _of_attachments(section: str) -> tuple[_Rule, ...]:
    return (
        (section, "model.path", True),
        (section, "model.builder data.builder distillation", False),
        (section, "data.tokenizer", False),
        (section, "model.task", "causal_lm"),
        (section, "data.kind", _kinds(lambda kind: kind.templated)),
        (section, "data.prompt_format", "auto chat"),
        (f"{section}.train", "lora", False),
        (f"{section}.learning_rate_ratio", f"{section}.train", "projector all"),
    )


_NEEDS: tuple[_Rule, ...] = (
    ("model.arguments", "model.builder", True),
    ("model.task model.num_labels model.attention model.init", "model.builder", False),
    ("model.trust_remote_code", "model.path", True),
    ("model.freeze", "lora", False),
    ("data.arguments", "data.builder", True),
    ("data.train data.validation data.streaming data.text_column", "data.builder", False),
    ("data.validation_split", "data.builder", False),
    *((f"data.{key}", "data.kind", " ".join(_kinds_with(role))) for role, key in KEYS.items()),
    *(rule for objective in OBJECTIVES for rule in objective.rules),
    ("lora.path", "model.path", True),
    *(rule for section in ATTACHMENTS.values() for rule in _of_attachments(section)),
    ("data.labels", "data.kind", _kinds(lambda kind: kind.loss_on == "class")),
    (
        "data.chat_template data.chat_template_kwargs data.date data.system",
        "data.kind",
        _kinds(lambda kind: kind.templated),
    ),
    ("data.loss_on", "data.kind", _kinds(lambda kind: kind.loss_on == "answers")),
    ("data.prompt_format", "data.kind", _kinds(lambda kind: kind.answers)),
    ("data.overlong", "data.builder", False),
    ("data.columns data.ignore_columns", "data.builder", False),
    ("data.limit data.similar_lengths", "data.builder", False),
    ("data.shard_size", "data.streaming", True),
    ("run.epochs", "data.streaming", False),
    ("run.on_divergence", "checkpoint.every_steps checkpoint.every_epochs", True),
    ("evaluation.every_epochs checkpoint.every_epochs", "data.streaming", False),
    *((f"{name}.every_steps", f"{name}.every_epochs", False) for name in _EVERY),
    ("batch.micro_batch_tokens", "data.builder", False),
    ("strategy.cpu_offload strategy.replicate", "strategy.kind", "fsdp auto"),
    ("strategy.reshard_after_backward", "strategy.kind", "fsdp auto"),
    ("strategy.mixed_precision.reduce_dtype", "strategy.kind", "fsdp auto"),
    (_FLOAT8, "strategy.mixed_precision.param_dtype", "bfloat16"),
    (_FLOAT8, "lora", False),
    ("strategy.shard_optimizer", "strategy.kind", "ddp auto"),
    (_OFFLOADED_STATE, "optimizer.name", "adamw sgd"),
    (_OFFLOADED_STATE, "optimizer.momentum", True),
    (_OFFLOADED_STATE, "optimizer.ema", False),
    ("activation_checkpointing.budget", "activation_checkpointing.mode", "selective"),
    ("activation_checkpointing.budget", "activation_checkpointing.every_n_blocks", "1"),
    ("activation_checkpointing.budget", "model.builder data.builder", False),
    ("optimizer.betas optimizer.eps optimizer.state_dtype", "optimizer.name", "adamw muon"),
    ("optimizer.momentum", "optimizer.name", "sgd muon"),
    ("optimizer.ema", "checkpoint.every_steps checkpoint.every_epochs", True),
    ("evaluation.ema", "optimizer.ema", True),
    ("evaluation.ema", "strategy.shard_optimizer", False),
    ("schedule.decay_steps", "schedule.kind", "wsd"),
    ("schedule.warmup_steps", "schedule.warmup_ratio", False),
    (
        "evaluation.at_start evaluation.stop_after",
        "data.validation data.validation_split data.builder",
        True,
    ),
    ("checkpoint.keep_best", "data.validation data.validation_split data.builder", True),
    ("evaluation.generate", "data.validation data.validation_split", True),
    ("evaluation.generate", "data.builder model.builder", False),
    ("evaluation.generate", "data.loss_on", "assistant last"),
    ("checkpoint.export_dtype checkpoint.export_merged", "checkpoint.export", "at_end best"),
    ("checkpoint.export_merged", "lora", True),
    ("checkpoint.export_base", "lora.quantize", True),
    ("checkpoint.export_base", "checkpoint.export_merged", True),
    ("lora.quantize", "model.builder model.compile", False),
    ("model.new_tokens", "model.builder lora.path", False),
    *(
        (f"strategy.{size.key}", other, needed)
        for size in PARALLEL_SIZES
        for other, needed in size.needs
    ),
    *(
        (key, f"strategy.{size.key}", "1")
        for size in PARALLEL_SIZES
        for key in size.needed_by
        if " " not in key
    ),
)
"""Keys that may have another value than their default only if one of other keys is given (True),
none of them is given (False), or the other key has one of these values."""
_INSTEAD = {
    (_FLOAT8, "lora"): "; its base weights are frozen, or in NF4",
    **{
        (f"{section}.train", "lora"): "; lora.modules_to_save names modules that are trained whole"
        for section in ATTACHMENTS.values()
    },
    ("schedule.warmup_steps", "schedule.warmup_ratio"): "; set schedule.warmup_ratio=null, or "
    "schedule.warmup_steps=100, its default",
    **{
        (
            f"{name}.every_steps",
            f"{name}.every_epochs",
        ): f"; set one of them to null: {name}.every_epochs=null or {name}.every_steps=null"
        for name in _EVERY
    },
    **{
        (f"strategy.{size.key}", other): instead
        for size in PARALLEL_SIZES
        for other, instead in size.instead.items()
    },
}
"""What to do instead, at the end of a message."""
ALTERNATIVES = (
    ("run.max_steps", "run.epochs"),
    ("batch.micro_batch_size", "batch.micro_batch_tokens"),
)
"""Keys of which exactly one must be given. An argument replaces the one in the file."""
_ONE_OF = (*ALTERNATIVES, ("model.path", "model.config", "model.builder"))
"""Keys of which exactly one must be given."""


_EXTRAS = {"lora": "peft", "images": "PIL", "logging.tensorboard": "tensorboard"}
"""Keys that need a module of an extra."""
_COLUMN_KEYS = (*KEYS.values(), "columns")


def combination_rules(recipe: Recipe) -> Iterator[Problems]:
    """Yields the problems of each rule, separately: reading a key may fail."""
    for keys, other, needed in _NEEDS:
        for key in keys.split():
            yield _needs(recipe, key, other, needed)
    yield _together(recipe)
    yield _source_columns(recipe)
    yield _columns(recipe)
    yield _column_of_two_roles(recipe)
    yield _overlong(recipe)
    for alternatives in _ONE_OF:
        yield _one_of(recipe, alternatives)
    for key, module in _EXTRAS.items():
        yield _installed(recipe, key, module)


def _installed(recipe: Recipe, key: str, module: str) -> Problems:
    if value_of(recipe, key) and (missing := missing_extra(module)) is not None:
        yield key, missing


def value_of(section: Any, key: str) -> Any:
    """The value of a key, or None if it is in a section that is off."""
    return functools.reduce(lambda inner, name: getattr(inner, name, None), key.split("."), section)


def kind_by_keys(plain: Mapping[str, Any], kinds: Sequence[str]) -> str:
    """data.kind where the data cannot be seen: the first of `kinds` with which the keys of a recipe,
    which is not decoded yet, may stand."""
    for keys, other, needed in _NEEDS:
        if other != "data.kind" or not isinstance(needed, str):
            continue
        fitting = [kind for kind in kinds if kind in needed.split()]
        given = (plain_value(plain, key) not in (None, _default(key)) for key in keys.split())
        if fitting and any(given):
            kinds = fitting
    return kinds[0]


def plain_value(plain: Any, key: str) -> Any:
    """The value of a key in a recipe that is not decoded yet; None without the key or its section."""
    for name in key.split("."):
        plain = plain.get(name) if isinstance(plain, dict) else None
    return plain


def excludes_compile(recipe: Recipe) -> str | None:
    """A key with which blocks cannot be compiled, or None."""
    for names, other, needed in _NEEDS:
        if needed is False and "model.compile" in other.split():
            for key in names.split():
                if value_of(recipe, key) not in (None, _default(key)):
                    return key
    return None


def _source_columns(recipe: Recipe) -> Problems:
    train = recipe.data.train
    for name, source in train.items() if isinstance(train, dict) else ():
        for role, key in KEYS.items():
            given = getattr(source, key, None)
            if given and role not in roles_of(source.kind or recipe.data.kind):
                yield f"data.train.{name}.{key}", f"needs kind={' or '.join(_kinds_with(role))}"


def _columns(recipe: Recipe) -> Problems:
    """What is wrong with data.columns, also of the sources of a mixture."""
    data, train = recipe.data, recipe.data.train
    places: list[tuple[KeyPath, Any, set[str]]] = [(("data",), data, kinds_of(recipe))]
    for name, source in train.items() if isinstance(train, dict) else ():
        places.append((("data", "train", name), source, {source.kind or data.kind}))
    for path, section, kinds in places:
        seen: dict[str, str] = {}
        for name in section.columns or ():
            role, where = role_of(name), (*path, "columns", name)
            if role is None:
                known = [role for role in NAMES if role not in EXPLICIT_ONLY]
                what = f"no column of a row is called so; known here: {', '.join(known)}"
                if name in EXPLICIT_ONLY:
                    what = f"has a key of its own: data.{KEYS[name]}"
                yield where, what
                continue
            if not any(role in roles_of(kind) for kind in kinds):
                able = _kinds_with(role)
                yield where, f"needs data.kind={' or '.join(able)}"
            key = KEYS.get(role, "")
            if role in seen:
                yield where, f"is another name for {seen[role]}; give one of them"
            elif key and getattr(section, key) not in (None, _default(f"data.{key}")):
                yield where, f"{'.'.join(map(str, path))}.{key} is given too; give one of them"
            seen[role] = name


def _column_of_two_roles(recipe: Recipe) -> Problems:
    """A column that is named for two roles: an answer would be trained on itself."""
    data, train = recipe.data, recipe.data.train
    places: list[tuple[KeyPath, Any]] = [(("data",), data)]
    for name, source in train.items() if isinstance(train, dict) else ():
        places.append((("data", "train", name), source))
    for path, section in places:
        keys: dict[str, tuple[str, ...]] = {}
        given = {
            role: ("columns", name) for name in section.columns or () if (role := role_of(name))
        }
        named = named_columns(
            {name: getattr(section, name) for name in _COLUMN_KEYS if hasattr(section, name)}
        )
        for role, column in named.items():
            key = given.get(role, (KEYS.get(role, role),))
            if column in keys:
                other = ".".join(map(str, (*path, *keys[column])))
                yield (
                    (*path, *key),
                    f"{column!r} is the column of {other} too; a column has one role",
                )
            keys.setdefault(column, key)


def _overlong(recipe: Recipe) -> Problems:
    """What is wrong with data.overlong, also of the sources of a mixture."""
    data, train = recipe.data, recipe.data.train
    sections: list[tuple[KeyPath, Any, str]] = [(("data",), data, data.kind)]
    for name, source in train.items() if isinstance(train, dict) else ():
        sections.append((("data", "train", name), source, source.kind or data.kind))
    for path, section, kind in sections:
        loss_on = KINDS[kind].loss_on
        if loss_on == "whole answers" and section.overlong == "cut":
            what = f"not for kind {kind}, whose answers must be whole; use drop"
            yield (*path, "overlong"), what
        if loss_on == "class" and section.overlong in ("drop", "error"):
            yield (*path, "overlong"), f"not for kind {kind}, whose texts are cut"


def _default(key: str) -> Any:
    section: Any = Recipe
    *sections, name = key.split(".")
    for inner in sections:
        section = subsection(section, inner)
    return section.__dataclass_fields__[name].default


def _needs(recipe: Recipe, key: str, other: str, needed: bool | str) -> Problems:
    if value_of(recipe, key) in (None, _default(key)):
        return
    if isinstance(needed, str):
        values = kinds_of(recipe) if other == "data.kind" else {str(value_of(recipe, other))}
        if not values & {*needed.split()}:
            wanted = " or ".join(needed.split())
            yield key, f"needs {other}={wanted}{_INSTEAD.get((key, other), '')}"
        return
    given = [name for name in other.split() if value_of(recipe, name)]
    if needed and not given:
        yield key, f"needs {' or '.join(other.split())}"
    if given and not needed:
        instead = {_INSTEAD.get((key, name), "") for name in given}
        yield key, f"not available with {' and '.join(given)}{''.join(instead)}"


def _together(recipe: Recipe) -> Problems:
    """Keys that exclude a way to compute in parallel only together."""
    for size in PARALLEL_SIZES:
        for keys in size.needed_by:
            key, *others = keys.split()
            given = all(value_of(recipe, name) for name in (key, *others))
            if others and given and getattr(recipe.strategy, size.key) > 1:
                what = f"{' and '.join(others)} and strategy.{size.key}"
                yield key, f"not available with {what}; use 1"


def _one_of(recipe: Recipe, keys: Sequence[str]) -> Problems:
    given = [key for key in keys if value_of(recipe, key) is not None]
    if not given:
        yield keys[0], f"missing; give {' or '.join(keys)}"
    if given[:2] == ["model.path", "model.config"]:
        del given[0]  # changes to the config of the checkpoint
    for key in given[1:]:
        yield key, f"{given[0]} is given too; set one to null: {given[0]}=null or {key}=null"


def kinds_of(recipe: Recipe) -> set[str]:
    """The kinds of the training data: a mixture may have several."""
    sources = recipe.data.train.values() if isinstance(recipe.data.train, dict) else ()
    return {recipe.data.kind, *(source.kind for source in sources if source.kind is not None)}
