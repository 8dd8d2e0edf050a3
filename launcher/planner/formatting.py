"""The plan for people and programs: `as_json` has all of it, `as_text` lays that out. No torch."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from launcher.data.batching import accumulation_steps
from launcher.metrics.console import bytes_as_text
from launcher.planner.memory import COMPONENTS, Components, Moment, Plan
from launcher.planner.verification import OVER, UNDER, verified
from launcher.recipe.schema import Recipe

if TYPE_CHECKING:
    from launcher.planner.measure import Measured
    from launcher.planner.search import Configuration, Ladder

_COMPONENTS = {
    "parameters": ("parameters", "blue"),
    "gradients": ("gradients", "cyan"),
    "optimizer": ("optimizer state", "bright_blue"),
    "gathered": ("gathered weights", "magenta"),
    "activations": ("activations", "yellow"),
    "logits": ("logits and loss", "bright_red"),
    "communication": ("communication buffers", "green"),
    "temporary": ("temporary", "bright_magenta"),
    "context": ("driver and libraries", "bright_black"),
    "margin": ("fragmentation margin", "bright_black"),
}
"""Name and colour of a moment's components, and of the two amounts that are added to them."""
NAMES = {key: name for key, (name, _) in _COMPONENTS.items()}
HOST_NAMES = {
    "processes": "processes",
    "offload": "offload",
    "workers": "data workers",
    "staging": "checkpoint staging",
}
DISAGREES = 0.10
"""Difference between trace and estimate that is worth a warning."""
BAR = 36
"""Columns of a bar."""
WIDTH = 100
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
Line = list[tuple[str, str]]
"""Pieces of text, each with its style (of rich)."""


# Words


def where(moment: Moment, *, micro_batches: int | None) -> str:
    """`in the backward pass of model.layers.31, micro-batch 2 of 4`."""
    if moment.phase == "optimizer":
        return "in the optimizer's step"
    of = f" of {moment.where}" if moment.where else ""
    count = f" of {micro_batches}" if micro_batches else ""
    number = "" if micro_batches == 1 else f", micro-batch {moment.micro_batch + 1}{count}"
    return f"in the {moment.phase} pass{of}{number}"


def micro_batches(recipe: Recipe, ranks: int) -> int | None:
    """Micro-batches of a rank in one step; None where tokens decide."""
    size, whole = recipe.batch.micro_batch_size, recipe.batch.global_batch_size
    if not isinstance(size, int):
        return None
    return accumulation_steps(global_batch_size=whole, micro_batch_size=size, ranks=ranks)


def strategy_in_words(recipe: Recipe) -> str:
    """`fsdp, bf16, full checkpointing, CPU offload`: what configurations differ in."""
    strategy, checkpointing = recipe.strategy, recipe.activation_checkpointing
    words: list[str] = [strategy.kind]
    if strategy.kind == "fsdp":
        words += [f"{strategy.replicate} copies"] * (strategy.replicate > 1)
        words += ["kept after forward"] * (not strategy.reshard_after_forward)
        words += ["kept after backward"] * (not strategy.reshard_after_backward)
        words += ["one reduction a step"] * (strategy.sync_every_micro_batch is False)
    mixed = strategy.mixed_precision
    words.append("fp32" if mixed is None else SHORT_DTYPES[mixed.param_dtype])
    if recipe.lora is not None:
        words.append(f"LoRA {recipe.lora.rank}")
    if checkpointing is not None:
        n = checkpointing.every_n_blocks
        host = " to host" if checkpointing.offload_to_cpu else ""
        every = "" if n == 1 else f" of 1 in {n}"
        words.append(f"{checkpointing.mode} checkpointing{every}{host}")
    words += ["CPU offload"] * (strategy.cpu_offload is not None)
    return ", ".join(words)


def batch_in_words(recipe: Recipe, ranks: int) -> str:
    """`4 sequences of 2,048 tokens x 8 micro-batches x 8 ranks = 256 a step`."""
    batch, passes = recipe.batch, micro_batches(recipe, ranks)
    size, whole = batch.micro_batch_size, batch.global_batch_size
    if passes is None or not isinstance(size, int):
        tokens = batch.micro_batch_tokens
        on = _plural(ranks, "rank")
        return f"micro-batches of {tokens:,} tokens on {on}, {whole:,} sequences a step"
    return (
        f"{_plural(size, 'sequence')} of {recipe.data.sequence_length:,} tokens x "
        f"{_plural(passes, 'micro-batch', 'es')} x {_plural(ranks, 'rank')} = {whole:,} a step"
    )


