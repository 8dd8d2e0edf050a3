"""`launcher selftest`: starts `launcher.diagnostics.selftest` under torchrun."""

from __future__ import annotations

import sys
from typing import Annotated

from launcher.cli.app import Overrides, flag, option
from launcher.distributed.spawn import run_ranks
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_NO
from launcher.recipe.load import load_recipe


def selftest(
    overrides: Overrides,
    gpus: Annotated[int, option("GPUs, or processes on the CPU.", "N")] = 2,
    steps: Annotated[int, option("Optimizer steps of each variant.", "N")] = 5,
    shrink: Annotated[bool, flag("--shrink", "Make the model small.")] = False,
) -> int:
    """Compare the losses of a few steps over strategies, accumulation and numbers of ranks.

    Also with the recipe's division of rows, experts and layers over ranks.

    Exit status 3: losses differ by more than their tolerance, or copies of a weight by a bit.

    \b
    Example:
      launcher selftest recipe=fsdp gpus=2 --shrink
    """
    recipe = load_recipe(overrides, ranks=None).recipe  # reports mistakes before any process starts
    setting = {
        "recipe": list(overrides),
        "device": "cpu" if recipe.run.device == "cpu" else "any",
        "steps": steps,
        "shrink": shrink,
    }
    print(f"starting {gpus} processes ...", flush=True)
    ended = run_ranks("launcher.diagnostics.selftest", setting, ranks=gpus, console=True)
    if ended.result not in (EXIT_DONE, EXIT_NO):
        print(ended.printed, end="", file=sys.stderr)
    # torchrun's own status is 0 or 1
    return EXIT_FAILED if ended.result is None else int(ended.result)
