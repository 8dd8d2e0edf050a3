"""`launcher train`: checks the recipe, then starts its ranks as torchrun does."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE
from launcher.recipe.load import load_recipe


def main(overrides: Sequence[str], *, gpus: int | None, max_restarts: int) -> int:
    """Returns the exit status once all ranks have ended: 75 if the run was stopped on request.

    gpus: processes; None: the visible GPUs, or 1. Raises RecipeError before anything is started.
    """
    recipe = load_recipe(overrides, ranks=gpus).recipe
    if gpus is None:
        gpus = _visible_gpus(recipe.run.device)
        load_recipe(overrides, ranks=gpus)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, without its warning
    options = ["--standalone", f"--nproc-per-node={gpus}", f"--max-restarts={max_restarts}"]
    status = _run_agent([*options, "-m", "launcher.train", *overrides])
    stopped = status != EXIT_USAGE and _was_stopped(Path(recipe.run.dir))
    return EXIT_STOPPED if stopped else status


def _run_agent(arguments: list[str]) -> int:
    """Runs torchrun's agent in this process. Unlike torchrun it prints no traceback at the end."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    run: Any = torchrun  # without types
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else EXIT_FAILED
    except SignalException as error:
        return 128 + int(error.sigval)
    return EXIT_DONE


def _was_stopped(run_dir: Path) -> bool:
    """Under torchrun a stopped run exits with 0; status.json has the outcome."""
    try:
        return bool(json.loads((run_dir / "status.json").read_text())["state"] == "stopped")
    except (OSError, ValueError, KeyError):
        return False


def _visible_gpus(device: str) -> int:
    if device == "cpu":
        return 1
    import torch  # takes seconds; `--gpus` saves them

    return max(1, torch.cuda.device_count())
