"""Which file `recipe=NAME` means."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.errors import RecipeError, closest, suggestion


def _shipped() -> dict[str, Path]:
    """Recipes by name: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    folders = (package / "_recipes", package.parent / "recipes")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(_shipped())


def find_recipe(name: str) -> Path:
    """The file that `recipe=NAME` names. Raises RecipeError with similar and known names."""
    where, written = f"command line: recipe={name}", Path(name)
    if written.suffix in (".yaml", ".yml") or "/" in name:
        if not os.path.exists(name):  # False for a name that is too long, too
            stems = {path.stem: path for path in sorted(written.parent.glob("*.y*ml"))}
            near = closest(written.stem, stems)
            hint = f"; did you mean {stems[near]}?" if near else ""
            raise RecipeError(f"{where}: no such file{hint}")
        if written.is_dir():
            raise RecipeError(f"{where}: is a folder; give a file in it")
        return written
    known = _shipped()
    if name not in known:
        near = suggestion(name, known)
        if os.path.exists(f"{name}.yaml"):
            near = f"; did you mean {name}.yaml?"
        what = f"no recipe of that name{near}; known: {', '.join(sorted(known))}"
        raise RecipeError(f"{where}: {what}; or give the path of a .yaml file")
    return known[name]


def shown_path(path: Path) -> str:
    """The path as messages show it: relative if it is below the current folder."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def read_recipe(path: Path, shown: str) -> str:
    """A recipe's text. Raises RecipeError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte {error.start}); a recipe is a YAML file"
        raise RecipeError(f"{shown}: {what}") from None
    except OSError as error:
        raise RecipeError(f"{shown}: cannot be read: {error.strerror}") from None
