"""The rules that join several keys, and the keys whose part is not built yet.

A rule names the keys it reads; where one of them is unsound already, the rule is silent about it.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.recipe.decode import KeyPath, Problem
from launcher.recipe.hub import is_hub_id
from launcher.recipe.model_config import config_problems
from launcher.recipe.schema import Data, Model, Recipe, Strategy

Found = Iterator[tuple[str, str]]
"""Dotted key and what is wrong with it."""


@dataclass(frozen=True)
class _Rule:
    reads: tuple[str, ...]
    test: Callable[[Recipe, int | None], Found]
    of_files: bool


_RULES: list[_Rule] = []


def _rule(*reads: str, of_files: bool = False) -> Callable[[Callable[[Recipe, int | None], Found]], Callable[[Recipe, int | None], Found]]:
    """of_files: it looks for data that need not be there to plan."""

    def register(test: Callable[[Recipe, int | None], Found]) -> Callable[[Recipe, int | None], Found]:
        _RULES.append(_Rule(reads, test, of_files))
        return test

    return register


def check(recipe: Recipe, *, ranks: int | None, unsound: set[KeyPath], files: bool = True) -> list[Problem]:
    """All broken rules.

    ranks: data-parallel ranks; None: not known yet. files: whether the data must be there.
    unsound: keys that did not decode; rules that read them, or what is inside them, are left out.
    """
    problems = []
    for rule in _RULES:
        if rule.of_files and not files:
            continue
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


@_rule("run.dir")
def _run_dir(recipe: Recipe, ranks: int | None) -> Found:
    folder = Path(recipe.run.dir).absolute()
    nearest = next((path for path in (folder, *folder.parents) if os.path.exists(path)), None)
    if nearest is not None and not nearest.is_dir():
        yield "run.dir", f"{nearest} is a file, and must be a folder; give another, or move the file away"


@_rule("run.max_steps", "run.epochs")
def _length(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.run.max_steps is None and recipe.run.epochs is None:
        yield "run.max_steps", "missing; give max_steps or epochs"
    if recipe.run.max_steps is not None and recipe.run.epochs is not None:
        yield "run.epochs", f"max_steps {recipe.run.max_steps} is given too; set one of the two to null"


@_rule("model.path", "model.config", "model.builder")
def _model(recipe: Recipe, ranks: int | None) -> Found:
    model = recipe.model
    given = [name for name in ("path", "config", "builder") if getattr(model, name) is not None]
    if not given:
        yield "model.config", "missing; give model.path, or a config such as {model_type: llama, hidden_size: 256, ...}"
    if len(given) > 1:
        others = " and ".join(f"model.{name}" for name in given if name != given[-1])
        yield f"model.{given[-1]}", f"{others} is given too; set all but one to null"
    if model.path is not None and not _is_model_id(model.path):
        if not os.path.isdir(model.path):
            yield "model.path", f"no such folder: {model.path} (looked for in {Path.cwd()}); give a folder or a hub id `owner/name`"
        elif not os.path.isfile(os.path.join(model.path, "config.json")):
            yield "model.path", f"{model.path} has no config.json; give a folder as transformers' save_pretrained writes it"


def _is_model_id(name: str) -> bool:
    """Models have no configs and splits: `runs/a/hf` is a folder that is missing, not a hub id."""
    return is_hub_id(name) and re.fullmatch(r"[^/:]+/[^/:]+", name) is not None


@_rule("model.builder", "model.arguments", "data.builder", "data.arguments")
def _builders(recipe: Recipe, ranks: int | None) -> Found:
    for name, section in (("model", recipe.model), ("data", recipe.data)):
        builder = section.builder
        if builder is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", builder):
            yield f"{name}.builder", f"must be `package.module:function`; got {builder!r}"
        if builder is None and section.arguments is not None:
            yield f"{name}.arguments", f"needs {name}.builder, whose arguments they are"


@_rule("logging.memory_plan", "model.builder", "data.builder")
def _memory_plan(recipe: Recipe, ranks: int | None) -> Found:
    builders = [f"{name}.builder" for name in ("model", "data") if getattr(recipe, name).builder is not None]
    if recipe.logging.memory_plan and builders:
        yield (
            "logging.memory_plan",
            f"not available with {' and '.join(builders)}: the plan would call your code a second time; use `launcher plan`",
        )


@_rule("model.builder", "model.path", "model.task", "model.num_labels", "model.attention", "model.init", "data.builder")
def _built_models(recipe: Recipe, ranks: int | None) -> Found:
    model = recipe.model
    if model.builder is not None:
        if recipe.data.builder is None:
            yield "data.builder", "missing; a model of your own (model.builder) needs its data and loss from data.builder"
        for name in ("task", "num_labels", "attention", "init"):
            if getattr(model, name) != getattr(Model, name):
                yield f"model.{name}", "not available with model.builder, which decides it"
    if model.trust_remote_code and model.path is None:
        yield "model.trust_remote_code", "needs model.path, whose code it would be"


@_rule("model.attention", "strategy")
def _attention(recipe: Recipe, ranks: int | None) -> Found:
    precision = recipe.strategy.mixed_precision
    if "flash_attention" in recipe.model.attention and (precision is None or precision.param_dtype == "float32"):
        yield "model.attention", f"{recipe.model.attention} computes in 16 bits only; use sdpa, or strategy.mixed_precision with bfloat16"


@_rule("model.path", "model.init", "model.builder")
def _init(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.model.init == "pretrained" and recipe.model.path is None and recipe.model.builder is None:
        yield "model.init", "pretrained needs model.path; without one the weights are random"


@_rule("model.task", "model.num_labels", "data.kind", "data.labels", "data.builder", "data.train")
def _classification(recipe: Recipe, ranks: int | None) -> Found:
    model, data = recipe.model, recipe.data
    classifies = model.task == "sequence_classification"
    if not classifies and model.num_labels is not None and model.builder is None:
        yield "model.num_labels", "not available with task causal_lm; use sequence_classification"
    if data.builder is not None:
        return
    if classifies and data.kind != "classification":
        yield "data.kind", f"{data.kind} is not for task sequence_classification; use kind classification"
    if not classifies and data.kind == "classification":
        yield "data.kind", "classification needs model.task: sequence_classification"
    if data.labels is not None and model.num_labels not in (None, len(data.labels)):
        yield "model.num_labels", f"{model.num_labels}, but data.labels names {len(data.labels)}"
    if data.labels is not None and (len(data.labels) < 2 or len(set(data.labels)) < len(data.labels)):
        yield "data.labels", f"must name two classes or more, each once; got {', '.join(data.labels)}"
    if isinstance(data.train, dict):
        for name, source in data.train.items():
            if source.kind is not None and (source.kind == "classification") != (data.kind == "classification"):
                yield f"data.train.{name}.kind", f"{source.kind} does not mix with data.kind {data.kind}: the losses differ"


_COLUMNS = {
    "text_column": {"text", "classification"},
    "messages_column": {"chat"},
    "prompt_column": {"instruct"},
    "response_column": {"instruct"},
    "label_column": {"classification"},
    "labels": {"classification"},
    "chat_template": {"chat", "instruct"},
}
"""Keys of data that some kinds read only."""


@_rule("data.kind", "data.train", "data.builder", "data.streaming", "data.shuffle_buffer", *(f"data.{name}" for name in _COLUMNS))
def _columns(recipe: Recipe, ranks: int | None) -> Found:
    data = recipe.data
    for name, kinds in _COLUMNS.items():
        if getattr(data, name) == getattr(Data, name):
            continue
        if data.builder is not None:
            yield f"data.{name}", "not available with data.builder, which reads the data itself"
        elif not kinds & _kinds(recipe):
            yield f"data.{name}", f"not available with kind {data.kind}; for kind {' and '.join(sorted(kinds))}"
    if not data.streaming and data.shuffle_buffer != Data.shuffle_buffer:
        yield "data.shuffle_buffer", "needs data.streaming; without it the whole set is shuffled"


@_rule("data.train", "data.validation")
def _names(recipe: Recipe, ranks: int | None) -> Found:
    for key, section in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation)):
        for name in section if isinstance(section, dict) else ():
            if not re.fullmatch(r"[A-Za-z_][\w-]*", name):
                yield f"{key}.{name}", f"a name has letters, digits, _ and - (it stands in metrics and overrides); got {name!r}"


@_rule("model.config", "model.task")
def _model_config(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.model.config is not None:
        for key, message in config_problems(recipe.model.config, task=recipe.model.task):
            yield f"model.config.{key}" if key else "model.config", message
        for key in _SIZES & recipe.model.config.keys():
            size = recipe.model.config[key]
            if isinstance(size, int) and not isinstance(size, bool) and size < 1:
                yield f"model.config.{key}", f"must be at least 1; got {size}"


_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions"),
}
"""Keys of a model.config that are a number of something in every model type that has them. transformers takes any number, and fails
later, if at all, without naming the key."""


@_rule("data.sequence_length", "data.kind", "data.builder")
def _sequence_length(recipe: Recipe, ranks: int | None) -> Found:
    data = recipe.data
    if data.sequence_length == 1 and data.builder is None and data.kind != "classification":
        yield "data.sequence_length", "1 leaves chats and prompts without a token to predict, and texts without a context; give 2 or more"


def _kinds(recipe: Recipe) -> set[str]:
    sources = recipe.data.train.values() if isinstance(recipe.data.train, dict) else ()
    return {recipe.data.kind, *(source.kind for source in sources if source.kind is not None)}


@_rule("data.kind", "data.train", "data.tokenizer", "data.builder", "model.path")
def _tokenizer(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.data.builder is not None or _kinds(recipe) == {"tokens"}:
        return
    tokenizer = recipe.data.tokenizer
    if tokenizer is None and recipe.model.path is None:
        yield "data.tokenizer", "missing; a model.config has none of its own: give `bytes` or a folder with a tokenizer"


@_rule("data.tokenizer", "data.builder", "data.kind", "data.train", of_files=True)
def _tokenizer_folder(recipe: Recipe, ranks: int | None) -> Found:
    tokenizer = recipe.data.tokenizer
    if recipe.data.builder is not None or _kinds(recipe) == {"tokens"}:
        return
    if tokenizer not in (None, "bytes") and not _is_model_id(str(tokenizer)) and not os.path.isdir(str(tokenizer)):
        yield "data.tokenizer", f"no such folder: {tokenizer}; give `bytes`, a folder with a tokenizer, or a hub id `owner/name`"


@_rule("data.chat_template", of_files=True)
def _chat_template(recipe: Recipe, ranks: int | None) -> Found:
    template = recipe.data.chat_template
    if template is not None and not os.path.isfile(template):
        yield "data.chat_template", f"no such file: {template} (looked for in {Path.cwd()}); give a file with a Jinja template"


@_rule("data.builder", "data.tokenizer", "model.config")
def _vocabulary(recipe: Recipe, ranks: int | None) -> Found:
    size = (recipe.model.config or {}).get("vocab_size")
    if recipe.data.builder is None and recipe.data.tokenizer == "bytes" and isinstance(size, int) and 0 < size < 257:
        yield (
            "model.config.vocab_size",
            f"{size} is too small for the tokenizer `bytes`: 256 bytes and an end of document; give 257 or more",
        )


@_rule("data.train", "data.builder", of_files=True)
def _train_files(recipe: Recipe, ranks: int | None) -> Found:
    train, builder = recipe.data.train, recipe.data.builder
    if builder is not None:
        for name in ("train", "validation"):
            if getattr(recipe.data, name) is not None:
                yield f"data.{name}", "data.builder is given too, which brings its own; set one of the two to null"
    elif train is None:
        yield "data.train", "missing; must be given: a list of files, globs, folders or hub data set ids (or data.builder)"
    elif isinstance(train, dict):
        for name, source in train.items():
            yield from _missing_files(f"data.train.{name}.files", source.files)
    else:
        yield from _missing_files("data.train", train)


@_rule("data.validation", of_files=True)
def _validation_files(recipe: Recipe, ranks: int | None) -> Found:
    validation = recipe.data.validation
    if isinstance(validation, dict):
        for name, files in validation.items():
            yield from _missing_files(f"data.validation.{name}", files)
    else:
        yield from _missing_files("data.validation", validation or ())


def _missing_files(key: str, patterns: tuple[str, ...]) -> Found:
    for index, pattern in enumerate(patterns):
        if not os.path.exists(pattern) and next(glob.iglob(pattern, recursive=True), None) is None and not is_hub_id(pattern):
            what = "matches no file" if any(c in pattern for c in "*?[") else "no such file or folder, and no hub id `owner/name`"
            yield f"{key}.{index}", f"{pattern!r}: {what} (looked for in {Path.cwd()})"


@_rule("batch", "data.packing", "data.streaming", "data.builder")
def _token_budget(recipe: Recipe, ranks: int | None) -> Found:
    batch, data = recipe.batch, recipe.data
    if batch.micro_batch_tokens is None:
        if batch.micro_batch_size is None:
            yield "batch.micro_batch_size", "missing; must be given: a whole number (or give micro_batch_tokens)"
        return
    if batch.micro_batch_size is not None:
        yield "batch.micro_batch_tokens", f"micro_batch_size {batch.micro_batch_size} is given too; set one of the two to null"
    if data.builder is not None or data.streaming:
        other = "data.builder" if data.builder is not None else "data.streaming"
        yield "batch.micro_batch_tokens", f"not available with {other}, where lengths are not known beforehand; use micro_batch_size"
    elif data.packing and data.kind != "classification":
        yield "batch.micro_batch_tokens", "not available with data.packing: true, whose sequences are all as long; use micro_batch_size"
    elif batch.micro_batch_tokens < data.sequence_length:
        yield (
            "batch.micro_batch_tokens",
            f"{batch.micro_batch_tokens} does not hold one sequence of {data.sequence_length} tokens (data.sequence_length)",
        )


@_rule("data.streaming", "data.kind", "data.train", "run.epochs", "run.max_steps", "data.builder")
def _streaming(recipe: Recipe, ranks: int | None) -> Found:
    data = recipe.data
    if not data.streaming:
        return
    if recipe.run.epochs is not None:
        yield "run.epochs", "not available with data.streaming, whose length is not known; use run.max_steps"
    if data.builder is not None:
        yield "data.streaming", "not available with data.builder, which decides it"
    elif isinstance(data.train, dict):
        yield "data.train", "a mixture is not available with data.streaming; give one list of files"
    elif data.kind == "classification":
        yield "data.streaming", "not available with kind classification"


@_rule("lora", "model.builder", "model.freeze")
def _lora(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.lora is not None and recipe.model.freeze is not None:
        yield "model.freeze", "lora is given too, which freezes everything but the adapters; set one of the two to null"


def resumes(recipe: Recipe) -> bool:
    """Whether there is a checkpoint that the run would resume from."""
    return _has_checkpoints(recipe) if recipe.checkpoint.resume == "auto" else recipe.checkpoint.resume != "never"


def _has_checkpoints(recipe: Recipe) -> bool:
    return next(Path(recipe.run.dir, "checkpoints").glob("step_*"), None) is not None


def leaves_open(recipe: Recipe) -> bool:
    """Whether something in it is `auto` that the plan decides."""
    return recipe.strategy.kind == "auto" or recipe.batch.micro_batch_size == "auto"


@_rule("batch.global_batch_size", "batch.micro_batch_size", "run.dir", "checkpoint.resume")
def _batches(recipe: Recipe, ranks: int | None) -> Found:
    size, micro = recipe.batch.global_batch_size, recipe.batch.micro_batch_size
    if micro is None:  # batches are formed by tokens: any number of sequences
        return
    if (micro == "auto" or size % micro == 0) and resumes(recipe):
        return  # with other ranks than it began with: places that are left over stay empty
    unit = (1 if micro == "auto" else micro) * (ranks or 1)
    if size % unit:
        below, above = size // unit * unit, (size // unit + 1) * unit
        advice = f"{below} or {above}" if below else f"{above}"
        product = f"{micro} (micro-batch) x {ranks} (ranks) = {unit}" if ranks else f"{micro} (micro-batch)"
        product = f"{ranks} (ranks)" if micro == "auto" else product
        yield "batch.global_batch_size", f"{size} is not a multiple of {product}; try {advice}"


@_rule("strategy")
def _strategy(recipe: Recipe, ranks: int | None) -> Found:
    strategy = recipe.strategy
    if strategy.kind == "ddp":
        for name in ("cpu_offload", "replicate", "reshard_after_forward", "reshard_after_backward"):
            if getattr(strategy, name) != getattr(Strategy, name):
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


@_rule("evaluation", "data.validation", "data.builder")
def _evaluation(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.evaluation.at_start and recipe.data.validation is None and recipe.data.builder is None:
        yield "evaluation.at_start", "needs data.validation"


@_rule("checkpoint", "lora", "data.validation", "data.builder", "run.on_divergence", "run.dir")
def _checkpoint(recipe: Recipe, ranks: int | None) -> Found:
    if recipe.checkpoint.keep_best is not None and recipe.data.validation is None and recipe.data.builder is None:
        yield "checkpoint.keep_best", "needs data.validation, whose loss it goes by"
    if recipe.checkpoint.export is None and recipe.checkpoint.export_dtype is not None:
        yield "checkpoint.export_dtype", "needs checkpoint.export: at_end"
    if recipe.checkpoint.export_merged and (recipe.checkpoint.export is None or recipe.lora is None):
        yield "checkpoint.export_merged", "needs checkpoint.export: at_end, and lora, whose adapters it adds in"
    resume = recipe.checkpoint.resume
    # A folder with checkpoints of its own resumes from these: where it came from may be gone
    if resume not in ("auto", "never") and not os.path.isdir(resume) and not _has_checkpoints(recipe):
        yield (
            "checkpoint.resume",
            f"no such folder: {resume}; give auto, never, or a checkpoint such as runs/NAME/checkpoints/step_00000500",
        )
    if recipe.run.on_divergence == "rewind" and recipe.checkpoint.every_steps is None:
        yield "run.on_divergence", "rewind needs checkpoint.every_steps, to have something to go back to"


@_rule("profile", "run.max_steps")
def _profile(recipe: Recipe, ranks: int | None) -> Found:
    profile, last = recipe.profile, recipe.run.max_steps
    if profile is not None and last is not None and profile.start_step + profile.steps - 1 > last:
        yield "profile.steps", f"steps {profile.start_step} to {profile.start_step + profile.steps - 1} go beyond run.max_steps {last}"


_NODES = re.compile(r"[1-9]\d*(-[1-9]\d*)?")
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)


@_rule("slurm")
def _slurm(recipe: Recipe, ranks: int | None) -> Found:
    slurm = recipe.slurm
    if slurm is None:
        return
    if isinstance(slurm.nodes, str):
        first, _, last = slurm.nodes.partition("-")
        if not _NODES.fullmatch(slurm.nodes) or int(last or first) < int(first):
            yield "slurm.nodes", f"must be a number, or a range such as 2-4; got {slurm.nodes!r}"
    if slurm.time is not None and not _TIME.fullmatch(slurm.time):
        yield "slurm.time", f"must be minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS; got {slurm.time!r}"
    if slurm.host_memory is not None and not _MEMORY.fullmatch(slurm.host_memory):
        yield "slurm.host_memory", f"must be a number with K, M, G or T, such as 500G; got {slurm.host_memory!r}"
    for key in ("partition", "account", "qos", "constraint", "exclude", "reservation", "mail", "interface", "python"):
        text = getattr(slurm, key)
        if text is not None and not text.isprintable():
            yield f"slurm.{key}", f"holds a character that cannot stand in a job script; got {text!r}"
    for key in ("sbatch_extra", "srun_extra"):
        for option in getattr(slurm, key) or ():
            if not re.fullmatch(r"--?[a-zA-Z][\w-]*(=.*)?", option) or not option.isprintable():
                yield f"slurm.{key}", f"must be options, --name or --name=value; got {option!r}"
    for name, value in (slurm.environment or {}).items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield "slurm.environment", f"{name!r} is no name of an environment variable"
        if "\0" in value:
            yield f"slurm.environment.{name}", "holds a null character"
