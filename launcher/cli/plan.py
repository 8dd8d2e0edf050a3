"""`launcher plan recipe=... [gpu=h100 | gpu_memory=80GiB]`: will it fit? Needs no GPU, no weights.

With `--verify` it trains three steps on this machine, with random weights and tokens. Exit status
3 if the planned peak is more than 5 % above or 2 % below the measured one.

The object that `--json` prints, all sizes in bytes:
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
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_NO, RecipeError, TrainingError
from launcher.planner import machine as machines
from launcher.planner.formatting import Line, as_json, as_text
from launcher.planner.machine import Machine
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import leaves_open


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of the command; memory in bytes."""

    nodes: int
    gpus_per_node: int | None
    gpu: str | None
    gpu_memory: int | None
    host_memory: int | None
    rates: Path | None
    ladder: bool
    verify: bool
    json: bool


def main(overrides: Sequence[str], request: Request) -> int:
    """Exit status 0: it fits, or the memory is not known; 3: it does not fit."""
    machine, notes = _machine(overrides, request)
    loaded = load_recipe(overrides, ranks=machine.ranks, files=False)
    if request.verify:
        _check_can_verify(machine)
    # After all errors of the user, because they import torch
    from launcher.planner import measure, plan, search

    recipe, quiet = loaded.recipe, request.json
    if leaves_open(recipe):
        with _progress("choosing what is auto", quiet):
            recipe, chosen, note = _choose(recipe, machine)
        overrides, notes = [*overrides, *chosen], [*notes, note]
    with _progress("tracing a step", quiet):
        planned = plan.make_plan(recipe, machine)
    planned = dataclasses.replace(planned, notes=(*notes, *planned.notes))
    ladder = measured = None
    if request.ladder:
        with _progress("searching for a faster configuration", quiet):
            ladder = search.make_ladder(recipe, machine, plan_of=plan.make_plan)
    if request.verify:
        on_gpus = machine.device == "cuda"
        try:
            with _progress("training three steps", quiet):
                (measured,) = measure.measure([overrides], ranks=machine.ranks, gpus=on_gpus)
        except TrainingError as error:
            print(error, file=sys.stderr)
            return EXIT_FAILED
    report = as_json(recipe, planned, ladder, measured)
    if request.json:
        print(json.dumps(report, indent=1))
    else:
        _print(as_text(report))
    wrong = report["verified"] is not None and not report["verified"]["true"]
    return EXIT_NO if report["fits"] is False or wrong else EXIT_DONE


def _machine(overrides: Sequence[str], request: Request) -> tuple[Machine, list[str]]:
    """The machine to plan for, and notes about it. Raises RecipeError."""
    gpu, memory, gpus = request.gpu, request.gpu_memory, request.gpus_per_node
    notes = []
    if gpu is None and memory is None and (present := detect_gpus()) is not None:
        gpu, memory, found = present
        gpus = gpus or found
        notes.append(
            "Planned for the GPUs of this machine; for others give gpu=h100, or "
            f"gpu_memory=80GiB, and gpus_per_node={gpus}."
        )
    gpus = gpus or 8
    load_recipe(overrides, ranks=request.nodes * gpus, files=False)  # its errors first
    machine = machines.known_machine(
        gpu,
        nodes=request.nodes,
        gpus_per_node=gpus,
        memory=memory,
        host_memory=request.host_memory,
        overrides=None if request.rates is None else machines.read_rates(request.rates),
    )
    return machine, notes


def _choose(recipe: Recipe, machine: Machine) -> tuple[Recipe, tuple[str, ...], str]:
    """The recipe with each `auto` replaced, the overrides that do the same, and a note."""
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
    """Raises RecipeError unless this machine has the planned devices."""
    if machine.nodes > 1:
        raise RecipeError("command line: verify: trains on this node only; leave out nodes")
    ranks, (_, _, present) = machine.gpus_per_node, detect_gpus() or ("", 0, 0)
    if machine.device == "cuda" and present < ranks:
        what = f"this machine has {present or 'no'} GPUs for {ranks} ranks"
        raise RecipeError(f"command line: verify: {what}; give gpus_per_node, or gpu=cpu")


def detect_gpus() -> tuple[str, int, int] | None:
    """Name and bytes of this machine's GPUs, and how many there are; None without a GPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory, count


@contextmanager
def _progress(what: str, quiet: bool) -> Iterator[None]:
    """Shows a line on standard error meanwhile, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _print(text: Sequence[Line]) -> None:
    """Prints lines: in colour on a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in text:
        if console.is_terminal:
            console.print(Text.assemble(*line))
        else:
            print("".join(piece for piece, _ in line).rstrip())
