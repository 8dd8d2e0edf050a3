"""Which file `recipe=NAME` means."""

from __future__ import annotations

import os
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
        for argument in arguments:
            if not any(named) and (argument in shipped or argument.endswith(".yaml")):
                hint = f"write recipe={argument}"
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


def shown_path(path: Path) -> str:
    """The path as messages show it: relative if it is below the current folder."""
    whole, folder = path.resolve(), Path.cwd()
    return str(whole.relative_to(folder) if whole.is_relative_to(folder) else path)
