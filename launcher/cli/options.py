"""Words of a command that are not overrides of the recipe: `ranks=2`, `gpu_memory=80GiB`, `--json FILE`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.errors import RecipeError
from launcher.recipe.decode import suggestion
from launcher.recipe.schema import Recipe


def take_options(arguments: Sequence[str], defaults: Mapping[str, int | bool | None]) -> tuple[dict[str, int | bool | None], list[str]]:
    """Splits off the options named in `defaults`; returns them and the remaining arguments.

    An option whose default is a bool takes true or false, any other a whole number from 1. Raises RecipeError otherwise.
    """
    options, rest = dict(defaults), []
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in defaults or not equals:
            rest.append(argument)
            continue
        try:
            options[name] = truth(text) if isinstance(defaults[name], bool) else count(text)
        except ValueError as error:
            raise RecipeError(f"command line: {argument}: {error}") from None
    return options, rest


def read_options(
    command: str, arguments: Sequence[str], known: Mapping[str, Callable[[str], Any]], *, recipe: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Options of both styles, `name=value` and `--name value` (or `--name=value`); one read by `truth` may stand bare.

    command: as messages call it.
    known: what reads each option's text, and raises ValueError with what it must be.
    recipe: whether overrides of the recipe may stand among them; they are returned after the options that were given.
    Raises RecipeError with all that is wrong; a word that is neither names every option there is.
    """
    sections = {field.name for field in dataclasses.fields(Recipe)} if recipe else set()
    found: dict[str, Any] = {}
    rest: list[str] = []
    problems: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, equals, text = argument.partition("=")
        dashed = name.startswith("-")
        name = name.lstrip("-").replace("-", "_") if dashed else name
        if name not in known:
            section = re.split(r"[.\[]", name.lstrip("~+"), maxsplit=1)[0]
            if recipe and not dashed and equals and (section in sections or section != name or name == "recipe"):
                rest.append(argument)  # an unknown key within a section is told by the recipe's own check
            else:
                also = ["recipe", *sections] if recipe else []
                there = ", ".join([*known, *(["and keys of the recipe"] if recipe else [])])
                problems.append(f"command line: {argument}: no option of {command}{suggestion(name, [*known, *also])}; there are {there}")
            continue
        if not equals:
            if not dashed:
                problems.append(f"command line: {argument}: has no value; write {name}=...")
                continue
            if known[name] is truth:
                text = "true"
            elif waiting and not waiting[0].startswith("--"):
                text = waiting.pop(0)
            else:
                problems.append(f"command line: {argument}: has no value; write {argument} VALUE")
                continue
        try:
            if name in found:
                raise ValueError("was given twice")
            found[name] = known[name](text)
        except ValueError as error:
            problems.append(f"command line: {argument if equals else f'{argument} {text}'}: {error}")
    if problems:
        raise RecipeError(problems)
    return found, rest


def truth(text: str) -> bool:
    """Reads true or false."""
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


def count(text: str) -> int:
    """Reads a whole number from 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ValueError("must be a whole number, at least 1")
    return int(text)


def word(text: str) -> str:
    """Reads any text but an empty one."""
    if not text:
        raise ValueError("must not be empty")
    return text


_UNITS: dict[str, int] = {prefix + "iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {prefix + "B": 1000**power for power, prefix in enumerate("KMGT", start=1)}


def size(text: str) -> int:
    """Reads bytes with a unit: `80GiB` is 80 x 1024^3, `80GB` is 80 x 1000^3."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", text)
    unit = None if match is None else next((unit for unit in _UNITS if unit.lower() == match[2].lower()), None)
    if match is None or unit is None or float(match[1]) <= 0:
        raise ValueError("must be a size with a unit, such as 80GiB, 81920MiB or 80GB")
    return int(float(match[1]) * _UNITS[unit])
