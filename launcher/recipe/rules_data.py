"""Rules of the section data."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from launcher.recipe.hub import is_hub_id
from launcher.recipe.rules_model import is_model_id
from launcher.recipe.schema import Data, Recipe

Found = Iterator[tuple[str, str]]

_COLUMNS = {
    "text_column": {"text", "classification"},
    "messages_column": {"chat"},
    "prompt_column": {"instruct"},
    "response_column": {"instruct"},
    "label_column": {"classification"},
    "labels": {"classification"},
    "chat_template": {"chat", "instruct"},
}
"""Keys of data that only some kinds read."""


def _kinds(recipe: Recipe) -> set[str]:
    sources = recipe.data.train.values() if isinstance(recipe.data.train, dict) else ()
    return {recipe.data.kind, *(source.kind for source in sources if source.kind is not None)}


def _columns(recipe: Recipe) -> Found:
    data = recipe.data
    for name, kinds in _COLUMNS.items():
        if getattr(data, name) == getattr(Data, name):
            continue
        if data.builder is not None:
            yield f"data.{name}", "not available with data.builder, which reads the data itself"
        elif not kinds & _kinds(recipe):
            needed = " and ".join(sorted(kinds))
            yield f"data.{name}", f"not available with kind {data.kind}; for kind {needed}"
    if not data.streaming and data.shuffle_buffer != Data.shuffle_buffer:
        what = "needs data.streaming; without it the whole set is shuffled"
        yield "data.shuffle_buffer", what


def _names(recipe: Recipe) -> Found:
    sections = (("data.train", recipe.data.train), ("data.validation", recipe.data.validation))
    for key, section in sections:
        for name in section if isinstance(section, dict) else ():
            if not re.fullmatch(r"[A-Za-z_][\w-]*", name):
                what = "a name has letters, digits, _ and - (it is part of metrics and overrides)"
                yield f"{key}.{name}", f"{what}; got {name!r}"


def _sequence_length(recipe: Recipe) -> Found:
    data = recipe.data
    predicts_tokens = data.builder is None and data.kind != "classification"
    if data.sequence_length == 1 and predicts_tokens:
        what = "chats and prompts without a token to predict, and texts without a context"
        yield "data.sequence_length", f"1 leaves {what}; give 2 or more"


def _tokenizer(recipe: Recipe) -> Found:
    if recipe.data.builder is not None or _kinds(recipe) == {"tokens"}:
        return
    if recipe.data.tokenizer is None and recipe.model.path is None:
        what = "a model.config has none of its own: give `bytes` or a folder with a tokenizer"
        yield "data.tokenizer", f"missing; {what}"


def _tokenizer_folder(recipe: Recipe) -> Found:
    tokenizer = recipe.data.tokenizer
    if recipe.data.builder is not None or _kinds(recipe) == {"tokens"}:
        return
    if tokenizer in (None, "bytes") or is_model_id(str(tokenizer)):
        return
    if not os.path.isdir(str(tokenizer)):
        what = "give `bytes`, a folder with a tokenizer, or a hub id `owner/name`"
        yield "data.tokenizer", f"no such folder: {tokenizer}; {what}"


def _chat_template(recipe: Recipe) -> Found:
    template = recipe.data.chat_template
    if template is not None and not os.path.isfile(template):
        where = f"{template} (looked for in {Path.cwd()})"
        yield "data.chat_template", f"no such file: {where}; give a file with a Jinja template"


def _train_files(recipe: Recipe) -> Found:
    train, builder = recipe.data.train, recipe.data.builder
    if builder is not None:
        what = "data.builder is given too, which brings its own; set one of the two to null"
        for name in ("train", "validation"):
            if getattr(recipe.data, name) is not None:
                yield f"data.{name}", what
    elif train is None:
        what = "a list of files, globs, folders or hub data set ids (or data.builder)"
        yield "data.train", f"missing; must be given: {what}"
    elif isinstance(train, dict):
        for name, source in train.items():
            yield from _missing_files(f"data.train.{name}.files", source.files)
    else:
        yield from _missing_files("data.train", train)


def _validation_files(recipe: Recipe) -> Found:
    validation = recipe.data.validation
    if isinstance(validation, dict):
        for name, files in validation.items():
            yield from _missing_files(f"data.validation.{name}", files)
    else:
        yield from _missing_files("data.validation", validation or ())


def _missing_files(key: str, patterns: tuple[str, ...]) -> Found:
    for index, pattern in enumerate(patterns):
        if os.path.exists(pattern) or is_hub_id(pattern):
            continue
        if next(glob.iglob(pattern, recursive=True), None) is None:
            is_glob = any(character in pattern for character in "*?[")
            what = "no such file or folder, and no hub id `owner/name`"
            what = "matches no file" if is_glob else what
            yield f"{key}.{index}", f"{pattern!r}: {what} (looked for in {Path.cwd()})"


def _streaming(recipe: Recipe) -> Found:
    data = recipe.data
    if not data.streaming:
        return
    if recipe.run.epochs is not None:
        what = "not available with data.streaming, whose length is not known; use run.max_steps"
        yield "run.epochs", what
    if data.builder is not None:
        yield "data.streaming", "not available with data.builder, which decides it"
    elif isinstance(data.train, dict):
        what = "a mixture is not available with data.streaming; give one list of files"
        yield "data.train", what
    elif data.kind == "classification":
        yield "data.streaming", "not available with kind classification"


RULES = (_columns, _names, _sequence_length, _tokenizer, _streaming)
FILE_RULES = (_tokenizer_folder, _chat_template, _train_files, _validation_files)
"""Those that look for the data, which a plan does not need."""