def _plural(count: int, word: str, ending: str = "s") -> str:
    return f"{count:,} {word}{'' if count == 1 else ending}"


# JSON


def as_json(
    recipe: Recipe, plan: Plan, ladder: Ladder | None, measured: Measured | None = None
) -> dict[str, Any]:
    """All of a plan as plain values; `launcher/cli/plan.py` documents the keys."""
    machine, step, fits = plan.machine, plan.step, plan.fits
    passes = micro_batches(recipe, machine.ranks)
    return {
        "recipe": recipe.run.name,
        "strategy": strategy_in_words(recipe),
        "batch": batch_in_words(recipe, machine.ranks),
        "machine": dataclasses.asdict(machine) | {"ranks": machine.ranks},
        "fits": fits,
        "needed": plan.needed,
        "spare": plan.spare,
        "peak": _moment(step.peak) | {"text": where(step.peak, micro_batches=passes)},
        "context": plan.context,
        "margin": plan.margin,
        "phases": {phase: _moment(moment) for phase, moment in step.phases.items()},
        "held": _components(step.held),
        "after_forward": _components(step.after_forward),
        "timeline": [_moment(moment) for moment in step.timeline],
        "method": step.method,
        "arithmetic": None if plan.arithmetic is None else _moment(plan.arithmetic.peak),
        "host": dataclasses.asdict(plan.host)
        | {"total": plan.host.total, "spare": plan.host_spare},
        "checkpoint": {"bytes": plan.checkpoint_bytes, "kept": plan.checkpoints},
        "notes": list(plan.notes),
        "verified": None if measured is None else verified(plan, measured),
        "ladder": None if ladder is None else _ladder(ladder),
    }


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


def _ladder(ladder: Ladder) -> dict[str, Any]:
    rows = ladder.all()
    best = [index for index, one in enumerate(rows) if ladder.is_best(one)]
    return {
        "considered": ladder.evaluated,
        "best": best[0] if best else None,
        "remedies": list(ladder.suggestions),
        "written_seconds": dataclasses.asdict(ladder.asked.seconds)
        | {"total": ladder.asked.seconds.total},
        "rungs": [_configuration(one, ladder) for one in rows],
    }


def _configuration(one: Configuration, ladder: Ladder) -> dict[str, Any]:
    batch, plan = one.recipe.batch, one.plan
    return {
        "overrides": list(one.overrides),
        "strategy": strategy_in_words(one.recipe),
        "micro_batch_size": batch.micro_batch_size,
        "micro_batch_tokens": batch.micro_batch_tokens,
        "fits": plan.fits,
        "fits_host": plan.host_spare is None or plan.host_spare >= 0,
        "fits_device": plan.spare is None or plan.spare >= 0,
        "as_written": ladder.is_written(one),
        "needed": plan.needed,
        "host": plan.host.total,
        "seconds": dataclasses.asdict(one.seconds) | {"total": one.seconds.total},
        "tokens_per_second": one.tokens_per_second,
    }


# Text


def as_text(plan: dict[str, Any]) -> list[Line]:
    """Lines of at most `WIDTH` columns, but for overrides and names of modules.

    plan: as `as_json` returns it.
    """
    machine, memory = plan["machine"], plan["machine"]["memory"]
    of = "" if memory is None else f" of {bytes_as_text(memory)}"
    on = f"{_plural(machine['nodes'], 'node')} x {machine['gpus_per_node']} {machine['name']}{of}"
    if machine["host_memory"] is not None:
        on += f", {bytes_as_text(machine['host_memory'])} host memory a node"
    found: list[Line] = [
        [(plan["recipe"], "bold"), (" on ", ""), (on, "bold")],
        [(plan["strategy"], "")],
        [(plan["batch"], "")],
        [],
        *_table(plan),
        [],
        *_around(plan),
    ]
    remarks = [*_disagreement(plan), *(("note", "yellow", note) for note in plan["notes"])]
    found += [[]] if remarks else []
    for kind, style, remark in remarks:
        found += _paragraph(f"{kind}: ", style, remark)
    if plan["ladder"] is not None:
        found += [[], *_configurations(plan)]
    if plan["verified"] is not None:
        found += [[], *_comparison(plan["verified"])]
    return found


