"""`launcher inspect`: samples as the model will see them, totals and a histogram of lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from launcher.cli.app import CheckedGpus, CheckedNodes, Overrides, make_parent_of_file, option
from launcher.console import configure_logging
from launcher.errors import EXIT_DONE, RecipeError, suggestion
from launcher.recipe.data_sets import DataFiles, data_sets
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Data


def inspect(
    overrides: Overrides,
    set: Annotated[
        str, option("train, validation, or a name in data.train or data.validation.", "NAME")
    ] = "train",
    samples: Annotated[int, option("Samples to print.", "N")] = 3,
    tokens: Annotated[
        int | None, option("Tokens to print of each sample. Default: 600.", "N")
    ] = None,
    out: Annotated[
        Path | None,
        option("Also write the page as HTML, with the images of rows.", "FILE"),
    ] = None,
    gpus: CheckedGpus = None,
    nodes: CheckedNodes = 1,
) -> int:
    """Print samples as the model will see them, packing, totals and a histogram of lengths.

    Of data.builder: the tensors of its samples and of a micro-batch. This runs the builder's code.

    \b
    Example:
      launcher inspect recipe=quickstart samples=2
    """
    configure_logging(stream="stderr")
    loaded = load_recipe(overrides, ranks=None if gpus is None else nodes * gpus, hub=True)
    recipe = loaded.recipe
    builder = recipe.data.builder
    if builder is not None and tokens is not None:
        raise RecipeError(
            "command line: tokens: the samples of data.builder are tensors; leave out"
        )
    if builder is None:
        _sets_of(recipe.data, set)  # a set without that name is reported at once
    if out is not None:
        make_parent_of_file(out, "out")

    # After all other errors of the recipe, because they import torch
    from launcher.cli.inspect_own import print_own_page
    from launcher.cli.inspect_page import print_page
    from launcher.models.config_keys import check_config_keys
    from launcher.planner import auto, sizes
    from launcher.planner.facts import Facts, Rows

    check_config_keys(loaded)
    if builder is not None:
        print_own_page(recipe, set, samples=samples, html=out)
        return EXIT_DONE
    rows = sizes.rows_here(recipe)
    facts = Facts(ranks=nodes * (gpus or 1), rows=rows)
    recipe, chosen = auto.resolve(recipe, facts, auto.needing("recipe", "rows"))
    sets = _sets_of(recipe.data, set)
    most = 600 if tokens is None else tokens
    print_page(recipe, set, sets, samples=samples, tokens=most, html=out)
    if chosen:
        print(sizes.sizes_text(rows, chosen))
    if isinstance(rows, Rows):
        # The time depends on the model and the machine, which only a plan looks at
        print(f"{sizes.run_length(recipe, rows).text()}; launcher plan says how long they take")
    return EXIT_DONE


def _sets_of(data: Data, name: str) -> dict[str, DataFiles]:
    """The sets of a name: `train`, `validation`, or that of a set in them, where training sets come
    first."""
    sets = {tuple(files.key.split(".", 2)[1:]): files for files in data_sets(data)}
    if data.validation_split is not None:
        held_out = {("validation", *path[1:]): files for path, files in sets.items()}
        sets |= {path: files._replace(held_out=True) for path, files in held_out.items()}
    first = next((path[0] for path in sets if name in path), "")
    named = {path[-1]: files for path, files in sets.items() if name in path and path[0] == first}
    if not named:
        known = list(dict.fromkeys([path[0] for path in sets] + [path[-1] for path in sets]))
        what = f"no set of that name{suggestion(name, known)}; there are {', '.join(known)}"
        raise RecipeError(f"command line: set={name}: {what}")
    return named
