"""Words of a command that are not overrides of the recipe: `ranks=2`, `steps=5`, `shrink=true`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.errors import RecipeError


def take_options(arguments: Sequence[str], defaults: Mapping[str, int | bool | None]) -> tuple[dict[str, int | bool | None], list[str]]:
    """Splits off the options named in `defaults`; returns them and the remaining arguments.

    An option whose default is a bool takes true or false, any other a whole number from 1. Raises RecipeError otherwise.
    """
    options, rest = dict(defaults), []
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in defaults or not equals:
            rest.append(argument)
        elif isinstance(defaults[name], bool):
            if text not in ("true", "false"):
                raise RecipeError(f"command line: {argument}: must be true or false")
            options[name] = text == "true"
        else:
            if not text.isdigit() or int(text) < 1:
                raise RecipeError(f"command line: {argument}: must be a whole number, at least 1")
            options[name] = int(text)
    return options, rest
