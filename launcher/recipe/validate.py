"""The rules that join several keys of a recipe.

A rule is a generator of problems: (dotted key, what is wrong with it). The two tables hold the
rules of the most frequent kinds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from launcher.errors import suggestion
from launcher.recipe.decode import DEFAULT, KeyPath, Problem
from launcher.recipe.hub import is_hub_id, is_model_id
from launcher.recipe.model_config import config_problems
from launcher.recipe.schema import Recipe

Found = Iterator[tuple[str, str]]

_NEEDS: tuple[tuple[str, str, bool | str], ...] = (
    ("model.arguments", "model.builder", True),
    ("model.task model.num_labels model.attention model.init", "model.builder", False),
    ("model.num_labels", "model.task", "sequence_classification"),
    ("model.trust_remote_code", "model.path", True),
    ("model.freeze", "lora", False),
    ("data.arguments", "data.builder", True),
    ("data.train data.validation data.streaming data.text_column", "data.builder", False),
    ("data.text_column", "data.kind", "text classification"),
    ("data.messages_column", "data.kind", "chat"),
    ("data.prompt_column data.response_column", "data.kind", "instruct"),
    ("data.label_column data.labels", "data.kind", "classification"),
    ("data.chat_template", "data.kind", "chat instruct"),
    ("data.shuffle_buffer", "data.streaming", True),
    ("data.streaming", "data.kind", "text tokens chat instruct"),
    ("run.epochs", "data.streaming", False),
    ("run.on_divergence", "checkpoint.every_steps", True),
    ("batch.micro_batch_tokens", "data.builder data.streaming", False),
    ("strategy.cpu_offload strategy.replicate", "strategy.kind", "fsdp auto"),
    ("strategy.reshard_after_forward", "strategy.kind", "fsdp auto"),
    ("strategy.reshard_after_backward", "strategy.kind", "fsdp auto"),
    ("strategy.mixed_precision.reduce_dtype", "strategy.kind", "fsdp auto"),
    ("strategy.shard_optimizer", "strategy.kind", "ddp auto"),
    ("activation_checkpointing.budget", "activation_checkpointing.mode", "selective"),
    ("activation_checkpointing.budget", "activation_checkpointing.every_n_blocks", "1"),
    ("activation_checkpointing.budget", "model.builder data.builder", False),
    ("logging.memory_plan", "model.builder data.builder", False),
    ("optimizer.betas optimizer.eps optimizer.state_dtype", "optimizer.name", "adamw muon"),
    ("optimizer.momentum", "optimizer.name", "sgd muon"),
    ("schedule.decay_steps", "schedule.kind", "wsd"),
    ("evaluation.at_start checkpoint.keep_best", "data.validation data.builder", True),
    ("evaluation.stop_after", "data.validation data.builder", True),
    ("evaluation.generate", "data.validation", True),
    ("evaluation.generate", "data.builder", False),
    ("evaluation.generate", "data.kind", "chat instruct"),
    ("checkpoint.export_dtype checkpoint.export_merged", "checkpoint.export", "at_end"),
    ("checkpoint.export_merged", "lora", True),
)
"""Keys that may have another value than their default only if one of other keys is given (True),
none of them is given (False), or the other key has one of these values."""
_ONE_OF = (
    "run.max_steps run.epochs",
    "model.path model.config model.builder",
    "batch.micro_batch_size batch.micro_batch_tokens",
)
"""Keys of which exactly one must be given."""
_SCORES = ("exact_match", "f1", "rouge_l")
"""Of training/scores.py."""
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("n_embd", "n_layer", "n_head", "n_positions"),
}
"""Keys of a model.config whose errors transformers finds late, without naming the key."""


class _UnsoundError(Exception):
    """A rule reads a key without a sound value."""


class _Sound:
    """A section as rules see it: reading a key without a sound value ends the rule."""

    def __init__(self, section: Any, path: KeyPath, unsound: set[KeyPath]) -> None:
        self._section, self._path, self._unsound = section, path, unsound

    def __getattr__(self, name: str) -> Any:
        path, value = (*self._path, name), getattr(self._section, name)
        if path in self._unsound:
            raise _UnsoundError
        return _Sound(value, path, self._unsound) if dataclasses.is_dataclass(value) else value


def check(
    recipe: Recipe, *, ranks: int | None, unsound: set[KeyPath], files: bool = True
) -> list[Problem]:
    """Returns all broken rules.

    ranks: data-parallel ranks; None: not known yet. files: whether the data must exist.
    unsound: keys without a sound value. A rule that reads one is skipped.
    """
    rules: list[Callable[[Recipe], Found]] = [
        functools.partial(_needs, key=key, other=other, needed=needed)
        for keys, other, needed in _NEEDS
        for key in keys.split()
    ]
    rules += [functools.partial(_one_of, keys=keys.split()) for keys in _ONE_OF]
    rules += [*_RULES, *(_FILE_RULES if files else ())]
    rules += [functools.partial(rule, ranks=ranks) for rule in (_batches, _replicate, _profile)]
    problems = []
    for rule in rules:
        with contextlib.suppress(_UnsoundError):
            for key, message in rule(cast(Recipe, _Sound(recipe, (), unsound))):
                parts = (int(part) if part.isdigit() else part for part in key.split("."))
                problems.append(Problem(tuple(parts), message))
    return problems


def _value(section: Any, key: str) -> Any:
    """The value of a key, or None if it is in a section that is off."""
    return functools.reduce(lambda inner, name: getattr(inner, name, None), key.split("."), section)


def _needs(recipe: Recipe, *, key: str, other: str, needed: bool | str) -> Found:
    if _value(recipe, key) in (None, _value(DEFAULT, key)):
        return
    if isinstance(needed, str):
        values = _kinds(recipe) if other == "data.kind" else {str(_value(recipe, other))}
        if not values & {*needed.split()}:
            yield key, f"needs {other}: {' or '.join(needed.split())}"
        return
    given = [name for name in other.split() if _value(recipe, name)]
    if needed and not given:
        yield key, f"needs {' or '.join(other.split())}"
    if given and not needed:
        yield key, f"not available with {' and '.join(given)}"


def _one_of(recipe: Recipe, *, keys: list[str]) -> Found:
    given = [key for key in keys if _value(recipe, key) is not None]
    if not given:
        yield keys[0], f"missing; give {' or '.join(keys)}"
    for key in given[1:]:
        yield key, f"{given[0]} is given too; set all but one to null"


def resumes(recipe: Recipe) -> bool:
    """Whether there is a checkpoint that the run would resume from."""
    resume = recipe.checkpoint.resume
    return _has_checkpoints(recipe) if resume == "auto" else resume != "never"


def _has_checkpoints(recipe: Recipe) -> bool:
    return next(Path(recipe.run.dir, "checkpoints").glob("step_*"), None) is not None


def open_keys(recipe: Recipe) -> list[str]:
    """Keys that are `auto`, so that the memory plan decides them."""
    keys = ("strategy.kind", "batch.micro_batch_size", "strategy.reshard_after_forward")
    return [key for key in keys if _value(recipe, key) == "auto"]


def _kinds(recipe: Recipe) -> set[str]:
    sources = recipe.data.train.values() if isinstance(recipe.data.train, dict) else ()
    return {recipe.data.kind, *(source.kind for source in sources if source.kind is not None)}


def _mixture(recipe: Recipe) -> Found:
    if recipe.data.streaming and isinstance(recipe.data.train, dict):
        what = "a mixture is not available with data.streaming; give one list of files"
        yield "data.train", what


def _model_source(recipe: Recipe) -> Found:
    model = recipe.model
    if model.init == "pretrained" and model.path is None:
        yield "model.init", "pretrained needs model.path; without one the weights are random"
    if model.path is not None and not is_model_id(model.path):
        if not os.path.isfile(os.path.join(model.path, "config.json")):
            what = f"no such folder with a config.json (looked for in {Path.cwd()})"
            yield "model.path", f"{model.path}: {what}, and no hub id `owner/name`"
    if model.builder is not None and recipe.data.builder is None:
        what = "a model of your own (model.builder) needs its data and loss from data.builder"
        yield "data.builder", f"missing; {what}"


def _attention(recipe: Recipe) -> Found:
    attention, precision = recipe.model.attention, recipe.strategy.mixed_precision
    in_float32 = precision is None or precision.param_dtype == "float32"
    if "flash_attention" in attention and in_float32:
        what = "use sdpa, or strategy.mixed_precision with bfloat16"
        yield "model.attention", f"{attention} computes in 16 bits only; {what}"


def _classification(recipe: Recipe) -> Found:
    model, data = recipe.model, recipe.data
    classifies = model.task == "sequence_classification"
    if data.builder is not None:
        return
    if (data.kind == "classification") != classifies:
        yield "data.kind", f"{data.kind} is not for model.task: {model.task}"
    labels = data.labels
    if labels is not None and model.num_labels not in (None, len(labels)):
        yield "model.num_labels", f"{model.num_labels}, but data.labels names {len(labels)}"
    if labels is not None and (len(labels) < 2 or len(set(labels)) < len(labels)):
        what = "must name two classes or more, each once"
        yield "data.labels", f"{what}; got {', '.join(labels)}"
    for name, source in data.train.items() if isinstance(data.train, dict) else ():
        mixes = (source.kind == "classification") == (data.kind == "classification")
        if source.kind is not None and not mixes:
            what = f"{source.kind} does not mix with data.kind {data.kind}: the losses differ"
            yield f"data.train.{name}.kind", what


def _config(recipe: Recipe) -> Found:
    config = recipe.model.config
    if config is not None:
        for key, message in config_problems(config, task=recipe.model.task):
            yield f"model.config.{key}", message


def _sizes(recipe: Recipe) -> Found:
    config = recipe.model.config or {}
    for key in _SIZES & config.keys():
        if isinstance(config[key], int) and config[key] < 1:
            yield f"model.config.{key}", f"must be at least 1; got {config[key]}"
    size = config.get("vocab_size")
    tokenizer = recipe.data.tokenizer if recipe.data.builder is None else None
    if tokenizer == "bytes" and isinstance(size, int) and 0 < size < 257:
        what = "256 bytes and an end of document; give 257 or more"
        yield "model.config.vocab_size", f"{size} is too small for the tokenizer `bytes`: {what}"


def _run_dir(recipe: Recipe) -> Found:
    folder = Path(recipe.run.dir)
    for path in (folder, *folder.parents):
        if os.path.isfile(path):
            yield "run.dir", f"{path} is a file, and must be a folder"


def _micro_batch_tokens(recipe: Recipe) -> Found:
    tokens, length = recipe.batch.micro_batch_tokens, recipe.data.sequence_length
    if tokens is None:
        return
    if recipe.data.packing and recipe.data.kind != "classification":
        what = "needs data.packing: false; packed sequences are all as long"
        yield "batch.micro_batch_tokens", what
    if tokens < length:
        what = f"does not hold one sequence of {length} tokens (data.sequence_length)"
        yield "batch.micro_batch_tokens", f"{tokens} {what}"


def _profile(recipe: Recipe, *, ranks: int | None) -> Found:
    profile, max_steps = recipe.profile, recipe.run.max_steps
    if profile is None:
        return
    largest = max(profile.ranks or (), default=0)
    if ranks is not None and largest >= ranks:
        yield "profile.ranks", f"there is no rank {largest} of {ranks}, which count from 0"
    first, last = profile.start_step, profile.start_step + profile.steps - 1
    if max_steps is not None and last > max_steps:
        yield "profile.steps", f"steps {first} to {last} go beyond run.max_steps {max_steps}"


def _metrics(recipe: Recipe) -> Found:
    generate, keep_best = recipe.evaluation.generate, recipe.checkpoint.keep_best
    known = ["eval_loss"]
    if recipe.data.kind == "classification":
        known += ["eval_accuracy", "eval_f1"]
    if generate is not None:
        for index, metric in enumerate(generate.metrics):
            known.append(f"eval_{metric.rpartition(':')[2]}")
            if metric not in _SCORES and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", metric):
                what = f"must be {', '.join(_SCORES)} or `package.module:function`; got {metric!r}"
                yield f"evaluation.generate.metrics.{index}", what + suggestion(metric, _SCORES)
        length = recipe.data.sequence_length
        if generate.max_new_tokens >= length:
            what = f"leaves no room for a prompt in {length} tokens (data.sequence_length)"
            yield "evaluation.generate.max_new_tokens", f"{generate.max_new_tokens} {what}"
    if keep_best is not None and keep_best not in known:
        what = f"no such metric: {keep_best}; this run has {', '.join(known)}"
        yield "checkpoint.keep_best", what


def _nodes(recipe: Recipe) -> Found:
    nodes = recipe.slurm.nodes if recipe.slurm is not None else 1
    if isinstance(nodes, str) and "-" in nodes:
        first, last = map(int, nodes.split("-"))
        if last < first:
            yield "slurm.nodes", f"must be a number, or a range such as 2-4; got {nodes!r}"


def _resume(recipe: Recipe) -> Found:
    resume = recipe.checkpoint.resume
    # A run with checkpoints of its own resumes from these: the named one may be gone by then
    if resume in ("auto", "never") or os.path.isdir(resume) or _has_checkpoints(recipe):
        return
    what = "give auto, never, or a checkpoint such as runs/NAME/checkpoints/step_00000500"
    yield "checkpoint.resume", f"no such folder: {resume}; {what}"


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


def _offload(recipe: Recipe) -> Found:
    offload, optimizer = recipe.strategy.cpu_offload, recipe.optimizer
    if offload is None or not (offload.what == "optimizer" or offload.optimizer_path):
        return
    key = f"strategy.cpu_offload.{'what' if offload.what == 'optimizer' else 'optimizer_path'}"
    if optimizer.name == "adafactor":
        yield key, "not available with optimizer.name: adafactor, which keeps almost no state"
    if optimizer.name == "muon":
        yield key, "not available with optimizer.name: muon, whose steps need whole matrices"
    if optimizer.name == "sgd" and not optimizer.momentum:
        yield key, "not available with optimizer.momentum: 0, which keeps no state"


def _replicate(recipe: Recipe, *, ranks: int | None) -> Found:
    strategy = recipe.strategy
    if strategy.kind != "ddp" and ranks is not None and ranks % strategy.replicate:
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        what = f"{strategy.replicate} does not divide {ranks} (ranks); try one of {divisors}"
        yield "strategy.replicate", what


def _tokenizer(recipe: Recipe) -> Found:
    name, template = recipe.data.tokenizer, recipe.data.chat_template
    if template is not None and not os.path.isfile(template):
        where = f"{template} (looked for in {Path.cwd()})"
        yield "data.chat_template", f"no such file: {where}; give a file with a Jinja template"
    if recipe.data.builder is not None or _kinds(recipe) == {"tokens"} or name == "bytes":
        return
    what = "give `bytes`, a folder with a tokenizer, or a hub id `owner/name`"
    if name is None:
        if recipe.model.path is None:
            yield "data.tokenizer", f"missing; a model.config has none of its own: {what}"
    elif not is_model_id(name) and not os.path.isdir(name):
        yield "data.tokenizer", f"no such folder: {name}; {what}"


def _data_files(recipe: Recipe) -> Found:
    train, validation = recipe.data.train, recipe.data.validation
    if train is None and recipe.data.builder is None:
        what = "a list of files, globs, folders or hub data set ids (or data.builder)"
        yield "data.train", f"missing; must be given: {what}"
    lists: dict[str, tuple[str, ...]] = {}
    if isinstance(train, dict):
        lists |= {f"data.train.{name}.files": source.files for name, source in train.items()}
    else:
        lists["data.train"] = train or ()
    if isinstance(validation, dict):
        lists |= {f"data.validation.{name}": files for name, files in validation.items()}
    else:
        lists["data.validation"] = validation or ()
    for key, patterns in lists.items():
        for index, pattern in enumerate(patterns):
            if not (os.path.exists(pattern) or is_hub_id(pattern) or _matches(pattern)):
                what = "no such file or folder, and no hub id `owner/name`"
                yield f"{key}.{index}", f"{pattern!r}: {what} (looked for in {Path.cwd()})"


def _matches(pattern: str) -> bool:
    return next(glob.iglob(pattern, recursive=True), None) is not None


_RULES = (
    *(_mixture, _model_source, _attention, _classification, _config, _sizes, _run_dir),
    *(_micro_batch_tokens, _metrics, _nodes, _resume, _offload),
)
_FILE_RULES = (_tokenizer, _data_files)
"""Those that look for the data, which a plan does not need."""
