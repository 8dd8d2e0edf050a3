"""`launcher show`: the resolved recipe, each value with its origin."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.recipe.decode import KeyPath
from launcher.recipe.load import load_recipe, scalar_as_yaml
from launcher.recipe.parse import Origins

_COMMENT_COLUMN = 60


def main(overrides: Sequence[str], *, ranks: int | None = None) -> int:
    """Prints YAML that is a recipe of the same run.

    ranks: checks the recipe for this number of ranks, too.
    """
    loaded = load_recipe(overrides, ranks=ranks)
    colour = sys.stdout.isatty()
    for text, origin in _lines(loaded.recipe, (), loaded.origins, indent=0):
        if not origin:
            print(text)
            continue
        comment = f"# {origin}"
        print(f"{text:<{_COMMENT_COLUMN}} " + (f"\x1b[2m{comment}\x1b[0m" if colour else comment))
    return 0


def _lines(
    section: Any, path: KeyPath, origins: Origins, *, indent: int
) -> Iterator[tuple[str, str]]:
    """(text, origin) a line; a section's own line has no origin."""
    if dataclasses.is_dataclass(section):
        items = [
            (field.name, getattr(section, field.name)) for field in dataclasses.fields(section)
        ]
    else:
        items = list(section.items())
    for name, value in items:
        here, margin = (*path, str(name)), "  " * indent
        if dataclasses.is_dataclass(value) or (isinstance(value, dict) and value):
            yield f"{margin}{scalar_as_yaml(name)}:", ""
            yield from _lines(value, here, origins, indent=indent + 1)
        else:
            yield f"{margin}{scalar_as_yaml(name)}: {scalar_as_yaml(value)}", origins.of(here)