def _paragraph(first: str, style: str, text: str) -> Iterator[Line]:
    width = WIDTH - len(first)
    rows = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    for index, row in enumerate(rows):
        yield [(first if index == 0 else " " * len(first), style), (row, "")]


def _table(plan: dict[str, Any]) -> Iterator[Line]:
    """The components at the peak. Each bar begins where the one above it ends."""
    needed, memory = plan["needed"], plan["machine"]["memory"]
    scale = max(needed, memory or 0, 1) / BAR
    edge = None if memory is None else round(memory / scale)
    device = "GPU" if plan["machine"]["device"] == "cuda" else "rank"
    yield [(f"One {device} holds most {plan['peak']['text']}", "bold")]
    amounts = plan["peak"]["components"] | {"context": plan["context"], "margin": plan["margin"]}
    filled = 0
    for name, amount in amounts.items():
        if amount:
            bar = _bar(filled / scale, (filled + amount) / scale, edge, _COMPONENTS[name][1])
            yield [(f"  {NAMES[name]:<22}{bytes_as_text(amount):>11}  ", ""), *bar]
            filled += amount
    total = (f"  {'needed':<22}{bytes_as_text(needed):>11}  ", "bold")
    if memory is None:
        yield [total]
    elif plan["spare"] >= 0:
        share = plan["spare"] / memory
        left = f"{bytes_as_text(plan['spare'])} of {bytes_as_text(memory)} to spare ({share:.0%})"
        yield [total, ("fits", "bold green"), (f": {left}", "")]
    else:
        over = f"{bytes_as_text(-plan['spare'])} too much for {bytes_as_text(memory)}"
        yield [total, ("does not fit", "bold red"), (f": {over}", "")]


def _bar(start: float, end: float, edge: int | None, style: str) -> Line:
    """edge: the column of the device's memory."""
    full, thin, limit = ("█", "▏", "│") if _prints("█▏│") else ("#", "#", "|")
    first, last = round(start), round(end)
    drawn = " " * first + (full * (last - first) or thin)
    if edge is None:
        return [(drawn, style)]
    if len(drawn) > edge:
        return [(drawn[:edge], style), (limit, "bold red"), (drawn[edge:], "red")]
    return [(drawn.ljust(edge), style), (limit, "dim")]


