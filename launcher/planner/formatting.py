"""The plan as JSON (`as_json` has all of it) and as text (`as_text` formats that). No torch."""

from __future__ import annotations

import shlex
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
    """`fsdp (ZeRO-3), bf16, full checkpointing, CPU offload`: what configurations differ in."""
    strategy, checkpointing = recipe.strategy, recipe.activation_checkpointing
    parts: list[str] = ["ddp (ZeRO-1)" if strategy.shard_optimizer else strategy.kind]
    if strategy.kind == "fsdp":
        parts = [f"fsdp (ZeRO-{3 if strategy.reshard_after_forward else 2})"]
        parts += [f"{strategy.replicate} copies"] * (strategy.replicate > 1)
        parts += ["kept after backward"] * (not strategy.reshard_after_backward)
        parts += ["one reduction a step"] * (strategy.sync_every_micro_batch is False)
    mixed = strategy.mixed_precision
    parts.append("fp32" if mixed is None else _SHORT_DTYPES[mixed.param_dtype])
    if recipe.lora is not None:
        parts.append(f"LoRA {recipe.lora.rank}")
    if checkpointing is not None:
        n = checkpointing.every_n_blocks
        every = "" if n == 1 else f" of 1 in {n}"
        host = " to host" if checkpointing.offload_to_cpu else ""
        budget = "" if checkpointing.budget is None else f" of {checkpointing.budget}"
        parts.append(f"{checkpointing.mode} checkpointing{budget}{every}{host}")
    if (offload := strategy.cpu_offload) is not None:
        parts.append("CPU offload" if offload.what == "all" else "CPU offload of optimizer state")
        parts += ["in files"] * (offload.optimizer_path is not None)
    name, dtype = recipe.optimizer.name, recipe.optimizer.state_dtype
    parts += [name] * (name != "adamw")
    parts += [f"optimizer state in {dtype}"] * (dtype != "float32")
    return ", ".join(parts)


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
        "method": "traced" if plan.traced else "arithmetic",
        "arithmetic": None if estimate is None else _moment(estimate.peak),
        "host": asdict(plan.host) | {"total": plan.host.total, "spare": plan.host_spare},
        "checkpoint": {"bytes": plan.checkpoint_bytes, "kept": plan.checkpoints},
        "state_files": step.disk * machine.gpus_per_node,
        "notes": list(plan.notes),
        "verified": None if measured is None else _verified(plan, measured),
        "ladder": None if ladder is None else _ladder(ladder),
    }


def _moment(moment: Moment) -> dict[str, Any]:
    return asdict(moment) | {"total": moment.total}


def _verified(plan: Plan, measured: Measured) -> dict[str, Any]:
    *rows, peak = compare(plan.step, measured)
    if measured.context is not None and measured.reserved is not None:
        rows.append((NAMES["context"], plan.context, measured.context))
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
        "steps": ladder.written.recipe.run.max_steps,
        "rungs": [configuration_as_json(one, ladder.written.recipe) for one in rows],
    }


def configuration_as_json(one: Configuration, written: Recipe) -> dict[str, Any]:
    batch, plan = one.recipe.batch, one.plan
    return {
        "overrides": list(one.overrides),
        "strategy": strategy_text(one.recipe),
        "micro_batch_size": batch.micro_batch_size,
        "micro_batch_tokens": batch.micro_batch_tokens,
        "fits": plan.fits,
        "fits_device": plan.spare is None or plan.spare >= 0,
        "as_written": one.recipe == written,
        "needed": plan.needed,
        "host": plan.host.total,
        "seconds": asdict(one.seconds) | {"total": one.seconds.total},
        "tokens_per_second": one.tokens_per_second,
        "hours": one.hours,
        "gpu_hours": one.hours * plan.machine.ranks,
    }


# Text


