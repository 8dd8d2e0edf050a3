"""`launcher plan recipe=... [gpu=h100 | gpu_memory=80GiB] [nodes=1 gpus_per_node=8]`: will it fit?

Needs no GPU and no weights. Options, besides overrides of the recipe:
    nodes, gpus_per_node   nodes=1; the GPUs of this machine where it has some, else 8
    gpu                    h100, a100, ...: its memory and rates; default: the GPUs of this machine
    gpu_memory             memory of one GPU, with a unit: 80GiB, 80GB
    host_memory            host memory of one node
    rates                  a file of `launcher doctor --json FILE`: measured rates, not a table's
    ladder=false           only the recipe as written: quicker
    json                   one object on standard output, all sizes in bytes, and nothing else:
        recipe, strategy, batch   name of the run; strategy and batch in words
        machine                   name, device, nodes, gpus_per_node, ranks, memory, host_memory
                                  (null: not known), rates
        fits                      true, false, or null where no memory is known
        needed, spare             of one GPU; spare is null where its memory is not known
        peak                      phase, micro_batch (0-based), where (a module's name),
                                  components {name: bytes}, total, text
        context, margin           added to the peak's total, they are `needed`
        phases                    {forward | backward | optimizer: as peak}
        held, after_forward       {name: bytes}: between steps; after the first forward pass
        timeline                  [as peak], in the order of a step
        method                    traced | arithmetic
        arithmetic                the estimated peak; null where the plan is the estimate
        host                      of one node: processes, offload, workers, staging, total, spare
        checkpoint                bytes, kept (at once)
        notes                     [text]
        verified                  null, or true (whether the plan held), and
                                  compared [{what, planned, measured}]
        ladder                    null, or considered, best (index into rungs; null: nothing fits),
                                  remedies [text], written_seconds, and the configurations, fastest
                                  first, as rungs [{overrides [text], strategy, micro_batch_size,
                                  fits, as_written, needed, host, seconds, tokens_per_second, ...}]
    verify                 train three steps here, with random weights and tokens, and print the
                           measured memory beside the plan, without other configurations. Exit
                           status 3 where the planned peak is over 5 % more, or over 2 % less
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.cli.options import count, read_options, size, truth, word
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_NO, RecipeError, TrainingError
from launcher.planner import machine as machines
from launcher.planner.formatting import Line, as_json, as_text
from launcher.planner.machine import Machine
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import leaves_open

OPTIONS = {
    "nodes": count,
    "gpus_per_node": count,
    "gpu": word,
    "gpu_memory": size,
    "host_memory": size,
    "rates": word,
    "ladder": truth,
    "json": truth,
    "verify": truth,
}


def main(arguments: Sequence[str]) -> int:
    """Exit status 0: it fits, or the memory is not known; 3: it does not fit."""
    options, rest = read_options("launcher plan", arguments, OPTIONS)
    quiet, verify = options.get("json", False), options.get("verify", False)
    machine, notes = _machine(options, rest)
    loaded = load_recipe(rest, ranks=machine.ranks, files=False)
    if verify:
        _check_can_verify(machine)
    # After all errors of the user, because they import torch
    from launcher.planner import measure, plan, search

    recipe = loaded.recipe
    if leaves_open(recipe):
        with _progress("choosing what is auto", shown=not quiet):
            recipe, chosen, note = _choose(recipe, machine)
        rest, notes = [*rest, *chosen], [*notes, note]
    with _progress("tracing a step", shown=not quiet):
        planned = plan.make_plan(recipe, machine)
    planned = dataclasses.replace(planned, notes=(*notes, *planned.notes))
    ladder = measured = None
    if options.get("ladder", not verify):
        with _progress("looking for what is faster", shown=not quiet):
            ladder = search.make_ladder(recipe, machine, plan_of=plan.make_plan)
    if verify:
        on_gpus = machine.device == "cuda"
        try:
            with _progress("training three steps", shown=not quiet):
                (measured,) = measure.measure([rest], ranks=machine.ranks, gpus=on_gpus)
        except TrainingError as error:
            print(error, file=sys.stderr)
            return EXIT_FAILED
    report = as_json(recipe, planned, ladder, measured)
    if quiet:
        print(json.dumps(report, indent=1))
    else:
        show(as_text(report))
    wrong = report["verified"] is not None and not report["verified"]["true"]
    return EXIT_NO if report["fits"] is False or wrong else EXIT_DONE


def _machine(options: dict[str, Any], recipe: Sequence[str]) -> tuple[Machine, list[str]]:
    """The machine to plan for, and what to note about it. Raises RecipeError."""
    gpu, memory, gpus = (options.get(name) for name in ("gpu", "gpu_memory", "gpus_per_node"))
    notes = []
    if gpu is None and memory is None:
        present = detect_gpus()
        if present is not None:
            gpu, memory, found = present
            gpus = gpus or found
            notes.append(
                "Planned for the GPUs of this machine; for others give gpu=h100, or "
                f"gpu_memory=80GiB, and gpus_per_node={gpus}."
            )
    nodes, gpus = options.get("nodes", 1), gpus or 8
    load_recipe(recipe, ranks=nodes * gpus, files=False)  # its errors first
    rates = options.get("rates")
    overrides = None if rates is None else machines.read_rates(Path(rates))
    machine = machines.known_machine(
        gpu,
        nodes=nodes,
        gpus_per_node=gpus,
        memory=memory,
        host_memory=options.get("host_memory"),
        overrides=overrides,
    )
    return machine, notes


def _choose(recipe: Recipe, machine: Machine) -> tuple[Recipe, tuple[str, ...], str]:
    """What a run on this machine would take for `auto`, as overrides too, and why."""
    from launcher.planner import candidates, plan, search

    best = search.fastest_that_fits(recipe, machine, plan_of=plan.make_plan)
    if best is not None:
        overrides = " ".join(best.overrides)
        return best.recipe, best.overrides, f"auto stands for {overrides}: the fastest that fits"
    concrete = search.concrete(recipe)
    changes = candidates.overrides_between(recipe, concrete)
    unknown = machine.memory is None and machine.host_memory is None
    why = "no memory is known to choose for" if unknown else "nothing fits"
    return concrete, changes, f"auto is shown as {' '.join(changes)}: {why}"


def _check_can_verify(machine: Machine) -> None:
    """Raises RecipeError unless the machine to plan for is this one."""
    if machine.nodes > 1:
        raise RecipeError("command line: verify: trains on this node alone; leave out nodes")
    present, ranks = detect_gpus(), machine.gpus_per_node
    if machine.device == "cuda" and (present is None or present[2] < ranks):
        there = "no GPU" if present is None else f"{present[2]} GPUs"
        hint = "give gpus_per_node, or gpu=cpu"
        raise RecipeError(f"command line: verify: there is {there} here for {ranks} ranks; {hint}")


def detect_gpus() -> tuple[str, int, int] | None:
    """Name, bytes and number of this machine's GPUs; None: there is none."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        return None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory, torch.cuda.device_count()


@contextmanager
def _progress(what: str, *, shown: bool) -> Iterator[None]:
    """A line on standard error meanwhile, on a terminal only."""
    shown = shown and sys.stderr.isatty()
    if shown:
        print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def show(text: Sequence[Line]) -> None:
    """Prints lines: in colour on a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in text:
        if console.is_terminal:
            console.print(Text.assemble(*line))
        else:
            print("".join(piece for piece, _ in line).rstrip())
