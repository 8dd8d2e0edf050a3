"""The entry point: `torchrun --nproc-per-node N launcher/train.py recipe=NAME [key=value ...]`.

Checks the recipe before torch is imported, so that a mistake in it costs a second. The run itself
is `training/run.py`.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if sys.path and Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
    # Started as a file: its folder would come before the standard library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launcher.checkpoint.resume import choose_resume
from launcher.distributed.environment import (
    cache_folder,
    prepare_cuda,
    read_environment,
    set_compile_cache,
)
from launcher.errors import EXIT_FAILED, EXIT_USAGE, RecipeError, TrainingError
from launcher.recipe.load import load_recipe, to_yaml
from launcher.reliability.run_directory import RunFolder, last_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns the exit status."""
    environment = run = None
    try:
        environment = read_environment()
        loaded = load_recipe(
            sys.argv[1:] if arguments is None else arguments, ranks=environment.world_size
        )
        run = RunFolder(Path(loaded.recipe.run.dir))
        if environment.main:
            run.take(environment)
            recipe_yaml = to_yaml(loaded.recipe)
            restarted = run.was_begun_by(environment)
            run.resume = choose_resume(run, loaded.recipe, recipe_yaml, restarted=restarted)
            run.note_start(environment)
            run.create(recipe_yaml, from_scratch=run.resume == "never")
    except RecipeError as error:
        if run is not None:
            run.release()
        if environment is None or environment.main:
            print(error, file=sys.stderr, flush=True)
            if environment is not None:
                environment.tell_agent(str(error))
                environment.tell_job(str(error))
        else:
            time.sleep(10)  # rank 0 prints it; torchrun ends all ranks once one has ended
        return EXIT_USAGE
    prepare_cuda(deterministic=loaded.recipe.run.deterministic)
    set_compile_cache(cache_folder(loaded.recipe.data.cache))
    # torch's import creates a million objects that stay alive. Searching them for garbage again and
    # again takes a tenth of the start; frozen, they are never searched.
    gc.disable()
    from launcher.training.run import train

    gc.freeze()
    gc.enable()

    try:
        return train(loaded, environment, run)
    except TrainingError as error:  # raised before the ranks could exchange failures
        if environment.local_rank == 0 or error.reason != "no_gpu":
            print(f"rank {environment.rank}: {error}", file=sys.stderr, flush=True)
        environment.tell_agent(str(error))
        if environment.main:
            with contextlib.suppress(OSError, TrainingError):  # another job may own the folder
                step = last_line(run.metrics).get("step", 0)
                run.write_status("failed", step=step, reason=error.reason, error=str(error))
                run.note("failed", step=step, reason=error.reason)
        return EXIT_FAILED
    finally:
        run.release()


if __name__ == "__main__":
    _status = main()
    if "torch" in sys.modules:
        # Threads of torch can abort an interpreter that exits: the run would count as failed
        from launcher.reliability.failures import end_process

        end_process(_status)
    sys.exit(_status)
