"""Which file `recipe=NAME` means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import RecipeError, suggestion


def _shipped() -> dict[str, Path]:
    """Recipes by name: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    folders = (package / "_recipes", package.parent / "recipes")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(_shipped())


def find_recipe(arguments: Sequence[str]) -> Path:
    """The file that `recipe=NAME` or `recipe=FILE` names. Raises RecipeError with known names."""
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("recipe=")]
    known = _shipped()
    if len(named) != 1 or not named[0]:
        form = f"give recipe=NAME ({', '.join(sorted(known))}) or recipe=path/to/file.yaml"
        for argument in arguments:
            if not any(named) and (argument in known or argument.endswith(".yaml")):
                form = f"write recipe={argument}"
        what = f"{len(named)} recipes given" if any(named) else "no recipe given"
        raise RecipeError(f"command line: {what}; {form}")
    (name,) = named
    if name in known:
        return known[name]
    if os.path.isfile(name):
        return Path(name)
    what = "no such file"
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        shipped = f"{suggestion(name, known)}; known: {', '.join(sorted(known))}"
        what = f"no recipe of that name{shipped}; or give the path of a .yaml file"
    raise RecipeError(f"command line: recipe={name}: {what}")


def shown_path(path: Path) -> str:
    """The path as messages show it: relative if it is below the current folder."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