def as_text(plan: dict[str, Any]) -> Iterator[str]:
    """Lines of at most `WIDTH` columns, except for overrides and names of modules.

    plan: as `as_json` returns it, with what `measured.measure_fastest` returns as `measured`.
    """
    machine, memory = plan["machine"], plan["machine"]["memory"]
    of = "" if memory is None else f" of {bytes_as_text(memory)}"
    on = f"{_plural(machine['nodes'], 'node')} x {machine['gpus_per_node']} {machine['name']}{of}"
    if machine["host_memory"] is not None:
        on += f", {bytes_as_text(machine['host_memory'])} host memory a node"
    yield from (f"{plan['recipe']} on {on}", plan["strategy"], plan["batch"], "")
    yield from _components(plan)
    yield ""
    yield from _phases_host_and_disk(plan)
    remarks = [f"note: {note}" for note in plan["notes"]]
    traced, estimated = plan["peak"]["total"], (plan["arithmetic"] or plan["peak"])["total"]
    if abs(traced / max(estimated, 1) - 1) > DISAGREES:
        remarks.insert(
            0,
            f"warning: the trace finds {bytes_as_text(traced)} of tensors, "
            f"{abs(traced / estimated - 1):.0%} {'more' if traced > estimated else 'less'} than "
            f"the estimate of {bytes_as_text(estimated)}. One of them is wrong about this model: "
            "allow for the larger.",
        )
    yield from [""] * bool(remarks)
    for remark in remarks:
        yield from _paragraph(remark, indent=remark.index(":") + 2)
    if plan["ladder"] is not None:
        yield ""
        yield from _configurations(plan)
    if plan["verified"] is not None:
        yield ""
        yield from _comparison(plan["verified"])
    if plan.get("measured") is not None:
        yield ""
        yield from measured_text(plan["measured"])


