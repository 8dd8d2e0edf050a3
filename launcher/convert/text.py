"""A recipe with comments as YAML text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.convert.conversion import Conversion
from launcher.recipe.decode import dotted, keys
from launcher.recipe.yaml_text import flow_yaml

_WIDTH = 96
_COLUMN = 34


def recipe_text(conversion: Conversion, header: list[str]) -> str:
    """The recipe. Each key has the tool's keys that it comes from beside it, and what means another
    thing above it."""
    order = {dotted(path): number for number, path in enumerate(keys())}
    tree: dict[str, Any] = {}
    for key in sorted(conversion.values, key=lambda key: order.get(key, len(order))):
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):  # a section that another key turns off
                break
            place = inner
        else:
            place[name] = conversion.values[key]
    lines = [line for text in header for line in _comment(text, "")]
    lines += _lines(tree, (), conversion)
    return "\n".join(lines) + "\n"


def _lines(tree: Mapping[str, Any], path: tuple[str, ...], c: Conversion) -> Iterator[str]:
    indent = "  " * len(path)
    for name, value in tree.items():
        key = ".".join((*path, name))
        for note in c.notes.get(key, ()):
            yield from _comment(note, indent)
        section = isinstance(value, dict) and key not in c.values
        mixture = key == "data.train" and isinstance(value, dict)
        origin = c.origins.get(key, "")
        if section or mixture:
            head = f"{indent}{name}:"
            yield f"{head:<{_COLUMN}}# {origin}" if origin else head
        if section:
            yield from _lines(value, (*path, name), c)
        elif mixture:
            for source, keys_of_it in value.items():
                yield f"{indent}  {source}: {flow_yaml(keys_of_it)}"
        else:
            line = f"{indent}{name}: {flow_yaml(value)}"
            yield f"{line:<{_COLUMN}}  # {origin}" if origin else line


def _comment(text: str, indent: str) -> Iterator[str]:
    inside = "  " if text.startswith("- ") else ""
    width = _WIDTH - len(indent)
    for line in textwrap.wrap(text, width, subsequent_indent=inside, break_on_hyphens=False):
        yield f"{indent}# {line}"
