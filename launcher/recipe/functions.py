"""A user's own functions that a recipe names: `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from launcher.errors import RecipeError


def call_function(name: str, arguments: Mapping[str, Any], *, key: str) -> Any:
    """Calls a function with keyword arguments.

    name, key: see `import_function`.
    Raises RecipeError if there is no such function or it takes other arguments.
    """
    function = import_function(name, key=key)
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        where, what = f"{key.partition('.')[0]}.arguments", f"{name}{signature}"
        raise RecipeError(f"{where}: {what} cannot be called with them: {error}") from None
    return function(**arguments)


def import_function(name: str, *, key: str) -> Callable[..., Any]:
    """The function `package.module:function`, from an installed package or the current folder.

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
        where = f"it must be in the current folder ({os.getcwd()}) or be installed"
        raise RecipeError(f"{key}: there is no module {error.name}; {where}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name]
        where = f"{module_name} ({module.__file__}) has no function {function_name}"
        raise RecipeError(f"{key}: {where}; it has {', '.join(own) or 'none'}")
    return function  # type: ignore[no-any-return]
