"""`launcher plan recipe=... [gpu=h100 | gpu_memory=80GiB]`: will it fit? Needs no GPU, no weights.

With `--verify` it trains three steps on this machine, with random weights and tokens. Exit status
3 if the planned peak is more than 5 % above or 2 % below the measured one. With `--measure` it
trains a few steps of the configurations that should be fastest.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from launcher.cli.app import Overrides, flag, option, read_size
from launcher.distributed import host_memory
from launcher.distributed.environment import cache_folder, set_compile_cache
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_NO, RecipeError, TrainingError
from launcher.metrics.report import write
from launcher.planner import machine as machines
from launcher.planner.formatting import as_json, as_text
from launcher.planner.machine import Machine
from launcher.planner.page import plan_page
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import open_keys


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
    gpu_memory: Annotated[
        int | None, option("Memory of a GPU, such as 80GiB.", "SIZE", parser=read_size)
    ] = None,
    host_memory: Annotated[
        int | None, option("Host memory of a node, such as 1TiB.", "SIZE", parser=read_size)
    ] = None,
    rates: Annotated[
        Path | None, option("Measured rates, from `launcher doctor --json FILE`.", "FILE")
    ] = None,
    ladder: Annotated[
        bool,
        flag(
            "--ladder/--no-ladder",
            "Search for the fastest configuration that fits; not with --verify.",
        ),
    ] = True,
    verify: Annotated[
        bool, flag("--verify", "Train three steps here and print measured beside planned memory.")
    ] = False,
    measure_fastest: Annotated[
        bool,
        flag("--measure", "Train steps of the fastest by plan here; auto takes the fastest."),
    ] = False,
    html: Annotated[Path | None, option("Also write the plan as an HTML page.", "FILE")] = None,
    print_json: Annotated[
        bool, flag("--json", "Print one JSON object; sizes are in bytes.")
    ] = False,
) -> int:
    """Predict memory and speed: does it fit, and which configuration is the fastest that fits?

    Exit status 3: it does not fit.

    \b
    Example:
      launcher plan recipe=qwen3_8b gpu=a100-40gb gpus_per_node=8
      launcher plan recipe=quickstart gpu=cpu gpus_per_node=2 --measure
    """
    machine, notes = _machine(overrides, nodes, gpus_per_node, gpu, gpu_memory, host_memory, rates)
    loaded = load_recipe(overrides, ranks=machine.ranks, files=False)
    if verify and measure_fastest:
        raise RecipeError("command line: verify, measure: give one of them")
    if verify or measure_fastest:
        machine = _this_machine(machine, "verify" if verify else "measure", gpu)
    set_compile_cache(cache_folder(loaded.recipe.data.cache))
    # After all errors of the user, because they import torch
    from rich.console import Console

    from launcher.planner import measure, measured, plan, search

    recipe, progress = loaded.recipe, Console(stderr=True, quiet=print_json).status
    if open_keys(recipe):
        with progress("choosing what is auto"):
            recipe, chosen, note = _choose(recipe, machine)
        overrides, notes = [*overrides, *chosen], [*notes, note]
    with progress("tracing a step"):
        planned = plan.make_plan(recipe, machine)
    planned = dataclasses.replace(planned, notes=(*notes, *planned.notes))
    configurations = verified = trials = None
    if ladder and not verify:
        with progress("searching for a faster configuration"):
            configurations = search.make_ladder(recipe, machine)
    if measure_fastest:
        with progress("measuring the configurations that should be fastest"):
            trials = measured.measure_fastest(overrides, recipe, machine)
    if verify:
        on_gpus = machine.device == "cuda"
        try:
            with progress("training three steps"):
                (verified,) = measure.measure([overrides], ranks=machine.ranks, gpus=on_gpus)
        except TrainingError as error:
            print(error, file=sys.stderr)
            return EXIT_FAILED
    report = as_json(recipe, planned, configurations, verified) | {"measured": trials}
    if html is not None:
        write(plan_page(report), html)
    if print_json:
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(as_text(report)))
    if trials is not None and trials["best"] is None:
        return EXIT_FAILED
    wrong = report["verified"] is not None and not report["verified"]["true"]
    return EXIT_NO if report["fits"] is False or wrong else EXIT_DONE


def _machine(
    overrides: Sequence[str],
    nodes: int,
    gpus: int | None,
    gpu: str | None,
    memory: int | None,
    host_memory: int | None,
    rates: Path | None,
) -> tuple[Machine, list[str]]:
    """The machine to plan for, and notes about it. Raises RecipeError."""
    notes = []
    if gpu is None and memory is None and (present := detect_gpus()) is not None:
        gpu, memory, found = present
        gpus = gpus or found
        notes.append(
            "Planned for the GPUs of this machine; for others give gpu=h100, or "
            f"gpu_memory=80GiB, and gpus_per_node={gpus}."
        )
    gpus = gpus or 8
    load_recipe(overrides, ranks=nodes * gpus, files=False)  # its errors first
    machine = machines.known_machine(
        gpu,
        nodes=nodes,
        gpus_per_node=gpus,
        memory=memory,
        host_memory=host_memory,
        overrides=None if rates is None else machines.read_rates(rates),
    )
    return machine, notes


def _choose(recipe: Recipe, machine: Machine) -> tuple[Recipe, tuple[str, ...], str]:
    """The recipe with each `auto` replaced, the overrides that do the same, and a note."""
    from launcher.planner import candidates, measured, search

    if (kept := measured.measured_choice(recipe, machine)) is not None:
        kept_recipe, changes, why = kept
        return kept_recipe, tuple(changes), f"auto stands for {' '.join(changes)}: {why}"
    best = search.fastest_that_fits(recipe, machine)
    if best is not None:
        overrides = " ".join(best.overrides)
        return best.recipe, best.overrides, f"auto stands for {overrides}: the fastest that fits"
    concrete = search.concrete(recipe)
    changes = candidates.overrides_between(recipe, concrete)
    unknown = machine.memory is None and machine.host_memory is None
    why = "no memory is known to choose for" if unknown else "nothing fits"
    return concrete, changes, f"auto is shown as {' '.join(changes)}: {why}"


def _this_machine(machine: Machine, option: str, gpu: str | None) -> Machine:
    """The machine with the memory that is available here, where none was given.

    option: `verify` or `measure`. gpu: as it was given.
    Raises RecipeError unless this machine has the planned devices.
    """
    if machine.nodes > 1:
        raise RecipeError(f"command line: {option}: trains on this node only; remove nodes")
    if option == "measure" and (gpu or "cpu").lower() != "cpu":
        what = "measures the GPUs of this machine"
        raise RecipeError(f"command line: measure: {what}; remove gpu={gpu}, or use cpu")
    ranks, (_, _, present) = machine.gpus_per_node, detect_gpus() or ("", 0, 0)
    if machine.device == "cuda" and present < ranks:
        what = f"this machine has {present or 'no'} GPUs for {ranks} ranks"
        raise RecipeError(f"command line: {option}: {what}; give gpus_per_node, or gpu=cpu")
    available = host_memory.available()
    if option == "verify" or available is None:
        return machine
    on_cpu = available // ranks if machine.device == "cpu" else None
    return dataclasses.replace(
        machine,
        memory=machine.memory or on_cpu,
        host_memory=machine.host_memory or available,
    )


def detect_gpus() -> tuple[str, int, int] | None:
    """Name and bytes of this machine's GPUs, and how many there are; None without a GPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory, count
