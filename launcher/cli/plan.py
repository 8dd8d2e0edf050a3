"""`launcher plan recipe=... [gpu=h100 | gpu_memory=80GiB]`: plans memory and speed, without a GPU.

With `--verify` it trains three steps on this machine, with random weights and tokens; the exit
status is 3 if the planned peak is more than 5 % above or 2 % below the measured one. With
`--measure` it trains a few steps of the configurations that should be fastest.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import sys
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from launcher.cli.app import Overrides, flag, make_parent_of_file, option, read_size
from launcher.console import working
from launcher.distributed import host_memory as memory_here
from launcher.distributed.environment import Environment, cache_folder, set_compile_cache
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_NO, RecipeError, TrainingError
from launcher.planner import machine as machines
from launcher.planner.formatting import as_text
from launcher.planner.machine import Machine
from launcher.planner.page import write_plan
from launcher.planner.plan_as_json import as_json
from launcher.recipe.load import LoadedRecipe, load_recipe
from launcher.recipe.rules import fits_ranks
from launcher.reliability.json_files import Json

_Nodes = Annotated[int, option("Nodes.", "N")]
_Gpus = Annotated[int | None, option("GPUs per node. Default: those of this machine, or 1.", "N")]
_Gpu = Annotated[
    str | None,
    option("Name of the GPU, such as h100, or cpu. Default: the devices of this machine.", "NAME"),
]
_GpuMemory = Annotated[
    int | None, option("Memory of a GPU, such as 80GiB.", "SIZE", parser=read_size)
]
_HostMemory = Annotated[
    int | None, option("Host memory of a node, such as 1TiB.", "SIZE", parser=read_size)
]
_Rates = Annotated[Path | None, option("Measured rates, from `launcher doctor out=FILE`.", "FILE")]
_NoSearch = Annotated[
    bool, flag("--no-search", "Do not search for the fastest configuration that fits.")
]
_Verify = Annotated[
    bool, flag("--verify", "Train three steps here and print measured beside planned memory.")
]
_Measure = Annotated[
    bool, flag("--measure", "Train steps of the fastest by plan here; auto takes the fastest.")
]
_Out = Annotated[Path | None, option("Also write the plan as an HTML page.", "FILE")]
_Json = Annotated[bool, flag("--json", "Print one JSON object; sizes are in bytes.")]


def plan(
    overrides: Overrides,
    nodes: _Nodes = 1,
    gpus: _Gpus = None,
    gpu: _Gpu = None,
    gpu_memory: _GpuMemory = None,
    host_memory: _HostMemory = None,
    rates: _Rates = None,
    no_search: _NoSearch = False,
    verify: _Verify = False,
    measure: _Measure = False,
    out: _Out = None,
    print_json: _Json = False,
) -> int:
    """Predict memory and speed: does it fit, and which configuration is the fastest that fits?

    Exit status 3: it does not fit.

    \b
    Example:
      launcher plan recipe=qwen3_8b gpu=a100-40gb gpus=8
      launcher plan recipe=quickstart gpu=cpu gpus=2 --measure
    """
    loaded = load_recipe(overrides, ranks=None, files=False)
    if gpu is None and loaded.recipe.run.device == "cpu":
        gpu = "cpu"
    machine, notes = machine_to_plan(
        gpu,
        gpus,
        nodes=nodes,
        memory=gpu_memory,
        host_memory=host_memory,
        rates=None if rates is None else machines.read_rates(rates),
    )
    if not fits_ranks(loaded.recipe, machine.ranks):
        load_recipe(
            overrides, ranks=machine.ranks, files=False
        )  # raises, with the place of the key
    if out is not None:
        make_parent_of_file(out, "out")
    if verify and measure:
        raise RecipeError("command line: --verify, --measure: give one of them")
    if verify or measure:
        machine = _this_machine(machine, "--verify" if verify else "--measure", gpu)
    asked = _Asked(
        overrides=overrides,
        search=not (no_search or verify),
        verify=verify,
        measure=measure,
        quiet=print_json,
    )
    set_compile_cache(cache_folder(loaded.recipe.data.cache), Environment())
    try:
        report = copy_context().run(_report, loaded, machine, notes, asked)
    except TrainingError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    if out is not None:
        write_plan(report, out)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(json.dumps(report, indent=1) if print_json else "\n".join(as_text(report, columns)))
    if report["measured"] is not None and report["measured"]["best"] is None:
        return EXIT_FAILED
    wrong = report["verified"] is not None and not report["verified"]["true"]
    return EXIT_NO if report["fits"] is False or wrong else EXIT_DONE


@dataclass(frozen=True)
class _Asked:
    """What a plan is asked for."""

    overrides: list[str]
    """`recipe=NAME`, and the keys that it sets."""
    search: bool
    verify: bool
    measure: bool
    quiet: bool
    """Whether to print no progress."""


def _report(loaded: LoadedRecipe, machine: Machine, notes: list[str], asked: _Asked) -> Json:
    """The plan as JSON. Raises TrainingError if the processes that `verify` starts fail."""
    # These modules import torch; errors in the command line are reported before
    from launcher.models.attention import planned_gpu
    from launcher.models.config_keys import check_config_keys
    from launcher.planner import (
        auto,
        known_models,
        measurement,
        plan,
        profile,
        search,
        sizes,
        speed,
        trials,
    )
    from launcher.planner.facts import Facts, Rows, profiled
    from launcher.strategies.compilation import why_eager

    if not notes:  # not for the GPUs of this machine
        planned_gpu.set(machine.name)
    gc.freeze()  # collections would scan the imported modules again and again
    check_config_keys(loaded)
    recipe, progress = loaded.recipe, partial(working, quiet=asked.quiet)
    if not (asked.verify or asked.measure):
        recipe, known = known_models.with_known_config(recipe)
        notes = [*notes, known] if known else notes
    with progress("counting the rows"):
        rows = sizes.rows_here(recipe)
    facts = Facts(
        ranks=machine.ranks,
        rows=rows,
        machine=machine,
        why_eager=why_eager(machine.device, check_triton=asked.verify or asked.measure),
        profiles=profiled(machine),
    )
    recipe, chosen = auto.resolve(recipe, facts, auto.needing("recipe", "rows"))
    overrides = [
        *asked.overrides,
        *(word for each in chosen for word in auto.overrides_of(each)),
    ]
    chosen_sizes = sizes.sizes_text(rows, chosen).splitlines() if chosen else []
    with progress("choosing what is auto"):
        # Measurements compare configurations that compute logits again
        logits = not asked.measure
        recipe, added, reasons = auto.resolve_for_plan(recipe, facts, logits=logits)
        overrides, notes = [*overrides, *added], [*notes, *reasons]
    result = verified = tried = None
    if asked.search:  # first: it traces the recipe together with other configurations
        with progress("tracing steps and searching for a faster configuration"):
            result = search.search_configurations(recipe, machine, keep_written=True)
    with progress("tracing a step"):
        planned = plan.make_plan(recipe, machine)
    if isinstance(rows, Rows) and (why := sizes.why_no_row_fits(recipe, rows)):
        notes, rows = [*notes, f"training refuses it: {why}"], why
    if isinstance(rows, Rows):
        try:
            sizes.check_repeats(recipe, sizes.run_length(recipe, rows).samples)
        except RecipeError as error:
            notes = [*notes, f"training refuses it: {error}"]
    planned = dataclasses.replace(planned, notes=(*notes, *planned.notes))
    if asked.measure:
        with progress("measuring the configurations that should be fastest") as show:
            tried = trials.measure_fastest(overrides, recipe, machine, show=show)
    if asked.verify:
        gpus = machine.device == "cuda"
        with progress("training three steps"):
            (verified,) = measurement.measure_recipes([overrides], ranks=machine.ranks, gpus=gpus)
    length = None
    if isinstance(rows, Rows) and recipe.model.builder is None:
        run, shapes = (
            sizes.run_length(recipe, rows),
            profile.profile_model(recipe, device=machine.device),
        )
        seconds = speed.seconds_of_steps(recipe, run.tokens, shapes, machine)
        faster = speed.faster_text(
            recipe, tokens=run.tokens, steps=run.steps, seconds=seconds, machine=machine
        )
        length = dataclasses.asdict(run)
        length |= {
            "seconds": run.steps * seconds,
            "text": run.text(seconds, device=machine.device) + faster,
        }
    return as_json(recipe, planned, result, verified) | {
        "measured": tried,
        "sizes": chosen_sizes,
        "length": length,
    }


def _this_machine(machine: Machine, option: str, gpu: str | None) -> Machine:
    """The machine with the memory of this one, as `auto` counts it, unless it was given.

    `option` is `--verify` or `--measure`, and `gpu` the argument of the command. Raises RecipeError
    unless this machine has the planned devices.
    """
    problem, ranks = "", machine.gpus_per_node
    _, _, present = detect_gpus() or ("", 0, 0)
    if machine.nodes > 1:
        problem = "trains on this node only; remove nodes"
    elif option == "--measure" and (gpu or "cpu").lower() != "cpu":
        problem = f"measures the GPUs of this machine; remove gpu={gpu}, or use cpu"
    elif machine.device == "cuda" and present < ranks:
        problem = f"this machine has {present or 'no'} GPUs for {ranks} ranks; "
        problem += "give gpus=N, or gpu=cpu"
    if problem:
        raise RecipeError(f"command line: {option}: {problem}")
    if option == "--measure" and machine.device == "cuda":
        machine = dataclasses.replace(
            machine, host_memory=machine.host_memory or memory_here.allowed()
        )
    return machine


def machine_to_plan(
    gpu: str | None,
    gpus: int | None,
    *,
    nodes: int,
    memory: int | None = None,
    host_memory: int | None = None,
    rates: Json | None = None,
    others: str = ", cpu, or gpu_memory=80GiB",
) -> tuple[Machine, list[str]]:
    """The machine that `plan` and `new` are for, and a note if it was detected.

    It has the GPUs that are given, one of them if the number is not. Else it has those of this
    machine, and else its CPUs. `cpu` is one rank, with the cores and the memory of this machine.
    The other arguments are those of `known_machine`, which raises RecipeError.
    """
    notes = []
    if gpu is None and memory is None:
        if (present := detect_gpus()) is not None:
            gpu, memory, count = present
            gpus = gpus or count
            notes.append(
                "Planned for the GPUs of this machine; for others give gpu=h100, or "
                f"gpu_memory=80GiB, and gpus={gpus}."
            )
        elif gpus is None:
            gpu = "cpu"
            notes.append(
                "This machine has no GPUs: planned for its CPUs. For GPUs give gpu=h100, or "
                "another name, and gpus=8, or another number."
            )
    gpus = gpus or 1
    machine = machines.known_machine(
        gpu,
        nodes=nodes,
        gpus_per_node=gpus,
        memory=memory,
        host_memory=host_memory,
        overrides=rates,
        cores=len(os.sched_getaffinity(0)) if (gpu or "").strip().lower() == "cpu" else None,
        others=others,
    )
    if machine.device == "cpu" and (whole := host_memory or memory_here.allowed()) is not None:
        machine = dataclasses.replace(
            machine, memory=machine.memory or whole // gpus, host_memory=whole
        )
    return machine, notes


def detect_gpus() -> tuple[str, int, int] | None:
    """Name, bytes of memory and number of this machine's GPUs; None without a GPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory, count
