"""Rules of the sections model and lora, and of what the data must have for the model's task."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from launcher.recipe.hub import is_hub_id
from launcher.recipe.model_config import config_problems
from launcher.recipe.schema import Model, Recipe

Found = Iterator[tuple[str, str]]

_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("n_embd", "n_layer", "n_head", "n_positions"),
}
"""Keys of a model.config that are a number of something in every model type that has them.
transformers accepts any number, and fails later, if at all, without naming the key."""


def is_model_id(name: str) -> bool:
    """Whether this is a hub id of a model, which has no config and no split as data sets have."""
    return is_hub_id(name) and re.fullmatch(r"[^/:]+/[^/:]+", name) is not None


def _source(recipe: Recipe) -> Found:
    model = recipe.model
    given = [name for name in ("path", "config", "builder") if getattr(model, name) is not None]
    if not given:
        example = "{model_type: llama, hidden_size: 256, ...}"
        yield "model.config", f"missing; give model.path, or a config such as {example}"
    if len(given) > 1:
        others = " and ".join(f"model.{name}" for name in given[:-1])
        yield f"model.{given[-1]}", f"{others} is given too; set all but one to null"
    if model.path is not None and not is_model_id(model.path):
        if not os.path.isdir(model.path):
            where = f"{model.path} (looked for in {Path.cwd()})"
            yield "model.path", f"no such folder: {where}; give a folder or a hub id `owner/name`"
        elif not os.path.isfile(os.path.join(model.path, "config.json")):
            what = "give a folder as transformers' save_pretrained writes it"
            yield "model.path", f"{model.path} has no config.json; {what}"


def _builders(recipe: Recipe) -> Found:
    for name, section in (("model", recipe.model), ("data", recipe.data)):
        builder = section.builder
        if builder is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", builder):
            yield f"{name}.builder", f"must be `package.module:function`; got {builder!r}"
        if builder is None and section.arguments is not None:
            yield f"{name}.arguments", f"needs {name}.builder, whose arguments they are"


def _memory_plan(recipe: Recipe) -> Found:
    sections = {"model.builder": recipe.model.builder, "data.builder": recipe.data.builder}
    builders = [key for key, builder in sections.items() if builder is not None]
    if recipe.logging.memory_plan and builders:
        why = "the plan would call your code a second time; use `launcher plan`"
        yield "logging.memory_plan", f"not available with {' and '.join(builders)}: {why}"


def _own_model(recipe: Recipe) -> Found:
    model = recipe.model
    if model.builder is not None:
        if recipe.data.builder is None:
            what = "a model of your own (model.builder) needs its data and loss from data.builder"
            yield "data.builder", f"missing; {what}"
        for name in ("task", "num_labels", "attention", "init"):
            if getattr(model, name) != getattr(Model, name):
                yield f"model.{name}", "not available with model.builder, which decides it"
    if model.trust_remote_code and model.path is None:
        yield "model.trust_remote_code", "needs model.path, whose code it would be"


def _attention(recipe: Recipe) -> Found:
    attention, precision = recipe.model.attention, recipe.strategy.mixed_precision
    in_float32 = precision is None or precision.param_dtype == "float32"
    if "flash_attention" in attention and in_float32:
        what = "use sdpa, or strategy.mixed_precision with bfloat16"
        yield "model.attention", f"{attention} computes in 16 bits only; {what}"


def _init(recipe: Recipe) -> Found:
    model = recipe.model
    if model.init == "pretrained" and model.path is None and model.builder is None:
        yield "model.init", "pretrained needs model.path; without one the weights are random"


def _classification(recipe: Recipe) -> Found:
    model, data = recipe.model, recipe.data
    classifies = model.task == "sequence_classification"
    if not classifies and model.num_labels is not None and model.builder is None:
        what = "not available with task causal_lm; use sequence_classification"
        yield "model.num_labels", what
    if data.builder is not None:
        return
    if classifies and data.kind != "classification":
        what = "is not for task sequence_classification; use kind classification"
        yield "data.kind", f"{data.kind} {what}"
    if not classifies and data.kind == "classification":
        yield "data.kind", "classification needs model.task: sequence_classification"
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
    if config is None:
        return
    for key, message in config_problems(config, task=recipe.model.task):
        yield f"model.config.{key}", message
    for key in _SIZES & config.keys():
        size = config[key]
        if isinstance(size, int) and not isinstance(size, bool) and size < 1:
            yield f"model.config.{key}", f"must be at least 1; got {size}"


def _vocabulary(recipe: Recipe) -> Found:
    size = (recipe.model.config or {}).get("vocab_size")
    tokenizer = recipe.data.tokenizer if recipe.data.builder is None else None
    if tokenizer == "bytes" and isinstance(size, int) and 0 < size < 257:
        what = "256 bytes and an end of document; give 257 or more"
        yield "model.config.vocab_size", f"{size} is too small for the tokenizer `bytes`: {what}"


def _lora(recipe: Recipe) -> Found:
    if recipe.lora is not None and recipe.model.freeze is not None:
        what = "which freezes everything but the adapters; set one of the two to null"
        yield "model.freeze", f"lora is given too, {what}"


RULES = (
    _source,
    _builders,
    _memory_plan,
    _own_model,
    _attention,
    _init,
    _classification,
    _config,
    _vocabulary,
    _lora,
)