def _prints(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _around(plan: dict[str, Any]) -> Iterator[Line]:
    """Phases, host and disk."""
    outside, host, disk = plan["context"] + plan["margin"], plan["host"], plan["checkpoint"]
    totals = {phase: moment["total"] + outside for phase, moment in plan["phases"].items()}
    phases = ", ".join(f"{phase} {bytes_as_text(total)}" for phase, total in totals.items())
    yield [(f"  {'peak of each phase':<22}", "dim"), (phases, "")]
    line = [(f"  {'host memory a node':<22}", "dim"), (bytes_as_text(host["total"]), "")]
    if host["spare"] is not None and host["spare"] >= 0:
        line += [(", ", ""), (f"{bytes_as_text(host['spare'])} to spare", "green")]
    elif host["spare"] is not None:
        over = f"does not fit: {bytes_as_text(-host['spare'])} too much"
        line += [(", ", ""), (over, "bold red")]
    yield line
    parts = [f"{name} {bytes_as_text(host[key])}" for key, name in HOST_NAMES.items() if host[key]]
    yield [(f"  {'':<22}{', '.join(parts)}", "dim")]
    if disk["kept"]:
        together = bytes_as_text(disk["bytes"] * disk["kept"])
        at_once = "" if disk["kept"] == 1 else f", {disk['kept']} at once: {together}"
        each = f"{bytes_as_text(disk['bytes'])}{at_once}"
        yield [(f"  {'a checkpoint on disk':<22}", "dim"), (each, "")]


def _disagreement(plan: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """A warning where trace and estimate are far apart."""
    if plan["arithmetic"] is None:
        return
    traced, estimated = plan["peak"]["total"], plan["arithmetic"]["total"]
    difference = (traced - estimated) / max(estimated, 1)
    if abs(difference) > DISAGREES:
        more = "more" if difference > 0 else "less"
        text = (
            f"the trace finds {bytes_as_text(traced)} in tensors, {abs(difference):.0%} {more} "
            f"than the closed formulas' {bytes_as_text(estimated)}: one of them does not know "
            "something about this model, so allow for the larger."
        )
        yield "warning", "bold yellow", text


def _configurations(plan: dict[str, Any]) -> Iterator[Line]:
    ladder, source = plan["ladder"], plan["machine"]["rates"]["source"]
    rows, best = ladder["rungs"], ladder["best"]
    fastest = max(row["tokens_per_second"] for row in rows)
    fastest = fastest if best is None else rows[best]["tokens_per_second"]
    head = f": {ladder['considered']:,} evaluated; speed is predicted ({source})"
    yield [("Configurations", "bold"), (head, "")]
    width = max(8, *(len(row["strategy"]) for row in rows))
    titles = f"{'micro-batch':>11}  {'peak':>9}  {'tokens/s':>10}  {'speed':>6}"
    yield [(f"      {'strategy':<{width}}  {titles}", "dim")]
    for index, row in enumerate(rows):
        size = row["micro_batch_size"] or row["micro_batch_tokens"]
        text = (
            f"{index + 1:>3}  {row['strategy']:<{width}}  {size:>11,}  "
            f"{bytes_as_text(row['needed']):>9}  {row['tokens_per_second']:>10,.0f}  "
            f"{row['tokens_per_second'] / fastest:>6.0%}"
        )
        style = "bold" if index == best else "dim" if row["fits"] is False else ""
        star = "*" if index == best else " "
        yield [(star, "bold green"), (text, style), *_remarks(row, index == best)]
    yield from _overrides(rows, best)
    spent = ladder["written_seconds"]
    parts = [f"{name} {t:.3g}" for name, t in spent.items() if name != "total" and t >= 0.0005]
    step = f"as written {spent['total']:.3g} s: {', '.join(parts)}"
    yield []
    yield from _paragraph("step: ", "dim", step)
    if best is None and plan["fits"] is False:
        suggestions = ladder["remedies"]
        yield []
        yield [("Nothing fits.", "bold red"), (" What would:" if suggestions else "", "")]
        for suggestion in suggestions:
            yield from _paragraph("  - ", "", suggestion)


def _remarks(row: dict[str, Any], best: bool) -> Line:
    remarks: Line = []
    if best:
        remarks.append(("  fastest that fits", "bold green"))
    elif row["fits"] is False:
        host = " the host" if row["fits_device"] else ""
        remarks.append((f"  does not fit{host}", "red"))
    if row["as_written"]:
        remarks.append((", as written" if remarks else "  as written", "bold"))
    return remarks


def _overrides(rows: list[dict[str, Any]], best: int | None) -> Iterator[Line]:
    usable = [
        (index, row)
        for index, row in enumerate(rows)
        if row["fits"] is not False and row["overrides"] and not row["as_written"]
    ]
    if usable:
        yield []
        yield [("To take one, add to the command:", "bold")]
    for index, row in usable:
        text = " ".join(shlex.quote(override) for override in row["overrides"])
        yield [(f"{'*' if index == best else ' '}{index + 1:>3}  ", "bold green"), (text, "cyan")]


def _comparison(verified: dict[str, Any]) -> Iterator[Line]:
    """The plan beside the measurement."""
    yield [("Planned and measured", "bold"), (": rank 0, in a step once training is under way", "")]
    yield [(f"  {'':<22}{'planned':>11}{'measured':>12}{'plan is':>13}", "dim")]
    for row in verified["compared"]:
        planned, measured = row["planned"], row["measured"]
        off = (planned - measured) / measured if measured else float(planned > 0)
        text = f"{abs(off):.1%} {'over' if off > 0 else 'under'}"
        text = "the same" if abs(off) < 0.0005 else text
        line = f"  {row['what']:<22}{bytes_as_text(planned):>11}{bytes_as_text(measured):>12}"
        bold = "bold" if row["what"] == "peak" else ""
        yield [(line, bold), (f"{text:>13}", "yellow" if abs(off) > OVER else "")]
    if verified["true"]:
        limits = f": its peak is at most {OVER:.0%} over what was measured, and {UNDER:.0%} under"
        yield [("The plan holds", "bold green"), (limits, "")]
    else:
        report = ": please report the recipe and this table"
        yield [("The plan does not hold", "bold red"), (report, "")]