def _paragraph(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _components(plan: dict[str, Any]) -> Iterator[str]:
    """The components at the peak. Each bar begins where the one above it ends."""
    needed, memory, spare = plan["needed"], plan["machine"]["memory"], plan["spare"]
    scale = max(needed, memory or 0, 1) / BAR
    edge = None if memory is None else round(memory / scale)  # the column of the memory's end
    device = "GPU" if plan["machine"]["device"] == "cuda" else "rank"
    yield f"One {device} holds most {plan['peak']['text']}"
    amounts = plan["peak"]["components"] | {"context": plan["context"], "margin": plan["margin"]}
    end = 0
    for name, amount in amounts.items():
        if amount:
            start, end = end, end + amount
            full = "█" * (round(end / scale) - round(start / scale))
            bar = " " * round(start / scale) + (full or "▏")
            if edge is not None:
                bar = bar[:edge].ljust(edge) + "│" + bar[edge:]
            yield f"  {NAMES[name]:<22}{bytes_as_text(amount):>11}  {bar}"
    text = f"  {'needed':<22}{bytes_as_text(needed):>11}"
    if memory is not None and spare >= 0:
        left = f"{bytes_as_text(spare)} of {bytes_as_text(memory)} to spare"
        text += f"  fits: {left} ({spare / memory:.0%})"
    elif memory is not None:
        over = f"{bytes_as_text(-spare)} too much for {bytes_as_text(memory)}"
        text += f"  does not fit: {over}"
    yield text


def _phases_host_and_disk(plan: dict[str, Any]) -> Iterator[str]:
    outside, host, disk = plan["context"] + plan["margin"], plan["host"], plan["checkpoint"]
    totals = {phase: moment["total"] + outside for phase, moment in plan["phases"].items()}
    phases = ", ".join(f"{phase} {bytes_as_text(total)}" for phase, total in totals.items())
    yield f"  {'peak of each phase':<22}{phases}"
    spare, text = host["spare"], bytes_as_text(host["total"])
    if spare is not None and spare >= 0:
        text += f", {bytes_as_text(spare)} to spare"
    elif spare is not None:
        text += f", does not fit: {bytes_as_text(-spare)} too much"
    yield f"  {'host memory a node':<22}{text}"
    parts = [f"{name} {bytes_as_text(host[key])}" for key, name in _HOST_NAMES.items() if host[key]]
    yield f"  {'':<22}{', '.join(parts)}"
    if disk["kept"]:
        each = bytes_as_text(disk["bytes"])
        if disk["kept"] > 1:
            each += f", {disk['kept']} at once: {bytes_as_text(disk['bytes'] * disk['kept'])}"
        yield f"  {'a checkpoint on disk':<22}{each}"
    if plan["state_files"]:
        size = bytes_as_text(plan["state_files"])
        yield f"  {'optimizer state':<22}{size} on the disk of each node"


def _configurations(plan: dict[str, Any]) -> Iterator[str]:
    ladder, source = plan["ladder"], plan["machine"]["rates"]["source"]
    rows, best = ladder["rungs"], ladder["best"]
    speeds = [row["tokens_per_second"] for row in rows]
    whole = max(speeds) if best is None else speeds[best]
    yield f"Configurations: {ladder['considered']:,} evaluated; speed is predicted ({source})"
    cells = [
        f"{bytes_as_text(row['needed']):>9}  {speed:>10,.0f}  {speed / whole:>6.0%}"
        for row, speed in zip(rows, speeds, strict=True)
    ]
    remarks = []
    for n, row in enumerate(rows):
        notes = ["fastest that fits"] * (n == best) + ["as written"] * row["as_written"]
        host = " the host" if row["fits_device"] else ""
        remarks.append(", ".join([f"does not fit{host}"] * (row["fits"] is False) + notes))
    yield from _table(rows, best, f"{'peak':>9}  {'tokens/s':>10}  {'speed':>6}", cells, remarks)
    rank = "GPU" if plan["machine"]["device"] == "cuda" else "rank"
    what = f"{ladder['steps']:,} steps" if ladder["steps"] else "a billion tokens"
    yield from ("", f"Training time of {what}, predicted")
    for n, row in enumerate(rows):
        if n == best or row["as_written"]:
            yield f"{n + 1:>4}  {row['hours']:,.2f} hours, {row['gpu_hours']:,.2f} {rank}-hours"
    title = ["", "To take one, add to the command:"]
    for n, row in enumerate(rows):
        if row["fits"] is not False and row["overrides"] and not row["as_written"]:
            yield from title
            title = []
            yield f"{'*' if n == best else ' '}{n + 1:>3}  {overrides_text(row['overrides'])}"
    if best is None and plan["fits"] is False:
        yield from ("", "Nothing fits." + (" What would:" if ladder["remedies"] else ""))
        for suggestion in ladder["remedies"]:
            yield from _paragraph(f"  - {suggestion}", indent=4)


def _table(
    rows: list[dict[str, Any]], best: int | None, titles: str, cells: list[str], remarks: list[str]
) -> Iterator[str]:
    """Configurations, one a line. titles: of the cells."""
    width = max((len(row["strategy"]) for row in rows), default=8)
    yield f"      {'strategy':<{width}}  {'micro-batch':>11}  {titles}"
    for n, row in enumerate(rows):
        size = row["micro_batch_size"] or row["micro_batch_tokens"]
        line = f"{'*' if n == best else ' '}{n + 1:>3}  {row['strategy']:<{width}}  {size:>11,}"
        yield f"{line}  {cells[n]}  {remarks[n]}".rstrip()


def overrides_text(overrides: list[str]) -> str:
    """To be pasted into a shell."""
    return " ".join(shlex.quote(override) for override in overrides)


def _comparison(verified: dict[str, Any]) -> Iterator[str]:
    """The plan beside the measurement."""
    yield "Planned and measured: rank 0, in a step after the first"
    yield f"  {'':<22}{'planned':>11}{'measured':>12}{'plan is':>13}"
    for row in verified["compared"]:
        planned, measured = row["planned"], row["measured"]
        off = (planned - measured) / measured if measured else float(planned > 0)
        text = f"{abs(off):.1%} {'over' if off > 0 else 'under'}"
        text = "the same" if abs(off) < 0.0005 else text
        line = f"  {row['what']:<22}{bytes_as_text(planned):>11}{bytes_as_text(measured):>12}"
        yield f"{line}{text:>13}"
    if verified["true"]:
        limits = f"its peak is at most {OVER:.0%} above the measured one, and {UNDER:.0%} below"
        yield f"The plan holds: {limits}"
    else:
        yield "The plan does not hold: please report the recipe and this table"


def measured_text(found: dict[str, Any]) -> Iterator[str]:
    """found: as `measured.measure_fastest` returns it."""
    rows, best = found["rows"], found["best"]
    cells, remarks = [], []
    for n, row in enumerate(rows):
        peak, speed = "-", "-"
        if (measured := row["measured"]) is not None:
            peak, speed = bytes_as_text(measured["peak"]), f"{measured['tokens_per_second']:,.0f}"
        planned = bytes_as_text(row["planned_peak"])
        cells.append(f"{peak:>9}  {planned:>9}  {speed:>10}  {row['tokens_per_second']:>10,.0f}")
        notes = ["fastest"] * (n == best) + ["as written"] * row["as_written"]
        remarks.append(row["problem"] or ", ".join(notes))
    yield "Measured on this machine, on random tokens; peak of tensors"
    titles = f"{'peak':>9}  {'planned':>9}  {'tokens/s':>10}  {'planned':>10}"
    yield from _table(rows, best, titles, cells, remarks)
    if best is not None and rows[best]["overrides"]:
        yield "To take the fastest, add to the command:"
        yield f"      {overrides_text(rows[best]['overrides'])}"
    if found["file"] is not None:
        yield f"auto takes the fastest for this recipe and hardware: {found['file']}"
