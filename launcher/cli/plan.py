"""`launcher plan recipe=... nodes=1 gpus_per_node=8 [gpu=h100 | gpu_memory=80GiB] [host_memory=1TiB]`: will it fit, and what is fastest?

Needs no GPU and no weights. Options, besides overrides of the recipe:
    nodes, gpus_per_node   nodes=1; the GPUs of this machine where it has some, else 8
    gpu                    h100, a100, ... : its memory and its rates; without one, the GPUs of this machine
    gpu_memory             bytes of one GPU, with a unit: 80GiB, 80GB
    host_memory            bytes of one node's host memory
    rates                  a file that `launcher doctor --json FILE` wrote: rates measured instead of those of a table
    ladder=false           the recipe as written only: quicker
    json                   one object on standard output, all sizes in bytes, and nothing else:
        recipe, strategy, batch   name of the run; strategy and batch in words
        machine                   name, device, nodes, gpus_per_node, ranks, memory, host_memory (null: not known), rates (`machine.Rates`)
        fits                      true, false, or null where no memory is known
        needed, spare             of one GPU; spare is negative where it does not fit, null where its memory is not known
        peak                      phase, micro_batch (0-based), where (a module's name), components {name: bytes}, total
        context, margin           added to the peak's total, they are `needed`
        phases                    {forward | backward | optimizer: as peak}
        held, after_forward       {name: bytes}: between steps; at the end of the first forward pass
        timeline                  [as peak], in the order of a step
        method                    traced | arithmetic
        arithmetic                peak by closed formulas, as peak; null where the plan is arithmetic itself
        host                      of one node: processes, offload, workers, staging, total, spare
        checkpoint                bytes, kept (at once)
        notes                     [text]
        verified                  null, or true (whether the plan held), and compared [{what, planned, measured}]
        ladder                    null, or considered, best (index into rungs; null: nothing fits), remedies [text], and
                                  rungs, fastest first: [{overrides [text], strategy, micro_batch_size, fits, as_written, needed,
                                  host, seconds {forward, ..., total}, tokens_per_second}]
    html                   a file: the same as a page to look at
    verify                 train three steps here, with random weights and made-up data, and print what was measured beside the
                           plan; without the ladder. Exit status 3 where the plan's peak is over 5 % more or 2 % less
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.options import count, read_options, size, truth, word
from launcher.cli.plan_verification import TOLERANCE, TOLERANCE_UNDER, compared, is_true
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_NO, RecipeError, TrainingError
from launcher.metrics.console import bytes_as_text
from launcher.planner import rates
from launcher.planner.components import COMPONENTS, Components, Moment
from launcher.planner.formatting import (
    NAMES,
    as_written,
    batch_in_words,
    disagreement,
    is_best,
    machine_in_words,
    micro_batches,
    nothing_fits,
    parts,
    rungs_of,
    strategy_in_words,
    where,
)
from launcher.planner.html import render_page
from launcher.planner.machine import Machine
from launcher.planner.plan import Plan
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
    "html": word,
    "verify": truth,
}

if TYPE_CHECKING:
    from launcher.planner.measure import Measured
    from launcher.planner.search import Ladder
    from launcher.planner.speed import StepTime

COLOURS = {
    "parameters": "blue",
    "gradients": "cyan",
    "optimizer": "bright_blue",
    "gathered": "magenta",
    "activations": "yellow",
    "logits": "bright_red",
    "communication": "green",
    "temporary": "bright_magenta",
    "context": "bright_black",
    "margin": "bright_black",
}
_BAR = 36
Line = list[tuple[str, str]]
"""Text and how it looks on a terminal (a style of rich), piece by piece."""


def main(arguments: Sequence[str]) -> int:
    """0: it fits, or nobody knows what it must fit into; 3: it does not fit."""
    options, rest = read_options("launcher plan", arguments, OPTIONS)
    notes: list[str] = []
    nodes, gpus, memory = options.get("nodes", 1), options.get("gpus_per_node"), options.get("gpu_memory")
    gpu = options.get("gpu")
    if gpu is None and memory is None:
        here = gpus_here()
        if here is None:
            notes.append("No verdict: there is no GPU here to plan for. Give gpu=h100 (or another), or gpu_memory=80GiB.")
        else:
            gpu, memory, found = here
            gpus = found if gpus is None else gpus
            notes.append(f"Planned for the GPUs of this machine; for others give gpu=h100, or gpu_memory=80GiB, and gpus_per_node={gpus}.")
    gpus = 8 if gpus is None else gpus
    loaded = load_recipe(rest, ranks=nodes * gpus, files=False)
    page = None if options.get("html") is None else _writable(Path(options["html"]))
    recipe = loaded.recipe
    overrides = None if options.get("rates") is None else rates.read_rates(Path(options["rates"]))
    verify = options.get("verify", False)
    machine = rates.known_machine(
        gpu, nodes=nodes, gpus_per_node=gpus, memory=memory, host_memory=options.get("host_memory"), overrides=overrides
    )
    if verify:
        _can_verify(machine)
    quiet = options.get("json", False)
    from launcher.planner import (
        measure,  # and with them torch: what is wrong with the words was told before
        planning,
    )
    from launcher.planner import search as ladders

    if leaves_open(recipe):
        with _progress("choosing what is auto", shown=not quiet):
            recipe, chosen, words = _chosen(recipe, machine)
        rest, notes = [*rest, *chosen], [*notes, words]
    with _progress("tracing a step", shown=not quiet):
        plan = planning.make_plan(recipe, machine)
    ladder = None
    if options.get("ladder", not verify):
        with _progress("looking for what is faster", shown=not quiet):
            ladder = ladders.make_ladder(recipe, machine, plan_of=planning.make_plan)
    plan = dataclasses.replace(plan, notes=(*notes, *plan.notes))
    if page is not None:
        page.write_text(render_page(recipe, plan, ladder), encoding="utf-8")
    measured = None
    if not quiet:
        show(lines(recipe, plan, ladder))
        if page is not None:
            print(f"\nwritten: {page}")
    if verify:
        try:
            with _progress("training three steps", shown=not quiet):
                (measured,) = measure.measure([rest], ranks=machine.ranks, gpus=machine.device == "cuda")
        except TrainingError as error:
            print(error, file=sys.stderr)
            return EXIT_FAILED
        if not quiet:
            show([[], *verdict(plan, measured)])
    if quiet:
        print(json.dumps(as_json(recipe, plan, ladder, measured), indent=1))
    return EXIT_NO if plan.fits is False or (measured is not None and not is_true(plan, measured)) else EXIT_DONE


def _chosen(recipe: Recipe, machine: Machine) -> tuple[Recipe, tuple[str, ...], str]:
    """What a run on this machine would take for `auto`, as overrides too, and that in words."""
    from launcher.planner import planning, search

    rung = search.fastest_that_fits(recipe, machine, plan_of=planning.make_plan)
    if rung is not None:
        return rung.recipe, rung.overrides, f"auto stands for {' '.join(rung.overrides)}: the fastest that fits"
    kind = "fsdp" if recipe.strategy.kind == "auto" else recipe.strategy.kind
    size = 1 if recipe.batch.micro_batch_size == "auto" else recipe.batch.micro_batch_size
    concrete = dataclasses.replace(
        recipe,
        strategy=dataclasses.replace(recipe.strategy, kind=kind),
        batch=dataclasses.replace(recipe.batch, micro_batch_size=size),
    )
    overrides = (f"strategy.kind={kind}", *([] if size is None else [f"batch.micro_batch_size={size}"]))
    why = "no memory is known to choose for" if machine.memory is None and machine.host_memory is None else "nothing fits"
    return concrete, overrides, f"auto is shown as {' '.join(overrides)}: {why}"


def _can_verify(machine: Machine) -> None:
    here = gpus_here()
    if machine.nodes > 1:
        raise RecipeError("command line: verify: trains on this node alone; leave out nodes")
    if machine.device == "cuda" and (here is None or here[2] < machine.gpus_per_node):
        there = "no GPU" if here is None else f"{here[2]} GPUs"
        ranks = machine.gpus_per_node
        raise RecipeError(f"command line: verify: there is {there} here for {ranks} ranks; give gpus_per_node, or gpu=cpu")


def verdict(plan: Plan, measured: Measured) -> Iterator[Line]:
    """What was planned beside what was measured."""
    yield [("Planned and measured", "bold"), (": one rank, in a step once training is under way", "")]
    yield [(f"  {'':<22}{'planned':>11}{'measured':>12}{'plan is':>13}", "dim")]
    for what, planned, found in compared(plan, measured):
        off = (planned - found) / found if found else float(planned > 0)
        words = "the same" if abs(off) < 0.0005 else f"{abs(off):.1%} {'over' if off > 0 else 'under'}"
        style = "yellow" if abs(off) > TOLERANCE else ""
        line = f"  {what:<22}{bytes_as_text(planned):>11}{bytes_as_text(found):>12}"
        yield [(line, "bold" if what == "peak" else ""), (f"{words:>13}", style)]
    if is_true(plan, measured):
        yield [
            ("The plan holds", "bold green"),
            (f": its peak is at most {TOLERANCE:.0%} over what was measured, and {TOLERANCE_UNDER:.0%} under", ""),
        ]
    else:
        yield [("The plan does not hold", "bold red"), (": please report the recipe and this table", "")]


def gpus_here() -> tuple[str, int, int] | None:
    """Name, bytes and number of this machine's GPUs; None: there is none."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        return None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory, torch.cuda.device_count()


