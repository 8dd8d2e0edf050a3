"""`launcher train`: checks the recipe, then becomes torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from launcher.recipe.load import load_recipe


def main(overrides: Sequence[str], *, gpus: int | None, max_restarts: int) -> int:
    """Replaces this process with torchrun, which thus gets its signals and gives its exit status.

    gpus: processes; None: the visible GPUs, or 1. Raises RecipeError before anything is started.
    """
    recipe = load_recipe(overrides, ranks=gpus).recipe
    if gpus is None:
        gpus = _visible_gpus(recipe.run.device)
        load_recipe(overrides, ranks=gpus)
    options = ["--standalone", f"--nproc-per-node={gpus}", f"--max-restarts={max_restarts}"]
    agent = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "launcher.train"]
    environment = {"OMP_NUM_THREADS": "1"} | dict(
        os.environ
    )  # torchrun's default, without its warning
    os.execve(sys.executable, [*agent, *overrides], environment)


def _visible_gpus(device: str) -> int:
    if device == "cpu":
        return 1
    import torch  # takes seconds; `--gpus` saves them

    return max(1, torch.cuda.device_count())
