"""The plan as JSON (`as_json` has all of it) and as text (`as_text` formats that). No torch."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from launcher.data.batching import accumulation_steps
from launcher.metrics.console import bytes_as_text
from launcher.planner.memory import OVER, UNDER, Moment, Plan, compare, peak_holds
from launcher.recipe.schema import Recipe

if TYPE_CHECKING:
    from launcher.planner.candidates import Configuration
    from launcher.planner.measure import Measured
    from launcher.planner.search import Ladder

NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered weights",
    "activations": "activations",
    "logits": "logits and loss",
    "communication": "communication buffers",
    "temporary": "temporary",
    "context": "driver and libraries",
    "margin": "fragmentation margin",
}
"""Of a moment's components, and of what is added to them."""
_COLOURS = ("blue", "cyan", "bright_blue", "magenta", "yellow", "bright_red", "green",
            "bright_magenta", "bright_black", "bright_black")  # fmt: skip
_HOST_NAMES = {
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
_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
Line = list[tuple[str, str]]
"""Pieces of text, each with its style (of rich)."""


def moment_text(moment: Moment, *, micro_batches: int | None) -> str:
    """`in the backward pass of model.layers.31, micro-batch 2 of 4`."""
    if moment.phase == "optimizer":
        return "in the optimizer's step"
    of = f" of {moment.where}" if moment.where else ""
    count = f" of {micro_batches}" if micro_batches else ""
    number = "" if micro_batches == 1 else f", micro-batch {moment.micro_batch + 1}{count}"
    return f"in the {moment.phase} pass{of}{number}"


def micro_batches(recipe: Recipe, ranks: int) -> int | None:
    """Micro-batches of a rank in one step; None where `batch.micro_batch_tokens` decides."""
    size, whole = recipe.batch.micro_batch_size, recipe.batch.global_batch_size
    if not isinstance(size, int):
        return None
    return accumulation_steps(global_batch_size=whole, micro_batch_size=size, ranks=ranks)


def strategy_text(recipe: Recipe) -> str:
    """`fsdp, bf16, full checkpointing, CPU offload`: what configurations differ in."""
    strategy, checkpointing = recipe.strategy, recipe.activation_checkpointing
    words: list[str] = [strategy.kind]
    if strategy.kind == "fsdp":
        words += [f"{strategy.replicate} copies"] * (strategy.replicate > 1)
        words += ["kept after forward"] * (not strategy.reshard_after_forward)
        words += ["kept after backward"] * (not strategy.reshard_after_backward)
        words += ["one reduction a step"] * (strategy.sync_every_micro_batch is False)
    mixed = strategy.mixed_precision
    words.append("fp32" if mixed is None else _SHORT_DTYPES[mixed.param_dtype])
    if recipe.lora is not None:
        words.append(f"LoRA {recipe.lora.rank}")
    if checkpointing is not None:
        n = checkpointing.every_n_blocks
        every = "" if n == 1 else f" of 1 in {n}"
        host = " to host" if checkpointing.offload_to_cpu else ""
        words.append(f"{checkpointing.mode} checkpointing{every}{host}")
    words += ["CPU offload"] * (strategy.cpu_offload is not None)
    return ", ".join(words)


def batch_text(recipe: Recipe, ranks: int) -> str:
    """`4 sequences of 2,048 tokens x 8 micro-batches x 8 ranks = 256 a step`."""
    batch, count = recipe.batch, micro_batches(recipe, ranks)
    size, whole, on = batch.micro_batch_size, batch.global_batch_size, _plural(ranks, "rank")
    if count is None or not isinstance(size, int):
        tokens = batch.micro_batch_tokens
        return f"micro-batches of {tokens:,} tokens on {on}, {whole:,} sequences a step"
    return (
        f"{_plural(size, 'sequence')} of {recipe.data.sequence_length:,} tokens x "
        f"{_plural(count, 'micro-batch', 'es')} x {on} = {whole:,} a step"
    )


def _plural(count: int, word: str, ending: str = "s") -> str:
    return f"{count:,} {word}{'' if count == 1 else ending}"


# JSON


def as_json(
    recipe: Recipe, plan: Plan, ladder: Ladder | None, measured: Measured | None = None
) -> dict[str, Any]:
    """A plan as plain values; `launcher/cli/plan.py` documents the keys."""
    machine, step, estimate = plan.machine, plan.step, plan.arithmetic
    peak = moment_text(step.peak, micro_batches=micro_batches(recipe, machine.ranks))
    return {
        "recipe": recipe.run.name,
        "strategy": strategy_text(recipe),
        "batch": batch_text(recipe, machine.ranks),
        "machine": asdict(machine) | {"ranks": machine.ranks},
        "fits": plan.fits,
        "needed": plan.needed,
        "spare": plan.spare,
        "peak": _moment(step.peak) | {"text": peak},
        "context": plan.context,
        "margin": plan.margin,
        "phases": {phase: _moment(moment) for phase, moment in step.phases.items()},
        "held": asdict(step.held),
        "after_forward": asdict(step.after_forward),
        "timeline": [_moment(moment) for moment in step.timeline],
        "method": step.method,
        "arithmetic": None if estimate is None else _moment(estimate.peak),
        "host": asdict(plan.host) | {"total": plan.host.total, "spare": plan.host_spare},
        "checkpoint": {"bytes": plan.checkpoint_bytes, "kept": plan.checkpoints},
        "notes": list(plan.notes),
        "verified": None if measured is None else _verified(plan, measured),
        "ladder": None if ladder is None else _ladder(ladder),
    }


def _moment(moment: Moment) -> dict[str, Any]:
    return asdict(moment) | {"total": moment.total}


def _verified(plan: Plan, measured: Measured) -> dict[str, Any]:
    *rows, peak = compare(plan.step, measured)
    if measured.context is not None:
        rows.append((NAMES["context"], plan.context, measured.context))
    if measured.reserved is not None:
        rows.append(("with margin", peak[1] + plan.margin, measured.reserved))
    compared = [{"what": what, "planned": p, "measured": m} for what, p, m in (*rows, peak)]
    return {"true": peak_holds(plan.step, measured), "compared": compared}


def _ladder(ladder: Ladder) -> dict[str, Any]:
    rows, best, seconds = ladder.configurations, ladder.best, ladder.written.seconds
    return {
        "considered": ladder.evaluated,
        "best": None if best is None else rows.index(best),
        "remedies": list(ladder.suggestions),
        "written_seconds": asdict(seconds) | {"total": seconds.total},
        "rungs": [_configuration(one, ladder.written.recipe) for one in rows],
    }


def _configuration(one: Configuration, written: Recipe) -> dict[str, Any]:
    batch, plan = one.recipe.batch, one.plan
    return {
        "overrides": list(one.overrides),
        "strategy": strategy_text(one.recipe),
        "micro_batch_size": batch.micro_batch_size,
        "micro_batch_tokens": batch.micro_batch_tokens,
        "fits": plan.fits,
        "fits_host": plan.host_spare is None or plan.host_spare >= 0,
        "fits_device": plan.spare is None or plan.spare >= 0,
        "as_written": one.recipe == written,
        "needed": plan.needed,
        "host": plan.host.total,
        "seconds": asdict(one.seconds) | {"total": one.seconds.total},
        "tokens_per_second": one.tokens_per_second,
    }


# Text


def as_text(plan: dict[str, Any]) -> list[Line]:
    """Lines of at most `WIDTH` columns, except for overrides and names of modules.

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
        *_components(plan),
        [],
        *_phases_host_and_disk(plan),
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


def _components(plan: dict[str, Any]) -> Iterator[Line]:
    """The components at the peak. Each bar begins where the one above it ends."""
    needed, memory, spare = plan["needed"], plan["machine"]["memory"], plan["spare"]
    scale = max(needed, memory or 0, 1) / BAR
    edge = None if memory is None else round(memory / scale)
    device = "GPU" if plan["machine"]["device"] == "cuda" else "rank"
    yield [(f"One {device} holds most {plan['peak']['text']}", "bold")]
    amounts = plan["peak"]["components"] | {"context": plan["context"], "margin": plan["margin"]}
    end = 0
    for (name, amount), colour in zip(amounts.items(), _COLOURS, strict=True):
        if amount:
            start, end = end, end + amount
            bar = _bar(round(start / scale), round(end / scale), edge, colour)
            yield [(f"  {NAMES[name]:<22}{bytes_as_text(amount):>11}  ", ""), *bar]
    total: Line = [(f"  {'needed':<22}{bytes_as_text(needed):>11}  ", "bold")]
    if memory is not None and spare >= 0:
        left = f"{bytes_as_text(spare)} of {bytes_as_text(memory)} to spare ({spare / memory:.0%})"
        total += [("fits", "bold green"), (f": {left}", "")]
    elif memory is not None:
        over = f"{bytes_as_text(-spare)} too much for {bytes_as_text(memory)}"
        total += [("does not fit", "bold red"), (f": {over}", "")]
    yield total


def _bar(start: int, end: int, edge: int | None, style: str) -> Line:
    """edge: the column of the device's memory."""
    try:
        "█▏│".encode(sys.stdout.encoding or "ascii")
        full, thin, limit = "█▏│"
    except (UnicodeEncodeError, LookupError):
        full, thin, limit = "##|"
    drawn = " " * start + (full * (end - start) or thin)
    if edge is None:
        return [(drawn, style)]
    if len(drawn) > edge:
        return [(drawn[:edge], style), (limit, "bold red"), (drawn[edge:], "red")]
    return [(drawn.ljust(edge), style), (limit, "dim")]


def _phases_host_and_disk(plan: dict[str, Any]) -> Iterator[Line]:
    def row(label: str, *pieces: tuple[str, str]) -> Line:
        return [(f"  {label:<22}", "dim"), *pieces]

    outside, host, disk = plan["context"] + plan["margin"], plan["host"], plan["checkpoint"]
    totals = {phase: moment["total"] + outside for phase, moment in plan["phases"].items()}
    phases = ", ".join(f"{phase} {bytes_as_text(total)}" for phase, total in totals.items())
    yield row("peak of each phase", (phases, ""))
    spare, total = host["spare"], (bytes_as_text(host["total"]), "")
    if spare is None:
        yield row("host memory a node", total)
    elif spare >= 0:
        left = f", {bytes_as_text(spare)} to spare"
        yield row("host memory a node", total, (left, "green"))
    else:
        over = f", does not fit: {bytes_as_text(-spare)} too much"
        yield row("host memory a node", total, (over, "bold red"))
    parts = [f"{name} {bytes_as_text(host[key])}" for key, name in _HOST_NAMES.items() if host[key]]
    yield row("", (", ".join(parts), "dim"))
    if disk["kept"]:
        each = bytes_as_text(disk["bytes"])
        if disk["kept"] > 1:
            each += f", {disk['kept']} at once: {bytes_as_text(disk['bytes'] * disk['kept'])}"
        yield row("a checkpoint on disk", (each, ""))


def _disagreement(plan: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """A warning where trace and estimate are far apart."""
    if plan["arithmetic"] is None:
        return
    traced, estimated = plan["peak"]["total"], plan["arithmetic"]["total"]
    difference = (traced - estimated) / max(estimated, 1)
    if abs(difference) > DISAGREES:
        more = "more" if difference > 0 else "less"
        text = (
            f"the trace finds {bytes_as_text(traced)} of tensors, {abs(difference):.0%} {more} "
            f"than the estimate of {bytes_as_text(estimated)}. One of them is wrong about this "
            "model: allow for the larger."
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
        size, speed = row["micro_batch_size"] or row["micro_batch_tokens"], row["tokens_per_second"]
        text = (
            f"{index + 1:>3}  {row['strategy']:<{width}}  {size:>11,}  "
            f"{bytes_as_text(row['needed']):>9}  {speed:>10,.0f}  {speed / fastest:>6.0%}"
        )
        style = "bold" if index == best else "dim" if row["fits"] is False else ""
        star = "*" if index == best else " "
        yield [(star, "bold green"), (text, style), *_remarks(row, index == best)]
    yield from _overrides(rows, best)
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
    """Overrides of the configurations that fit, numbered as in the table."""
    title = [[], [("To take one, add to the command:", "bold")]]
    for index, row in enumerate(rows):
        if row["fits"] is not False and row["overrides"] and not row["as_written"]:
            yield from title
            title = []
            text = " ".join(shlex.quote(override) for override in row["overrides"])
            star = "*" if index == best else " "
            yield [(f"{star}{index + 1:>3}  ", "bold green"), (text, "cyan")]


def _comparison(verified: dict[str, Any]) -> Iterator[Line]:
    """The plan beside the measurement."""
    yield [("Planned and measured", "bold"), (": rank 0, in a step after the first", "")]
    yield [(f"  {'':<22}{'planned':>11}{'measured':>12}{'plan is':>13}", "dim")]
    for row in verified["compared"]:
        planned, measured = row["planned"], row["measured"]
        off = (planned - measured) / measured if measured else float(planned > 0)
        text = f"{abs(off):.1%} {'over' if off > 0 else 'under'}"
        text = "the same" if abs(off) < 0.0005 else text
        line = f"  {row['what']:<22}{bytes_as_text(planned):>11}{bytes_as_text(measured):>12}"
        bold = "bold" if row["what"] == "peak" else ""
        yield [(line, bold), (f"{text:>13}", "yellow" if abs(off) > OVER else "")]
    limits = f": its peak is at most {OVER:.0%} over what was measured, and {UNDER:.0%} under"
    if verified["true"]:
        yield [("The plan holds", "bold green"), (limits, "")]
    else:
        report = ": please report the recipe and this table"
        yield [("The plan does not hold", "bold red"), (report, "")]