def _writable(file: Path) -> Path:
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise RecipeError(f"command line: html={file}: there is no folder {file.parent} that can be written to")
    return file


@contextmanager
def _progress(what: str, *, shown: bool) -> Iterator[None]:
    """A line on standard error while something takes its seconds, on a terminal only."""
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


def lines(recipe: Recipe, plan: Plan, ladder: Ladder | None) -> list[Line]:
    """The whole answer, for people: at most 100 columns but for overrides and names of modules."""
    blank: Line = []
    found = [*_head(recipe, plan.machine), blank, *_device(recipe, plan), blank, *_around(recipe, plan)]
    remarks = [("note", "yellow", note) for note in plan.notes]
    if (difference := disagreement(plan)) is not None:
        assert plan.arithmetic is not None
        formula = plan.arithmetic.peak.components.total
        remarks.insert(
            0,
            (
                "warning",
                "bold yellow",
                f"the trace finds {bytes_as_text(plan.step.peak.components.total)} in tensors, {abs(difference):.0%} "
                f"{'more' if difference > 0 else 'less'} than the closed formulas' {bytes_as_text(formula)}: "
                "one of them does not know something about this model, so allow for the larger.",
            ),
        )
    if remarks:
        found.append(blank)
    for kind, style, remark in remarks:
        found += _paragraph(kind, style, remark)
    if ladder is not None:
        found += [blank, *_ladder(recipe, plan, ladder)]
    return found


