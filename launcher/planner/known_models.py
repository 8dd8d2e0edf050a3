"""Configs of some models of the hub, for plans without network.

`models.json` has the sizes of each, where they were published, its published billions of parameters
and the ids of models of the same shape. It holds what memory depends on, and is not for training.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path

from launcher.recipe.schema import Recipe
from launcher.reliability.json_files import Json


@functools.cache
def known_models() -> dict[str, Json]:
    """The entries of `models.json`, by every id."""
    entries: dict[str, Json] = json.loads(
        Path(__file__).with_name("models.json").read_text("utf-8")
    )
    also = {name: entry for entry in entries.values() for name in entry.get("also", ())}
    return entries | also


def with_known_config(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with a config of `models.json` in place of a hub id, if the hub's cache does not
    have this model, and a note; else the recipe itself and an empty text."""
    path = recipe.model.path
    entry = None if path is None or os.path.exists(path) else known_models().get(path)
    if path is None or entry is None:
        return recipe, ""
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return recipe, ""
    model = dataclasses.replace(recipe.model, path=None, config=entry["config"], init=None)
    note = f"{path} is not in the hub's cache; its sizes are those that launcher knows "
    note += f"({entry['source']}); training needs the weights"
    return dataclasses.replace(recipe, model=model), note
