"""`launcher schema`: the JSON Schema of recipes, which editors use to complete and check keys."""

from __future__ import annotations

import json

from launcher.errors import EXIT_DONE
from launcher.recipe.decode import json_schema


def main() -> int:
    """Prints it."""
    print(json.dumps(json_schema(), indent=1))
    return EXIT_DONE