def _paragraph(kind: str, style: str, text: str, *, width: int = 100) -> Iterator[Line]:
    rows = textwrap.wrap(text, width - len(kind) - 2, break_long_words=False, break_on_hyphens=False)
    for index, row in enumerate(rows):
        yield [(f"{kind}: " if index == 0 else " " * (len(kind) + 2), style), (row, "")]


def _head(recipe: Recipe, machine: Machine) -> Iterator[Line]:
    yield [(recipe.run.name, "bold"), (" on ", ""), (machine_in_words(machine), "bold")]
    yield [(strategy_in_words(recipe), "")]
    yield [(batch_in_words(recipe, machine.ranks), "")]


def _device(recipe: Recipe, plan: Plan) -> Iterator[Line]:
    """The table of the peak: each bar begins where the one above it ends, so that the last one ends at what is needed."""
    moment, memory = plan.step.peak, plan.machine.memory
    full, block, limit = ("#", "#", "|") if not _draws_blocks() else ("█", "▏", "│")
    scale = max(plan.needed, memory or 0, 1) / _BAR
    edge = None if memory is None else round(memory / scale)
    device = "GPU" if plan.machine.device == "cuda" else "rank"
    passes = micro_batches(recipe, plan.machine.ranks)
    yield [(f"One {device} holds most ", "bold"), (where(moment, micro_batches=passes), "bold")]

    def bar(start: float, end: float, style: str) -> Line:
        first, last = round(start / scale), round(end / scale)
        drawn = " " * first + (full * (last - first) or (block if end > start else ""))
        if edge is None or len(drawn) > edge:
            within = drawn if edge is None else drawn[:edge]
            return [(within, style), *([] if edge is None else [(limit, "bold red"), (drawn[edge:], "red")])]
        return [(drawn.ljust(edge), style), (limit, "dim")]

    filled = 0
    for name, amount in parts(plan).items():
        if not amount:
            continue
        yield [(f"  {NAMES[name]:<22}", ""), (f"{bytes_as_text(amount):>11}  ", ""), *bar(filled, filled + amount, COLOURS[name])]
        filled += amount
    total = f"  {'needed':<22}{bytes_as_text(plan.needed):>11}  "
    if plan.spare is None or memory is None:
        yield [(total, "bold")]
        return
    if plan.spare >= 0:
        words = f": {bytes_as_text(plan.spare)} of {bytes_as_text(memory)} to spare ({plan.spare / memory:.0%})"
        yield [(total, "bold"), ("fits", "bold green"), (words, "")]
    else:
        words = f": {bytes_as_text(-plan.spare)} too much for {bytes_as_text(memory)}"
        yield [(total, "bold"), ("does not fit", "bold red"), (words, "")]


