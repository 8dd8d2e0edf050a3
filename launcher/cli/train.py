"""`launcher train`: checks the recipe, then starts its ranks as torchrun does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from launcher.cli.app import Overrides, option
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE
from launcher.recipe.load import load_recipe
from launcher.reliability.run_directory import RunFolder


def train(
    overrides: Overrides,
    gpus: Annotated[
        int | None, option("Processes, one per GPU. Default: the visible GPUs, or 1.", "N")
    ] = None,
    max_restarts: Annotated[
        int, option("Restarts after a failure, from the last checkpoint.", "N", min=0)
    ] = 0,
) -> int:
    """Train on this machine: starts torchrun with a process for each GPU.

    \b
    Example:
      launcher train recipe=fsdp data.train=[my/data/*.jsonl] optimizer.learning_rate=1e-4
      launcher train recipe=quickstart run.device=cpu --gpus 2
    """
    recipe = load_recipe(overrides, ranks=gpus).recipe
    if gpus is None:
        gpus = _visible_gpus(recipe.run.device)
        load_recipe(overrides, ranks=gpus)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, without its warning
    options = ["--standalone", f"--nproc-per-node={gpus}", f"--max-restarts={max_restarts}"]
    status = _run_agent([*options, "-m", "launcher.train", *overrides])
    # Under torchrun a stopped run exits with 0; status.json has the outcome
    stopped = RunFolder(Path(recipe.run.dir)).read_status().get("state") == "stopped"
    return EXIT_STOPPED if stopped and status != EXIT_USAGE else status


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


def _visible_gpus(device: str) -> int:
    if device == "cpu":
        return 1
    import torch  # takes seconds; `--gpus` saves them

    return max(1, torch.cuda.device_count())
