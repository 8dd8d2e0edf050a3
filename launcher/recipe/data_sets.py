"""The files and the models that a recipe names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from launcher.recipe.schema import Data, Recipe, Source


class DataFiles(NamedTuple):
    """A set in data.train or data.validation."""

    key: str
    """The key of the set, such as `data.train.web`."""
    data: Data
    """The settings of this set."""
    patterns: tuple[str, ...]
    validation: bool
    held_out: bool = False
    """The documents of training data that are held out (data.validation_split)."""


def data_sets(data: Data) -> Iterator[DataFiles]:
    """The sets of a recipe, training sets first."""
    for name, source in data.sources().items():
        if isinstance(source.train, tuple):
            yield DataFiles(f"data.train.{name}".removesuffix("."), source, source.train, False)
    sets = data.validation
    for name, files in (sets if isinstance(sets, dict) else {"": sets}).items():
        if files is not None:
            yield DataFiles(f"data.validation.{name}".removesuffix("."), data, files, True)


def opened_together(data: Data) -> Iterator[tuple[tuple[str, ...] | dict[str, Source], bool]]:
    """The training data, of which a mixture is one, and each set for validation; and whether it is for
    validation."""
    if data.train is not None:
        yield data.train, False
    sets = data.validation if isinstance(data.validation, dict) else {"": data.validation}
    yield from ((files, True) for files in sets.values() if files is not None)


def named_models(recipe: Recipe) -> Iterator[tuple[str, str, bool]]:
    """The models that a recipe names by a folder or a hub id: the key, the name, and whether weights are
    needed."""
    model, tokenizer = recipe.model, recipe.data.tokenizer
    if model.path is not None:
        yield "model.path", model.path, model.init != "random"
    if recipe.distillation is not None:
        for teacher, path in recipe.distillation.paths().items():
            yield recipe.distillation.key_of(teacher), path, True
    if tokenizer not in (None, "bytes"):
        yield "data.tokenizer", str(tokenizer), False