def _around(recipe: Recipe, plan: Plan) -> Iterator[Line]:
    """Phases, host and disk."""
    outside = plan.context + plan.margin
    phases = ", ".join(f"{phase} {bytes_as_text(moment.components.total + outside)}" for phase, moment in plan.step.phases.items())
    yield [(f"  {'peak of each phase':<22}", "dim"), (phases, "")]
    host = plan.host
    line: Line = [(f"  {'host memory a node':<22}", "dim"), (bytes_as_text(host.total), "")]
    if plan.host_spare is not None:
        good = plan.host_spare >= 0
        words = f"{bytes_as_text(plan.host_spare)} to spare" if good else f"does not fit: {bytes_as_text(-plan.host_spare)} too much"
        line += [(", ", ""), (words, "green" if good else "bold red")]
    yield line
    held = ", ".join(f"{name} {bytes_as_text(amount)}" for key, name in HOST_NAMES.items() if (amount := getattr(host, key)))
    yield [(f"  {'':<22}{held}", "dim")]
    if plan.checkpoints:
        together = bytes_as_text(plan.checkpoint_bytes * plan.checkpoints)
        at_once = "" if plan.checkpoints == 1 else f", {plan.checkpoints} at once: {together}"
        yield [(f"  {'a checkpoint on disk':<22}", "dim"), (f"{bytes_as_text(plan.checkpoint_bytes)}{at_once}", "")]


HOST_NAMES = {"processes": "processes", "offload": "offload", "workers": "data workers", "staging": "checkpoint staging"}


def _ladder(recipe: Recipe, plan: Plan, ladder: Ladder) -> Iterator[Line]:
    rungs = rungs_of(ladder)
    fastest = ladder.best.tokens_per_second if ladder.best is not None else max(rung.tokens_per_second for rung in rungs)
    measured = plan.machine.rates.source
    yield [("The ladder", "bold"), (f": {ladder.considered:,} ways considered; speed is predicted ({measured})", "")]
    width = max(8, *(len(strategy_in_words(rung.recipe)) for rung in rungs))
    yield [(f"      {'strategy':<{width}}  {'micro-batch':>11}  {'peak':>9}  {'tokens/s':>10}  {'speed':>6}", "dim")]
    for number, rung in enumerate(rungs, start=1):
        micro = rung.recipe.batch.micro_batch_size or rung.recipe.batch.micro_batch_tokens
        best, written, fits = is_best(rung, ladder), as_written(rung, ladder), rung.plan.fits
        remarks: Line = []
        if best:
            remarks.append(("  fastest that fits", "bold green"))
        elif fits is False:
            remarks.append(("  does not fit" + _why_not(rung.plan), "red"))
        if written:
            remarks.append((", as written" if remarks else "  as written", "bold"))
        text = (
            f"{number:>3}  {strategy_in_words(rung.recipe):<{width}}  {micro:>11,}  {bytes_as_text(rung.plan.needed):>9}  "
            f"{rung.tokens_per_second:>10,.0f}  {rung.tokens_per_second / fastest:>6.0%}"
        )
        yield [("*" if best else " ", "bold green"), (text, "bold" if best else "dim" if fits is False else ""), *remarks]
    usable = [(number, rung) for number, rung in enumerate(rungs, start=1) if rung.plan.fits is not False]
    pasted = [(number, rung) for number, rung in usable if rung.overrides and not as_written(rung, ladder)]
    if pasted:
        yield []
        yield [("To take one, add to the command:", "bold")]
        for number, rung in pasted:
            text = " ".join(shlex.quote(override) for override in rung.overrides)
            yield [(f"{'*' if is_best(rung, ladder) else ' '}{number:>3}  ", "bold green"), (text, "cyan")]
    yield []
    yield from _paragraph("step", "dim", seconds_in_words(ladder.asked.seconds))
    if not nothing_fits(ladder):
        return
    yield []
    yield [("Nothing fits.", "bold red"), (" What would:" if ladder.remedies else "", "")]
    for remedy in ladder.remedies:
        rows = textwrap.wrap(remedy, 96, break_long_words=False, break_on_hyphens=False)
        for index, row in enumerate(rows):
            yield [("  - " if index == 0 else "    ", ""), (row, "")]


