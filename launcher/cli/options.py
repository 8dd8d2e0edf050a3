"""The arguments of a command: options such as `ranks=2` or `--ranks 2`, and overrides."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence

from launcher.errors import RecipeError, suggestion
from launcher.recipe.decode import all_keys
from launcher.recipe.find import recipe_names
from launcher.recipe.schema import Recipe, Slurm


def with_dashes(
    command: str, arguments: Sequence[str], options: Mapping[str, bool | None], *, overrides: bool
) -> list[str]:
    """Arguments with each option `name=value` written as `--name=value`.

    command: its name, for messages.
    options: their names, and for a flag, which takes true or false, its default.
    overrides: whether keys of a recipe may stand among the arguments.
    Raises RecipeError with all arguments that are neither.
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
        elif argument == "--help" or (not dashed and _is_override_or_path(argument, sections)):
            spelled.append(argument)
        else:
            near = suggestion(key, [*options, *sections])
            dashes = (f"--{option.replace('_', '-')}" for option in options)
            there = ", ".join([*dashes, *(["and keys of the recipe"] if overrides else [])])
            message = f"not an option of launcher {command}{near}; there are {there}"
            problems.append(f"command line: {argument}: {message}")
    if problems:
        raise RecipeError(problems)
    return spelled


def recipe_keys(command: str) -> list[str]:
    """The names that an override may begin with."""
    keys = ["recipe", *(key.name for key in dataclasses.fields(Recipe))]
    if command == "submit":
        keys += ["sweep", *(key.name for key in dataclasses.fields(Slurm))]
    return keys


def _is_override_or_path(argument: str, sections: Sequence[str]) -> bool:
    """Whether this is a path or may be an override; the recipe's check finds unknown keys."""
    name, equals, _ = argument.partition("=")
    if not equals or os.path.exists(argument):
        return True
    section = re.split(r"[.\[]", name.lstrip("~+"), maxsplit=1)[0]
    return bool(sections) and (section in sections or section != name or "/" in name)


def complete_override(incomplete: str) -> list[str]:
    """Completions of an override for the shell: recipes by name, and keys."""
    words = [f"recipe={name}" for name in recipe_names()] + [f"{key}=" for key in all_keys()]
    return [word for word in words if word.startswith(incomplete)]


def read_size(name: str, text: str | None) -> int | None:
    """Bytes from a size with a unit: `80GiB` is 80 x 1024^3, `80GB` is 80 x 1000^3.

    name: of the option. Raises RecipeError.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", text.upper(), re.ASCII)
    if match is None or float(match[1]) <= 0:
        what = "must be a size with a unit, such as 80GiB, 81920MiB or 80GB"
        raise RecipeError(f"command line: {name}={text}: {what}")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** ("KMGT".index(match[2]) + 1))
