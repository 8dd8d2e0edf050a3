"""The `launcher` command: every subcommand with its options, their defaults and an example.

A command imports the module that does its work when it runs: `--help` needs none of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from launcher import __version__
from launcher.cli.app import Overrides, SubmitCommand, app, command, flag, option
from launcher.errors import EXIT_DONE, EXIT_USAGE, RecipeError


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


@command
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
    from launcher.cli.train import main

    return main(overrides, gpus=gpus, max_restarts=max_restarts)


@command
def show(
    overrides: Overrides,
    ranks: Annotated[
        int | None, option("Also check the batch sizes for this number of ranks.", "N")
    ] = None,
) -> int:
    """Print the resolved recipe, each value with the line or argument that it comes from.

    \b
    Example:
      launcher show recipe=fsdp optimizer.learning_rate=1e-4
    """
    from launcher.cli.show import main

    return main(overrides, ranks=ranks)


@command
def schema() -> int:
    """Print the JSON Schema of recipes, for editors.

    \b
    Example:
      launcher schema > recipe.schema.json
    """
    import json

    from launcher.recipe.decode import json_schema

    print(json.dumps(json_schema(), indent=1))
    return EXIT_DONE


@command
def plan(
    overrides: Overrides,
    nodes: Annotated[int, option("Nodes.", "N")] = 1,
    gpus_per_node: Annotated[
        int | None, option("GPUs per node. Default: those of this machine, or 8.", "N")
    ] = None,
    gpu: Annotated[
        str | None,
        option("Name of the GPU, such as h100. Default: the GPUs of this machine.", "NAME"),
    ] = None,
    gpu_memory: Annotated[str | None, option("Memory of a GPU, such as 80GiB.", "SIZE")] = None,
    host_memory: Annotated[
        str | None, option("Host memory of a node, such as 1TiB.", "SIZE")
    ] = None,
    rates: Annotated[
        Path | None, option("Measured rates, from `launcher doctor --json FILE`.", "FILE")
    ] = None,
    ladder: Annotated[
        bool, option("Search for the fastest configuration that fits; not with --verify.")
    ] = True,
    verify: Annotated[
        bool, flag("--verify", "Train three steps here and print measured beside planned memory.")
    ] = False,
    json: Annotated[bool, flag("--json", "Print one JSON object; sizes are in bytes.")] = False,
) -> int:
    """Predict memory and speed: does it fit, and which configuration is the fastest that fits?

    Exit status 3: it does not fit.

    \b
    Example:
      launcher plan recipe=qwen3_8b gpu=a100-40gb gpus_per_node=8
    """
    from launcher.cli.options import read_size
    from launcher.cli.plan import Request, main

    request = Request(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        gpu_memory=read_size("gpu_memory", gpu_memory),
        host_memory=read_size("host_memory", host_memory),
        rates=rates,
        ladder=ladder and not verify,
        verify=verify,
        json=json,
    )
    return main(overrides, request)


@command
def prepare(overrides: Overrides) -> int:
    """Fetch model and data and tokenize into the cache, for nodes that have no network.

    \b
    Example:
      launcher prepare recipe=lora_llama_3_1_8b data.train=[my/data/*.jsonl]
    """
    from launcher.cli.prepare import main

    return main(overrides)


@command
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


@command
def selftest(
    overrides: Overrides,
    ranks: Annotated[int, option("Ranks, on this machine.", "N")] = 2,
    steps: Annotated[int, option("Optimizer steps of each variant.", "N")] = 5,
    shrink: Annotated[bool, flag("--shrink", "Make the model small.")] = False,
) -> int:
    """Compare the losses of a few steps over strategies, accumulation and numbers of ranks.

    Exit status 3: losses differ by more than their tolerance.

    \b
    Example:
      launcher selftest recipe=fsdp shrink=true ranks=2
    """
    from launcher.cli.selftest import main

    return main(overrides, ranks=ranks, steps=steps, shrink=shrink)


@app.command(cls=SubmitCommand)
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


@command
def status(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", help="Folder of a run, or a folder that holds several."),
    ],
) -> int:
    """Print the state of a run: step, loss, speed, checkpoint, restarts and lost time.

    \b
    Example:
      launcher status runs/fsdp
      launcher status runs
    """
    from launcher.cli.status import main

    return main(folder)


@command
def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, or one of its checkpoints.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write; must be new or empty.")
    ],
    dtype: Annotated[
        str | None,
        option("bfloat16 | float16 | float32. Default: as the weights are stored.", "DTYPE"),
    ] = None,
    merged: Annotated[
        bool, flag("--merged", "Merge the adapters into the model that they belong to.")
    ] = False,
) -> int:
    """Write the weights of a run as a Hugging Face folder.

    Takes RUN_DIR/hf if a finished run has it, else the newest checkpoint.

    \b
    Example:
      launcher export runs/qwen3_8b exported dtype=bfloat16
    """
    from launcher.cli.export import main

    return main(run, out, dtype=dtype, merged=merged)


@command
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
