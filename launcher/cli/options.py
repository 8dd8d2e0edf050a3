"""Options of a command beside overrides of the recipe: `ranks=2`, `--gpu-memory 80GiB`."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.errors import RecipeError, suggestion
from launcher.recipe.decode import all_keys
from launcher.recipe.find import recipe_folders
from launcher.recipe.schema import Recipe, Slurm


def with_dashes(
    command: str, arguments: Sequence[str], options: Mapping[str, bool | None], *, overrides: bool
) -> list[str]:
    """Arguments with each option `name=value` written as `--name=value`.

    command: its name, for messages.
    options: their names, and for a flag, which takes true or false, its default.
    overrides: whether keys of a recipe may stand among the arguments.
    Raises RecipeError with all words that are neither.
    """
    sections = recipe_keys(command) if overrides else []
    spelled: list[str] = []
    problems: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        dashed = name.startswith("--")
        key = name.removeprefix("--").replace("-", "_") if dashed else name
        if key in options and (dashed or equals):
            option = f"--{key.replace('_', '-')}"
            if not equals:
                spelled.append(option)
            elif options[key] is None:
                spelled.append(f"{option}={value}")
            elif value not in ("true", "false"):
                problems.append(f"command line: {argument}: must be true or false")
            elif (value == "true") != options[key]:
                spelled.append(option if value == "true" else f"--no-{option[2:]}")
        elif argument == "--help" or (not dashed and _is_word(argument, sections)):
            spelled.append(argument)
        else:
            near = suggestion(key, [*options, *sections])
            there = ", ".join([*options, *(["and keys of the recipe"] if overrides else [])])
            message = f"no option of launcher {command}{near}; there are {there}"
            problems.append(f"command line: {argument}: {message}")
    if problems:
        raise RecipeError(problems)
    return spelled


def recipe_keys(command: str) -> list[str]:
    """Words that may stand before `=` in an override."""
    keys = ["recipe", *(key.name for key in dataclasses.fields(Recipe))]
    if command == "submit":
        keys += ["sweep", *(key.name for key in dataclasses.fields(Slurm))]
    return keys


def _is_word(argument: str, sections: Sequence[str]) -> bool:
    """Whether this is a path or may be an override; the recipe's check finds unknown keys."""
    name, equals, _ = argument.partition("=")
    if not equals or os.path.exists(argument):
        return True
    section = re.split(r"[.\[]", name.lstrip("~+"), maxsplit=1)[0]
    return bool(sections) and (section in sections or section != name or "/" in name)


def complete_override(incomplete: str) -> list[str]:
    """Completions of an override for the shell: recipes by name, and keys."""
    recipes = {file.stem for folder in recipe_folders() for file in folder.glob("*.yaml")}
    words = [f"recipe={name}" for name in sorted(recipes)] + [f"{key}=" for key in all_keys()]
    return [word for word in words if word.startswith(incomplete)]


def read_options(
    command: str,
    arguments: Sequence[str],
    known: Mapping[str, Callable[[str], Any]],
    *,
    recipe: bool = True,
) -> tuple[dict[str, Any], list[str]]:
    """Reads options, `name=value` or `--name value`; a flag, read by `truth`, needs no value.

    command: as messages call it.
    known: what reads each option's text, and raises ValueError with what it must be.
    recipe: whether overrides may stand among them; they are returned, too.
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
            if (
                recipe
                and not dashed
                and equals
                and (section in sections or section != name or name == "recipe")
            ):
                rest.append(
                    argument
                )  # an unknown key within a section is told by the recipe's own check
            else:
                also = ["recipe", *sections] if recipe else []
                there = ", ".join([*known, *(["and keys of the recipe"] if recipe else [])])
                problems.append(
                    f"command line: {argument}: no option of {command}"
                    f"{suggestion(name, [*known, *also])}; there are {there}"
                )
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
            problems.append(
                f"command line: {argument if equals else f'{argument} {text}'}: {error}"
            )
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


_UNITS: dict[str, int] = {
    prefix + "iB": 1024**power for power, prefix in enumerate("KMGT", start=1)
}
_UNITS |= {prefix + "B": 1000**power for power, prefix in enumerate("KMGT", start=1)}


def size(text: str) -> int:
    """Reads bytes with a unit: `80GiB` is 80 x 1024^3, `80GB` is 80 x 1000^3."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", text)
    unit = (
        None
        if match is None
        else next((unit for unit in _UNITS if unit.lower() == match[2].lower()), None)
    )
    if match is None or unit is None or float(match[1]) <= 0:
        raise ValueError("must be a size with a unit, such as 80GiB, 81920MiB or 80GB")
    return int(float(match[1]) * _UNITS[unit])
