"""Which file `recipe=NAME` means."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import RecipeError, suggestion


def _shipped() -> dict[str, Path]:
    """Recipes by name: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    files = [*package.glob("_recipes/*.yaml"), *package.parent.glob("recipes/*.yaml")]
    return {path.stem: path for path in sorted(files)}


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return list(_shipped())


def find_recipe(arguments: Sequence[str]) -> Path:
    """The file that `recipe=NAME` or `recipe=FILE` means. Raises RecipeError with known names."""
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("recipe=")]
    shipped = _shipped()
    if len(named) != 1 or not named[0]:
        hint = f"give recipe=NAME ({', '.join(shipped)}) or recipe=path/to/file.yaml"
        meant = [argument for argument in map(written_as, arguments) if argument is not None]
        if not any(named) and meant:
            if not any(argument.startswith("recipe=") for argument in meant):
                meant.insert(0, "recipe=sft")
            hint = f"write {shlex.join(meant)}"
        what = f"{len(named)} recipes given" if any(named) else "no recipe given"
        raise RecipeError(f"command line: {what}; {hint}")
    (name,) = named
    if name in shipped or os.path.isfile(name):
        return shipped.get(name, Path(name))
    what = "a folder, not a file" if os.path.isdir(name) else "no such file"
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        near = f"{suggestion(name, shipped)}; known: {', '.join(shipped)}"
        what = f"no recipe of that name{near}; or give the path of a .yaml file"
    raise RecipeError(f"command line: recipe={name}: {what}")


def written_as(argument: str) -> str | None:
    """How an argument without a key is written: `recipe=`, `model.path=` or `data.train=` before
    it, by what is there of that name; what has the form of a hub id is a model. None if it has a key,
    or nothing is there."""
    if argument in _shipped() or argument.endswith((".yaml", ".yml")):
        return f"recipe={argument}"
    if "=" in argument:
        return None
    if os.path.isfile(f"{argument}/config.json"):
        return f"model.path={argument}"
    if os.path.exists(argument):
        return f"data.train={argument}"
    return f"model.path={argument}" if re.fullmatch(r"[\w.-]+/[\w.-]+", argument) else None


def shown_path(path: Path) -> str:
    """The path as messages show it: relative if it is below the current folder."""
    whole, folder = path.resolve(), Path.cwd()
    return str(whole.relative_to(folder) if whole.is_relative_to(folder) else path)
