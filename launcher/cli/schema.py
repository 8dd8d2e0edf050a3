"""`launcher schema`: the JSON Schema of recipes, which editors use to complete and check keys."""

from __future__ import annotations

import json
from collections.abc import Sequence

from launcher.errors import EXIT_DONE, RecipeError
from launcher.recipe.decode import json_schema


def main(arguments: Sequence[str]) -> int:
    """Prints it. Raises RecipeError where there are arguments."""
    if arguments:
        raise RecipeError(f"command line: {arguments[0]}: launcher schema takes no arguments")
    print(json.dumps(json_schema(), indent=1))
    return EXIT_DONE
