"""The `launcher` command: every subcommand with its options, their defaults and an example."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from launcher import __version__
from launcher.cli import requests
from launcher.cli.app import Command, NewCommand, RecipeCommand, SubmitCommand, SweepCommand
from launcher.cli.chat import chat
from launcher.cli.doctor import doctor
from launcher.cli.export import export
from launcher.cli.inspect import inspect
from launcher.cli.new import new
from launcher.cli.plan import plan
from launcher.cli.prepare import prepare
from launcher.cli.report import report
from launcher.cli.rows import rows
from launcher.cli.selftest import selftest
from launcher.cli.show import schema, show
from launcher.cli.status import status
from launcher.cli.submit import submit
from launcher.cli.train import train
from launcher.console import hide_irrelevant_warnings, prepare_streams
from launcher.distributed.environment import prepare_openmp, provide_caches
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, RecipeError
from launcher.recipe.find import recipe_names

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=f"Shipped recipes: {', '.join(recipe_names())}.",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
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

    Values are name=value, switches --name: launcher plan recipe=sft gpus=8 --json
    """


_COMMANDS: dict[Callable[..., int], type[Command]] = {
    new: NewCommand,
    train: SweepCommand,
    plan: RecipeCommand,
    show: RecipeCommand,
    inspect: RecipeCommand,
    prepare: RecipeCommand,
    status: Command,
    report: Command,
    rows: Command,
    submit: SubmitCommand,
    export: Command,
    chat: Command,
    selftest: RecipeCommand,
    doctor: Command,
    schema: Command,
}
for function, kind in _COMMANDS.items():
    about = (function.__doc__ or "").partition("\n")[0]
    app.command(cls=kind, short_help=about)(function)


def run(arguments: Sequence[str]) -> int:
    """Runs `launcher ARGUMENTS`; returns the exit status. Without arguments it prints the help.
    Raises RecipeError."""
    arguments = arguments or ["--help"]
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
    if "_LAUNCHER_COMPLETE" in os.environ:  # a shell completes words
        app(prog_name="launcher")
    prepare_streams()
    hide_irrelevant_warnings()
    try:
        provide_caches()
        prepare_openmp()
        status = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # here, because the interpreter would print a traceback at its end
        return status
    except RecipeError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt as request:
        return requests.report(request)
    except BrokenPipeError:  # `launcher show ... | head`
        _discard_output()
        return EXIT_DONE
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _working_folder_exists():
            print("the working directory was deleted: cd to another one", file=sys.stderr)
            return EXIT_USAGE
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _discard_output()
        with contextlib.suppress(OSError):
            file = error.filename or "the output"
            print(f"{file} cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED


def _working_folder_exists() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False


def _discard_output() -> None:
    """The interpreter writes what is left in the buffer again, and would print another error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
