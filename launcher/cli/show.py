"""`launcher show` and `launcher schema`: the resolved recipe, and what a recipe may contain."""

from __future__ import annotations

import json
import shutil
import sys

from launcher.cli.app import CheckedGpus, CheckedNodes, Overrides
from launcher.errors import EXIT_DONE
from launcher.recipe.decode import json_schema
from launcher.recipe.load import load_recipe
from launcher.recipe.yaml_text import parse_yaml, to_yaml


def show(
    overrides: Overrides,
    gpus: CheckedGpus = None,
    nodes: CheckedNodes = 1,
) -> int:
    """Print the resolved recipe, each value with the line or argument that it comes from.

    All is checked but the names of keys in model.config, which takes seconds: launcher plan
    checks them.

    \b
    Example:
      launcher show recipe=fsdp optimizer.learning_rate=1e-4
    """
    loaded = load_recipe(overrides, ranks=None if gpus is None else nodes * gpus)
    text = to_yaml(loaded.recipe)
    _, lines = parse_yaml(text)
    keys = {line: path for path, line in lines.items() if not isinstance(path[-1], int)}
    dim, plain, column = "", "", 60
    if sys.stdout.isatty():
        dim, plain = "\x1b[2m", "\x1b[0m"
        column = min(column, shutil.get_terminal_size().columns - 36)  # for the name of a file
    for number, line in enumerate(text.rstrip("\n").split("\n"), start=1):
        if line.endswith(":"):  # a section
            print(line)
        else:
            print(f"{line:<{max(column, 0)}} {dim}# {loaded.origins.of(keys[number])}{plain}")
    return EXIT_DONE


def schema() -> int:
    """Print the JSON Schema of recipes, for editors.

    \b
    Example:
      launcher schema > recipe.schema.json
    """
    print(json.dumps(json_schema(), indent=1))
    return EXIT_DONE