def _why_not(plan: Plan) -> str:
    host = plan.host_spare is not None and plan.host_spare < 0
    return " the host" if host and (plan.spare is None or plan.spare >= 0) else ""


def seconds_in_words(seconds: StepTime) -> str:
    """`as written 1.53 s: forward 0.31, backward 0.62, ...`; the parts may overlap, so they may sum up to more."""
    spent = [
        f"{field.name} {getattr(seconds, field.name):.3g}"
        for field in dataclasses.fields(seconds)
        if field.name != "total" and isinstance(getattr(seconds, field.name), (int, float)) and getattr(seconds, field.name) >= 0.0005
    ]
    return f"as written {seconds.total:.3g} s, of it " + ", ".join(spent) + " (what overlaps counts in each)"


def _draws_blocks() -> bool:
    try:
        "█▏│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _components(components: Components) -> dict[str, int]:
    return {name: int(getattr(components, name)) for name in COMPONENTS}


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "phase": moment.phase,
        "micro_batch": moment.micro_batch,
        "where": moment.where,
        "components": _components(moment.components),
        "total": int(moment.components.total),
    }


def as_json(recipe: Recipe, plan: Plan, ladder: Ladder | None, measured: Measured | None = None) -> dict[str, Any]:
    """What `--json` prints; the head of this file names the keys."""
    machine, step = plan.machine, plan.step
    rungs = [] if ladder is None else rungs_of(ladder)
    return {
        "recipe": recipe.run.name,
        "strategy": strategy_in_words(recipe),
        "batch": batch_in_words(recipe, machine.ranks),
        "machine": dataclasses.asdict(machine) | {"ranks": machine.ranks},
        "fits": plan.fits,
        "needed": plan.needed,
        "spare": plan.spare,
        "peak": _moment(step.peak),
        "context": plan.context,
        "margin": plan.margin,
        "phases": {phase: _moment(moment) for phase, moment in step.phases.items()},
        "held": _components(step.held),
        "after_forward": _components(step.after_forward),
        "timeline": [_moment(moment) for moment in step.timeline],
        "method": step.method,
        "arithmetic": None if plan.arithmetic is None else _moment(plan.arithmetic.peak),
        "host": dataclasses.asdict(plan.host) | {"total": plan.host.total, "spare": plan.host_spare},
        "checkpoint": {"bytes": plan.checkpoint_bytes, "kept": plan.checkpoints},
        "notes": list(plan.notes),
        "verified": None
        if measured is None
        else {
            "true": is_true(plan, measured),
            "compared": [{"what": what, "planned": planned, "measured": found} for what, planned, found in compared(plan, measured)],
        },
        "ladder": None
        if ladder is None
        else {
            "considered": ladder.considered,
            "best": next((index for index, rung in enumerate(rungs) if is_best(rung, ladder)), None),
            "remedies": list(ladder.remedies),
            "rungs": [
                {
                    "overrides": list(rung.overrides),
                    "strategy": strategy_in_words(rung.recipe),
                    "micro_batch_size": rung.recipe.batch.micro_batch_size,
                    "fits": rung.plan.fits,
                    "as_written": as_written(rung, ladder),
                    "needed": rung.plan.needed,
                    "host": rung.plan.host.total,
                    "seconds": dataclasses.asdict(rung.seconds),
                    "tokens_per_second": rung.tokens_per_second,
                }
                for rung in rungs
            ],
        },
    }
