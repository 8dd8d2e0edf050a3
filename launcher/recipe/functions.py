"""A user's own functions that a recipe names: `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import RecipeError
from launcher.recipe.load import resolve_arguments
from launcher.recipe.schema import Recipe

TRUST_HELP = "Run the code that the recipe in RUN_DIR names: you have read it and trust it."
"""The help text of --trust-run, an option of commands that build what the recipe of a run names."""


def call_function(name: str, arguments: Mapping[str, object], *, key: str) -> object:
    """Calls a function with keyword arguments. References to the environment get their values.

    name, key: see `import_function`.
    Raises RecipeError if there is no such function, it takes other arguments, or a reference has no
    value.
    """
    function = import_function(name, key=key)
    arguments = resolve_arguments(arguments, (key.partition(".")[0], "arguments"))
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        where, what = f"{key.partition('.')[0]}.arguments", f"{name}{signature}"
        raise RecipeError(f"{where}: {what} cannot be called with them: {error}") from None
    return function(**arguments)


def import_function(name: str, *, key: str) -> Callable[..., Any]:
    """The function `package.module:function`, from the current folder, an installed package or the
    folder of the recipe (`load_recipe`).

    key: of the recipe, for messages: `SECTION.builder`.
    Raises RecipeError if there is none. Errors of its module are not caught.
    """
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        where = (
            f"it must be in the current folder ({os.getcwd()}) or that of the recipe, or installed"
        )
        raise RecipeError(f"{key}: there is no module {error.name}; {where}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name]
        where = f"{module_name} ({module.__file__}) has no function {function_name}"
        raise RecipeError(f"{key}: {where}; it has {', '.join(own) or 'none'}")
    return function  # type: ignore[no-any-return]


def code_of(recipe: Recipe) -> list[str]:
    """The keys by which a recipe runs code that is not part of launcher, with their values."""
    named = [f"{key}: {value}" for key, value in recipe.own_functions().items()]
    if recipe.model.trust_remote_code:
        named.append(f"model.trust_remote_code: true (the code in {recipe.model.path})")
    return named


def refuse_code(recipe: Recipe, file: Path, *, trust_run: bool) -> None:
    """Raises RecipeError if the recipe in a file of a run would run code, unless it is trusted."""
    named = [] if trust_run else code_of(recipe)
    if named:
        what = f"{file}: its recipe would run code: {', '.join(named)}"
        raise RecipeError(f"{what}. If you have read that code and trust it, add --trust-run")
