"""Formats a plan, as `plan_as_json.as_json` returns it, as text. Does not import torch."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from launcher.console import aligned, bytes_as_text, plural, two_digits
from launcher.data.batching import accumulation_steps
from launcher.distributed.rank_layout import PARALLEL_SIZES, PIPELINE, layout_sizes
from launcher.planner.memory import OVER, UNDER, Moment
from launcher.recipe import schema
from launcher.recipe.schema import Recipe
from launcher.reliability.json_files import Json

if TYPE_CHECKING:
    from launcher.planner.candidates import Configuration

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
"""Names of the components of a moment, and of what a plan adds to them."""
DISAGREES = 0.10
"""Relative difference between trace and estimate above which a warning is shown."""
WIDTH, BAR = 100, 36
"""Columns of a paragraph, and of a bar."""
_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def moment_text(moment: Moment, *, micro_batches: int | None) -> str:
    """`in the backward pass of model.layers.31, micro-batch 2 of 4`."""
    if moment.phase == "optimizer":
        return "in the optimizer's step"
    text = f"in the {moment.phase} pass" + (f" of {moment.where}" if moment.where else "")
    if micro_batches != 1:
        text += f", micro-batch {moment.micro_batch + 1}"
        text += f" of {micro_batches}" if micro_batches else ""
    return text


def micro_batches(batch: schema.Batch, ranks: int) -> int | None:
    """Micro-batches of a rank in one step; None where `batch.micro_batch_tokens` decides."""
    size, whole = batch.micro_batch_size, batch.global_batch_size
    if not isinstance(size, int):
        return None
    return accumulation_steps(global_batch_size=whole, micro_batch_size=size, ranks=ranks)


def strategy_text(recipe: Recipe, ranks: int) -> str:
    """`fsdp (ZeRO-3), bf16, full checkpointing, CPU offload`: what configurations differ in."""
    strategy, checkpointing = recipe.strategy, recipe.activation_checkpointing
    parts: list[str] = ["ddp (ZeRO-1)" if strategy.shard_optimizer else strategy.kind]
    if recipe.uses_one_rank(ranks):
        parts = ["one rank"]
    elif ranks == 1 and strategy.kind == "fsdp":
        parts = ["one rank, weights cast by block"]
    elif strategy.kind == "fsdp":
        parts = [f"fsdp (ZeRO-{3 if strategy.reshard_after_forward else 2})"]
        if strategy.replicate > 1:
            parts.append(f"{strategy.replicate} copies")
        if not strategy.reshard_after_backward:
            parts.append("kept after backward")
        if not strategy.syncs_every_micro_batch:
            parts.append("one reduction a step")
    for each in PARALLEL_SIZES:
        if (size := getattr(strategy, each.key)) > 1:
            interleaved = each is PIPELINE and strategy.pipeline_schedule != "1f1b"
            parts.append(
                f"{each.divides} over {size} ranks{' (interleaved)' if interleaved else ''}"
            )
    mixed = strategy.mixed_precision
    parts.append("fp32" if mixed is None else _SHORT_DTYPES[mixed.param_dtype])
    if mixed is not None and strategy.kind == "fsdp" and mixed.reduce_dtype != "float32":
        parts[-1] += f" reduced in {_SHORT_DTYPES[mixed.reduce_dtype]}"
    if mixed is not None and mixed.float8 is not None:
        parts[-1] += f" with float8 {mixed.float8}"
    if recipe.lora is not None:
        quantized = "" if recipe.lora.quantize is None else f" on {recipe.lora.quantize}"
        kind = "DoRA" if recipe.lora.dora else "LoRA"
        parts.append(f"{kind} {recipe.lora.rank}{quantized}")
    if checkpointing is not None:
        text = f"{checkpointing.mode.replace('_', ' ')} checkpointing"
        if checkpointing.budget is not None:
            text += f" of {checkpointing.budget}"
        if checkpointing.every_n_blocks > 1:
            text += f" of 1 in {checkpointing.every_n_blocks}"
        parts.append(text + (" to host" if checkpointing.offload_to_cpu else ""))
    if (offload := strategy.cpu_offload) is not None:
        parts.append("CPU offload" + ("" if offload.what == "all" else " of optimizer state"))
        if offload.optimizer_path is not None:
            parts.append("in files")
    if recipe.optimizer.name != "adamw":
        parts.append(recipe.optimizer.name)
    if recipe.optimizer.state_dtype != "float32":
        parts.append(f"optimizer state in {recipe.optimizer.state_dtype}")
    if recipe.optimizer.ema is not None:
        parts.append("EMA of weights")
    return ", ".join(parts)


def batch_text(recipe: Recipe, ranks: int) -> str:
    """`4 sequences of 2,048 tokens x 8 micro-batches x 8 ranks = 256 a step`."""
    batch = recipe.batch
    groups = layout_sizes(recipe.strategy, ranks=ranks).data_parallel_size
    count = micro_batches(batch, groups)
    size, whole, on = batch.micro_batch_size, batch.global_batch_size, plural(ranks, "rank")
    if groups < ranks:
        on = f"{plural(groups, 'group')} of {ranks // groups} ranks"
    unit, length = recipe.data.batch_unit, f"{recipe.data.sequence_length:,} tokens"
    if count is None or not isinstance(size, int):
        tokens = batch.micro_batch_tokens
        return f"micro-batches of {tokens:,} tokens on {on}, {whole:,} {unit} a step"
    if unit in ("pairs", "queries"):
        texts = 2 if unit == "pairs" else 1 + recipe.data.documents
        length = f"{texts} x {length}"
    return (
        f"{size:,} {unit if size != 1 else singular(unit)} of {length} x "
        f"{plural(count, 'micro-batch', 'es')} x {on} = {whole:,} a step"
    )


def speed_text(tokens_per_second: float, limits: Sequence[float]) -> str:
    """`about 5,800 tokens/s (4,900 to 6,700)`: a predicted speed and its range."""
    low, high = map(two_digits, limits)
    return f"about {two_digits(tokens_per_second)} tokens/s ({low} to {high})"


def needs_text(configuration: Configuration, memory: int | None, device: str) -> str:
    """`54 GiB of 80 GiB a rank, about 5,800 tokens/s (4,900 to 6,700)`. Without the speed on CPUs,
    where a plan assumes one: `seconds_of_steps` measures it."""
    of = "" if memory is None else f" of {bytes_as_text(memory)}"
    text = f"{bytes_as_text(configuration.plan.needed)}{of} a rank"
    if device == "cpu":
        return text
    speed = speed_text(configuration.tokens_per_second, configuration.tokens_per_second_range)
    return f"{text}, {speed}"


def as_text(plan: Json, columns: int | None = None) -> Iterator[str]:
    """The lines of a plan as `as_json` returns it; `measured` is from `measure_fastest`.

    columns: of the terminal. Longer lines are folded, but not those to copy, and the names of
    configurations are in lines of their own. None: no limit.
    """
    machine = plan["machine"]
    on = f"{plural(machine['nodes'], 'node')} x {machine['gpus_per_node']} {machine['name']}"
    if machine["memory"] is not None:
        on += f" of {bytes_as_text(machine['memory'])}"
    if machine["host_memory"] is not None:
        on += f", {bytes_as_text(machine['host_memory'])} host memory a node"
    yield from (f"{plan['recipe']} on {on}", plan["strategy"], plan["batch"], "")
    yield from _components(plan)
    yield ""
    for label, text in _other_memory(plan):
        yield from _paragraph(f"  {label:<22}{text}", 24, columns or sys.maxsize)
    remarks = [
        *_little_room(plan),
        *_disagreement(plan),
        *(f"note: {note}" for note in plan["notes"]),
    ]
    if remarks:
        yield ""
    for remark in remarks:
        yield from _paragraph(remark, remark.index(":") + 2, min(WIDTH, columns or WIDTH))
    if plan.get("sizes"):
        yield from ("", *plan["sizes"])
    if plan["search"] is not None:
        yield from ("", *_configurations(plan, columns))
    if plan["verified"] is not None:
        yield from ("", *_comparison(plan["verified"]))
    if plan.get("measured") is not None:
        yield from ("", *measured_text(plan["measured"], columns))
    if plan.get("length") is not None:
        yield from ("", plan["length"]["text"])


def singular(unit: str) -> str:
    """The singular of what a batch counts."""
    return {"queries": "query"}.get(unit, unit.removesuffix("s"))


def _paragraph(text: str, indent: int, width: int = WIDTH) -> list[str]:
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * indent
    return wrapper.wrap(text)


def device_noun(plan: Json) -> str:
    """`GPU`, or `rank` of a plan on CPUs."""
    return "GPU" if plan["machine"]["device"] == "cuda" else "rank"


def _components(plan: Json) -> Iterator[str]:
    """The components at the peak. Each bar begins where the one above it ends."""
    needed, memory = plan["needed"], plan["machine"]["memory"]
    scale = max(needed, memory or 0, 1) / BAR
    yield f"One {device_noun(plan)} holds most {plan['peak']['text']}"
    amounts = plan["peak"]["components"] | {"context": plan["context"], "margin": plan["margin"]}
    end = 0
    for name, amount in amounts.items():
        if amount:
            start, end = round(end / scale), end + amount
            bar = " " * start + ("█" * (round(end / scale) - start) or "▏")
            if memory is not None:
                edge = round(memory / scale)
                bar = bar[:edge].ljust(edge) + "│" + bar[edge:]
            yield f"  {NAMES[name]:<22}{bytes_as_text(amount):>11}  {bar}"
    verdict = _verdict(plan["spare"], memory, plan["room"])
    yield f"  {'needed':<22}{bytes_as_text(needed):>11}  {verdict}".rstrip()


def _verdict(spare: int | None, memory: int | None, room: int = 0) -> str:
    """Empty where the memory is not known. `room` is what there should be to spare."""
    if spare is None or memory is None:
        return ""
    if spare < 0:
        return f"does not fit: {bytes_as_text(-spare)} too much for {bytes_as_text(memory)}"
    left = f"{bytes_as_text(spare)} of {bytes_as_text(memory)}"
    if spare < room:
        return f"fits, will be slow: {left} to spare, {bytes_as_text(room)} of room needed"
    return f"fits: {left} to spare ({spare / memory:.0%})"


def _other_memory(plan: Json) -> Iterator[tuple[str, str]]:
    """The peak of each phase, host memory, disk."""
    outside, host, disk = plan["context"] + plan["margin"], plan["host"], plan["checkpoint"]
    totals = {phase: moment["total"] + outside for phase, moment in plan["phases"].items()}
    yield "peak of each phase", _sizes(totals)
    verdict = _verdict(host["spare"], plan["machine"]["host_memory"])
    yield "host memory a node", f"{bytes_as_text(host['total'])}  {verdict}".rstrip()
    names = {"workers": "data workers", "staging": "checkpoint staging"}
    parts = {key: size for key, size in host.items() if size and key not in ("total", "spare")}
    yield "", _sizes({names.get(key, key): size for key, size in parts.items()})
    if disk["kept"]:
        each = bytes_as_text(disk["bytes"])
        if disk["kept"] > 1:
            each += f", {disk['kept']} at once: {bytes_as_text(disk['bytes'] * disk['kept'])}"
        yield "a checkpoint on disk", each
    if plan["state_files"]:
        yield "optimizer state", f"{bytes_as_text(plan['state_files'])} on the disk of each node"


def _sizes(amounts: dict[str, int]) -> str:
    return ", ".join(f"{name} {bytes_as_text(size)}" for name, size in amounts.items())


def _little_room(plan: Json) -> Iterator[str]:
    if plan["fits"] and not plan["has_room"]:
        yield (
            f"warning: with less than {bytes_as_text(plan['room'])} to spare, PyTorch's allocator "
            "frees its caches in each step, and waits for the GPU each time"
        )


def _disagreement(plan: Json) -> Iterator[str]:
    traced, estimated = plan["peak"]["total"], (plan["arithmetic"] or plan["peak"])["total"]
    off = traced / max(estimated, 1) - 1
    if abs(off) > DISAGREES:
        yield (
            f"warning: the trace finds {bytes_as_text(traced)} of tensors, {abs(off):.0%} "
            f"{'more' if off > 0 else 'less'} than the estimate of {bytes_as_text(estimated)}: one "
            "of them is wrong about this model; allow for the larger"
        )


def _configurations(plan: Json, columns: int | None) -> Iterator[str]:
    search, source = plan["search"], plan["machine"]["rates"]["source"]
    rows, best = search["configurations"], search["best"]
    headline = f"Configurations: {search['considered']:,} evaluated; speed is predicted ({source})"
    yield from _paragraph(headline, 4, columns or sys.maxsize)
    times, others = [], []
    for n, row in enumerate(rows):
        if n == best or row["as_written"]:
            hours = f"{two_digits(row['hours'])} hours, {two_digits(row['gpu_hours'])}"
            rate = speed_text(row["tokens_per_second"], row["tokens_per_second_range"])
            times.append(f"{n + 1:>4}  {hours} {device_noun(plan)}-hours: {rate}")
        if row["fits"] is not False and row["overrides"] and not row["as_written"]:
            others.append(f"{_number(n, best)}  {shlex.join(row['overrides'])}")
    yield from _table([*configuration_cells(plan)], columns)
    # Where the rows are counted, the length of the run is said at the end
    if plan["machine"]["device"] == "cuda" and (search["steps"] or plan.get("length") is None):
        what = f"{search['steps']:,} steps" if search["steps"] else "a billion tokens"
        yield from ("", f"Training time of {what}, predicted", *times)
    if others:
        yield from ("", "To take one, add to the command:", *others)
    if best is None and plan["fits"] is False:
        yield from ("", "Nothing fits." + (" These changes help:" if search["suggestions"] else ""))
        for suggestion in search["suggestions"]:
            yield from _paragraph(f"  - {suggestion}", indent=4)


def configuration_cells(plan: Json) -> Iterator[list[str]]:
    """The table of the configurations of a plan with a search. The first row has the titles. On
    CPUs there are only ratios of speeds, because the plan assumes the speed of a CPU."""
    search, on_gpus = plan["search"], plan["machine"]["device"] == "cuda"
    rows, best, cells = search["configurations"], search["best"], []
    speeds = [row["tokens_per_second"] for row in rows]
    whole = max(speeds) if best is None else speeds[best]
    for n, (row, speed) in enumerate(zip(rows, speeds, strict=True)):
        remarks = []
        if row["fits"] is False:
            remarks.append("does not fit" + (" the host" if row["fits_device"] else ""))
        elif row["has_room"] is False:
            remarks.append("will be slow: little room")
        if n == best:
            remarks.append("fastest that fits")
        if row["as_written"]:
            remarks.append("as written")
        if row["less_exact"]:
            remarks.append("gradients less exact, never chosen by auto")
        if not row["speed_measured"]:
            remarks.append("speed not measured")
        rate = [two_digits(speed)] if on_gpus else []
        share = f"{speed / whole:.0%}"
        cells.append([bytes_as_text(row["needed"]), *rate, share, ", ".join(remarks)])
    titles = ["peak", *(["tokens/s"] if on_gpus else []), "speed", ""]
    yield from _named(rows, best, titles, cells)


def _named(
    rows: list[Json], best: int | None, titles: list[str], cells: list[list[str]]
) -> Iterator[list[str]]:
    """A row of titles and a row for each configuration: its number, strategy and micro-batch, and
    further cells."""
    yield ["", "strategy", "micro-batch", *titles]
    for n, row in enumerate(rows):
        size = row["micro_batch_size"] or row["micro_batch_tokens"]
        yield [_number(n, best), row["strategy"], f"{size:,}", *cells[n]]


def _number(n: int, best: int | None) -> str:
    return f"{'*' if n == best else ' '}{n + 1:>3}"


def _table(table: list[list[str]], columns: int | None) -> Iterator[str]:
    """A table of configurations, whose last column has remarks. If it has more than `columns`, the
    name of a configuration is in a line of its own."""
    sides = ">" * (len(table[0]) - 3) + "<"
    lines = list(aligned(table, "<<" + sides))
    if columns is None or max(map(len, lines)) <= columns:
        yield from lines
        return
    numbers = aligned([row[2:] for row in table], sides)
    for (number, name, *_), line in zip(table, numbers, strict=True):
        yield f"{number:<4}  {name}"
        yield f"      {line}"


def _comparison(verified: Json) -> Iterator[str]:
    yield "Planned and measured: rank 0, in a step after the first"
    table = [["", "planned", "measured", "plan is"]]
    for row in verified["compared"]:
        planned, measured = row["planned"], row["measured"]
        off = (planned - measured) / measured if measured else float(planned > 0)
        text = f"{abs(off):.1%} {'over' if off > 0 else 'under'}"
        text = "the same" if abs(off) < 0.0005 else text
        table.append([row["what"], bytes_as_text(planned), bytes_as_text(measured), text])
    yield from (f"  {line}" for line in aligned(table, "<>>>"))
    if verified["true"]:
        limits = f"its peak is at most {OVER:.0%} above the measured one, and {UNDER:.0%} below"
        yield f"The plan holds: {limits}"
    else:
        yield "The plan does not hold: please report the recipe and this table"


def measured_text(trials: Json, columns: int | None = None) -> Iterator[str]:
    """The lines of measured configurations, as `trials.measure_fastest` returns them."""
    rows, best, cells = trials["rows"], trials["best"], []
    for n, row in enumerate(rows):
        peak = speed = "-"
        if (measured := row["measured"]) is not None:
            peak, speed = bytes_as_text(measured["peak"]), f"{measured['tokens_per_second']:,.0f}"
        planned = [bytes_as_text(row["planned_peak"]), two_digits(row["tokens_per_second"])]
        remark = row["problem"] or ("fastest" if n == best else "")
        if row["as_written"] and not row["problem"]:
            remark += ", as written" if remark else "as written"
        cells.append([peak, planned[0], speed, planned[1], remark])
    yield "Measured on this machine, on random tokens; peak of tensors"
    titles = ["peak", "planned", "tokens/s", "planned", ""]
    yield from _table([*_named(rows, best, titles, cells)], columns)
    if best is not None and rows[best]["overrides"]:
        pasted = shlex.join(rows[best]["overrides"])
        yield from ("To take the fastest, add to the command:", f"      {pasted}")
    if trials["file"] is not None:
        yield f"auto takes the fastest for this recipe and hardware: {trials['file']}"
