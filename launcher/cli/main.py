"""The `launcher` command: every subcommand with its options, their defaults and an example."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from launcher import __version__
from launcher.cli.app import Command, Overrides, SubmitCommand, flag, option
from launcher.cli.export import export
from launcher.cli.plan import plan
from launcher.cli.prepare import prepare
from launcher.cli.report import report
from launcher.cli.rows import rows
from launcher.cli.selftest import selftest
from launcher.cli.show import schema, show
from launcher.cli.status import status
from launcher.cli.train import train
from launcher.errors import EXIT_DONE, EXIT_USAGE, RecipeError
from launcher.recipe.find import recipe_names

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=f"Shipped recipes: {', '.join(recipe_names())}.",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def launcher(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Trains models with one recipe on any number of GPUs.

    Options may be written --name value or name=value.
    """


def inspect(
    overrides: Overrides,
    set: Annotated[
        str, option("train, validation, or a name in data.train or data.validation.", "NAME")
    ] = "train",
    samples: Annotated[int, option("Samples to print.", "N")] = 3,
    tokens: Annotated[int, option("Tokens to print of each sample.", "N")] = 600,
) -> int:
    """Print samples as the model will see them, packing, totals and a histogram of lengths.

    \b
    Example:
      launcher inspect recipe=quickstart samples=2
    """
    from launcher.cli.inspect import main

    return main(overrides, name=set, samples=samples, tokens=tokens)


def submit(
    overrides: Overrides,
    gpu: Annotated[
        str | None,
        option("GPU of the nodes, such as h100: check first whether the recipe fits.", "NAME"),
    ] = None,
    gpu_memory: Annotated[
        str | None, option("Memory of a GPU, for the same check.", "SIZE")
    ] = None,
    dependency: Annotated[str | None, option("sbatch --dependency.", "JOBS")] = None,
    throttle: Annotated[
        int | None, option("Runs of a sweep that run at the same time.", "N")
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Print the job script only.")] = False,
    wait: Annotated[
        bool, flag("--wait", "Wait for the end of the run; exit with its status.")
    ] = False,
    follow: Annotated[bool, flag("--follow", "As --wait, and print the output of rank 0.")] = False,
    force: Annotated[
        bool, flag("--force", "Submit even if the recipe does not fit by the plan.")
    ] = False,
) -> int:
    """Submit a Slurm job that is requeued until the run is finished.

    Arguments for Slurm win over the recipe's section slurm; sbatch_extra, srun_extra and setup
    may be repeated. sweep.KEY=A,B,C makes a job array with a run folder for each value; several
    sweeps make all combinations.

    \b
    Example:
      launcher submit recipe=fsdp nodes=2 gpus_per_node=8 time=12:00:00 partition=gpu gpu=h100
      launcher submit recipe=quickstart cpus=4 sweep.optimizer.learning_rate=1e-4,3e-4 throttle=2
    """
    from launcher.cli.submit import Request, main

    options = {"gpu": gpu, "gpu_memory": gpu_memory}
    request = Request(
        plan=[f"{name}={value}" for name, value in options.items() if value is not None],
        dependency=dependency,
        throttle=throttle,
        dry_run=dry_run,
        wait=wait,
        follow=follow,
        force=force,
    )
    return main(overrides, request)


def doctor(
    ranks: Annotated[
        int | None, option("Processes that measure together. Default: the GPUs, or 2.", "N")
    ] = None,
    json: Annotated[
        Path | None, option("Write the report, for `launcher plan rates=FILE`.", "FILE")
    ] = None,
    shared: Annotated[
        Path | None, option("A folder that all nodes must see and write to.", "FOLDER")
    ] = None,
    runs: Annotated[Path, option("Where runs are written.", "FOLDER")] = Path("runs"),
    gpus: Annotated[
        int | None,
        option("GPUs that this node must have. Default: those that Slurm granted.", "N"),
    ] = None,
    port: Annotated[int, option("A port that must be free; 0: any.", "N", min=0)] = 0,
    quick: Annotated[
        bool,
        flag("--quick", "Compare several nodes without measuring. Exits with 0; read the JSON."),
    ] = False,
    node: Annotated[
        bool, flag("--node", "Check this node alone, in seconds; prints a line for each problem.")
    ] = False,
) -> int:
    """Check whether this machine, node or allocation is fit to train, and measure how fast it is.

    Exit status 3: something is bad. For several nodes, start it like training, with one torchrun
    on each node:

    \b
    Example:
      launcher doctor --json doctor.json
      srun --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
          --rdzv-endpoint HOST:29500 -m launcher.cli.main doctor shared=FOLDER json=doctor.json
    """
    from launcher.cli.doctor import Request, main

    return main(Request(ranks, json, shared, runs, gpus, port, quick, node))


_COMMANDS = (
    *(train, plan, show, inspect, prepare, status, report, rows, submit, export, selftest),
    doctor,
    schema,
)
for function in _COMMANDS:
    about = (function.__doc__ or "").partition("\n")[0]
    app.command(cls=SubmitCommand if function is submit else Command, short_help=about)(function)


def run(arguments: Sequence[str]) -> int:
    """Runs `launcher ARGUMENTS`; returns the exit status. Raises RecipeError."""
    group = typer.main.get_command(app)
    try:
        with group.make_context("launcher", list(arguments)) as context:
            status: int = group.invoke(context)
            return status
    except typer.Exit as ended:  # --help, --version
        return ended.exit_code
    except typer.TyperException as error:
        raise RecipeError(f"command line: {error.format_message()}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script: turns exceptions into a message and an exit status."""
    if "_LAUNCHER_COMPLETE" in os.environ:  # set by the shell when it completes a command
        app(prog_name="launcher")
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `launcher show ... | head`
        sys.stderr.close()
        return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
