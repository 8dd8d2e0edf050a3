"""The entry point: `torchrun --nproc-per-node N launcher/train.py recipe=NAME [key=value ...]`.

Checks the recipe before torch is imported, so that a mistake in it costs a second. The run itself
is `run/run.py`.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # until the handlers exist: the imports below take time
    signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    )
if sys.path and Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
    # Started as a file: its folder would come before the standard library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launcher.checkpoint import copies
from launcher.checkpoint.resume import Fresh, ResumePoint, altered, choose_resume, finished_run
from launcher.console import held_errors, prepare_streams
from launcher.distributed.environment import (
    Environment,
    cache_folder,
    prepare_cuda,
    prepare_nccl,
    prepare_openmp,
    provide_caches,
    read_environment,
    set_compile_cache,
)
from launcher.distributed.open_files import too_few_open_files
from launcher.distributed.spawn import end_process
from launcher.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USAGE,
    RecipeError,
    TrainingError,
    line_of,
)
from launcher.recipe.decode import shown
from launcher.recipe.load import load_recipe, to_yaml
from launcher.recipe.schema import Recipe
from launcher.reliability.run_directory import RunFolder
from launcher.reliability.signals import StartGuard, StopRequest, report_kill
from launcher.sources.hub import work_offline


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns the exit status."""
    with StopRequest() as stop:
        return _train(sys.argv[1:] if arguments is None else arguments, stop)


def _train(arguments: Sequence[str], stop: StopRequest) -> int:
    environment = run = start = None
    try:
        environment = read_environment()
        provide_caches()
        prepare_openmp()
        if environment.main and (problem := too_few_open_files(environment.world_size)):
            raise RecipeError(problem)
        guard = StartGuard(stop, environment)
        if finished := finished_run(arguments):
            if environment.main:
                print(finished, flush=True)
            return EXIT_DONE
        # One rank of a node looks for the files that the recipe names
        looks = environment.local_rank == 0
        loaded = load_recipe(arguments, ranks=environment.world_size, files=looks)
        run = RunFolder(Path(loaded.recipe.run.dir))
        if environment.main:
            decide = partial(_decide, loaded.recipe, run, environment, arguments)
            settings = loaded.recipe.checkpoint
            # Before the copy is looked at, a folder may seem to hold no checkpoint
            run.take(environment, refuse=decide if settings.copy_to is None else _nothing)
            guard.run = run
            if settings.copy_to is not None:
                found = copies.fetch_newest(
                    settings,
                    run,
                    name=loaded.recipe.run.name,
                    restarted=run.was_begun_by(environment),
                    altered=partial(altered, loaded.recipe),
                )
                for line in found:
                    print(f"note: {line}", flush=True)
            start = decide()  # again: the last owner may have saved after it
            if start == Fresh() and (lost := run.last_step()):
                what = "ended before its first checkpoint, so this one starts from scratch"
                print(f"note: the last start, at step {lost}, {what}", flush=True)
            if start != Fresh() and (dropped := run.dropped_overrides(arguments)):
                listed = " ".join(map(shown, dropped))
                print(f"note: the last start had {listed}, this one has not", flush=True)
            run.note_start(environment, arguments, from_scratch=start == Fresh())
            stop.on_kill = partial(_killed, run, environment)
            run.create(to_yaml(loaded.recipe), from_scratch=start == Fresh())
    except RecipeError as error:
        if run is not None:
            run.release()
        return _refuse(error, environment, stop)
    prepare_cuda(deterministic=loaded.recipe.run.deterministic)
    prepare_nccl(run.log, hang_timeout=loaded.recipe.run.hang_timeout)
    if environment.local_rank != 0 and not _fetches_itself(loaded.recipe):
        work_offline()  # the first rank of the node fetches what is missing
    set_compile_cache(cache_folder(loaded.recipe.data.cache), environment)
    # torch's import creates a million objects that stay alive. Searching them for garbage again and
    # again takes a tenth of the start; frozen, they are never searched.
    gc.disable()
    with held_errors() as held:
        from launcher.run.run import train

    gc.freeze()
    gc.enable()

    try:
        return train(loaded, environment, run, stop, start=start, before=held[0])
    except RecipeError as error:  # transformers knows no such key of model.config
        _note_failure(error, "recipe", environment, run)
        return _refuse(error, environment, stop)
    except SystemExit as error:  # of code that the recipe names: the run did not order it
        text = f"it ended itself: sys.exit({error.code}) was called at {line_of(error)}"
        print(f"rank {environment.rank}: {text}", file=sys.stderr, flush=True)
        environment.tell_agent(text)
        _note_failure(TrainingError(text), "exit", environment, run)
        return EXIT_FAILED
    except TrainingError as error:  # raised before the ranks could exchange failures
        if environment.local_rank == 0 or error.reason != "no_gpu":
            print(f"rank {environment.rank}: {error}", file=sys.stderr, flush=True)
        environment.tell_agent(str(error))
        _note_failure(error, error.reason, environment, run)
        return EXIT_FAILED
    finally:
        run.release()


def _nothing() -> None:
    """Refuses no start."""


def _fetches_itself(recipe: Recipe) -> bool:
    """Whether each rank may have to read from the hub: rows, or what the user's code asks for."""
    return recipe.data.streaming or bool(recipe.data.builder or recipe.model.builder)


def _decide(
    recipe: Recipe, run: RunFolder, environment: Environment, arguments: Sequence[str]
) -> ResumePoint:
    """`choose_resume` of this start. Raises RecipeError."""
    restarted = run.was_begun_by(environment)
    return choose_resume(recipe, run, arguments=arguments, restarted=restarted)


def _killed(run: RunFolder, environment: Environment, name: str) -> int:
    status = report_kill(run, name, owned=True)
    return EXIT_DONE if status == EXIT_STOPPED and environment.torchrun else status


def _refuse(error: RecipeError, environment: Environment | None, stop: StopRequest) -> int:
    """Prints what is wrong with the recipe, once for all ranks; returns the exit status."""
    if environment is None or environment.main:
        print(error, file=sys.stderr, flush=True)
        if environment is not None:
            environment.tell_agent(str(error))
            environment.tell_job(str(error))
    else:
        # Rank 0 prints it; torchrun ends all ranks once one has ended
        stop.watched.wait(10)
    return EXIT_USAGE


def _note_failure(error: Exception, reason: str, environment: Environment, run: RunFolder) -> None:
    """Writes a failure before the ranks could meet to the run folder."""
    if environment.main:
        with contextlib.suppress(OSError, TrainingError):  # another job may own the folder
            step = run.last_step()
            run.write_status("failed", step=step, reason=reason, error=str(error))
            run.note("failed", step=step, reason=reason)


if __name__ == "__main__":
    prepare_streams()
    with StopRequest() as _stop:
        _status = _train(sys.argv[1:], _stop)
        if "torch" in sys.modules:
            # Threads of torch can abort an interpreter that exits: the run would count as failed
            end_process(_status)
    sys.exit(_status)
