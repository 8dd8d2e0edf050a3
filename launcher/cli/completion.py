"""What a shell offers for the word before the cursor. typer has the scripts of the shells, which start
`launcher` at each tab."""

from __future__ import annotations

import glob
import json
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from typer.core import TyperOption

from launcher.distributed.hardware import GPUS
from launcher.recipe.decode import dotted, subsection
from launcher.recipe.find import recipe_names
from launcher.recipe.schema import Recipe, Slurm, Source
from launcher.recipe.section import Section


def completions(
    options: Mapping[str, TyperOption],
    switches: Sequence[str],
    sections: Sequence[str],
    before: Sequence[str],
    incomplete: str,
) -> list[str]:
    """The words that a word may become; none where the shell completes files.

    options, switches, sections: what a command takes (`app.Command`). before: the complete words.
    bash takes `=` for a word of its own: `gpu=h1` is the words `gpu`, `=` and `h1`, of which it
    replaces the last one.
    """
    known = dict(_arguments(options, sections))
    name = before[-2] if before[-1:] == ["="] and before[1:] else "".join(before[-1:])
    if name in known:
        found = [value for value in known[name] if value.startswith(incomplete)]
    elif "=" in incomplete:
        name, _, value = incomplete.partition("=")
        values = known.get(name) or _files(value)
        found = [f"{name}={each}" for each in values if each.startswith(value)]
    else:
        names = [each for each in known if each.startswith(incomplete)]
        found = [f"{each}=" for each in names]
        if len(names) == 1:  # a second word keeps the shell from a space after the first one
            found = [f"{names[0]}={value}" for value in known[names[0]] or ("", "VALUE")]
        found += [switch for switch in (*switches, "--help") if switch.startswith(incomplete)]
    return found


def _arguments(
    options: Mapping[str, TyperOption], sections: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """The names of all arguments of a command, and the values of each if they are few."""
    for name, param in options.items():
        if name == "gpu":
            yield name, [gpu.name.lower().replace(" ", "-") for gpu in GPUS]
        else:
            yield name, [str(choice) for choice in param.type_descriptor.choices or ()]
    if "recipe" in sections:
        yield "recipe", recipe_names()
    recipe = dict(_keys(Recipe)) if sections else {}
    yield from recipe.items()
    if "sweep" in sections:
        yield from ((f"sweep.{key}", values) for key, values in recipe.items())
    yield from ((key, values) for key, values in _keys(Slurm) if key in sections)


def _files(start: str) -> list[str]:
    """The files and folders whose paths begin so; in place of one folder what is in it."""
    found = [
        path + "/" * os.path.isdir(path) for path in sorted(glob.glob(f"{glob.escape(start)}*"))
    ]
    folder = len(found) == 1 and found[0].endswith("/")
    return [*found, *_files(found[0])] if folder else found


def _keys(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Every key and the values that it may have, if they are few. Of sections that cannot be null
    only their keys."""
    for name, field in section.__dataclass_fields__.items():
        inner, values = subsection(section, name), list(dict.fromkeys(_values(field.type)))
        if inner in (None, Source) or values:
            choices = [] if inner is Source or (values == ["null"] and inner is None) else values
            yield dotted((*path, name)), choices
        if inner not in (None, Source):
            yield from _keys(inner, (*path, name))


def _values(kind: Any) -> Iterator[str]:
    """The values of a type, as YAML."""
    inside = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        yield from (value if isinstance(value, str) else json.dumps(value) for value in inside)
    elif typing.get_origin(kind) is Annotated:
        yield from _values(inside[0])
    elif kind is bool:
        yield from ("true", "false")
    elif kind is type(None):
        yield "null"
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for one in inside:
            yield from _values(one)
