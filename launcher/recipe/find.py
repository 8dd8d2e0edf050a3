"""Which file `recipe=NAME` means."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.errors import RecipeError, closest, suggestion


def recipe_folders() -> list[Path]:
    """Folders with recipes: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    return [
        folder for folder in (package.parent / "recipes", package / "_recipes") if folder.is_dir()
    ]


def find_recipe(name: str) -> Path:
    """The file that `recipe=NAME` names. Raises RecipeError with similar and known names."""
    written = Path(name)
    if written.suffix in (".yaml", ".yml") or "/" in name:
        if not os.path.exists(name):
            stems = {path.stem: path for path in sorted(written.parent.glob("*.y*ml"))}
            near = closest(written.stem, stems)
            hint = f"; did you mean {stems[near]}?" if near else ""
            raise RecipeError(f"command line: recipe={name}: no such file{hint}")
        if written.is_dir():
            raise RecipeError(f"command line: recipe={name}: is a folder; give a file in it")
        return written
    known = {
        path.stem: path
        for folder in reversed(recipe_folders())
        for path in sorted(folder.glob("*.yaml"))
    }
    if name not in known:
        near = (
            f"; did you mean {name}.yaml?"
            if os.path.exists(f"{name}.yaml")
            else suggestion(name, known)
        )
        what = f"no recipe of that name{near}; known: {', '.join(sorted(known))}"
        raise RecipeError(f"command line: recipe={name}: {what}; or give the path of a .yaml file")
    return known[name]


def shown_path(path: Path) -> str:
    """The path as messages show it: relative where it is below the current folder."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def read_recipe(path: Path, shown: str) -> str:
    """A recipe's text. Raises RecipeError where it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{shown}: not UTF-8 text (byte {error.start}); a recipe is a YAML file"
        ) from None
    except OSError as error:
        raise RecipeError(f"{shown}: cannot be read: {error.strerror}") from None
