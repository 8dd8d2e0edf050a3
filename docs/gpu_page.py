"""Writes what GPUs have measured, beside what the plan predicts.

    python -m docs.gpu_page                                  # from benchmarks/plans.json
    python -m docs.gpu_page build/gpu/gpu.json ...           # also takes the figures of a GPU

The table for users is in docs/gpu.md and README.md, all figures are in docs/engineering/gpu.md.
`make gpu-plans` makes the predictions anew. Figures of a GPU are kept in
benchmarks/gpu_measured.json: for each GPU and part of `make test-gpu` those of the last run.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from gpu_plans import PLANS
from gpu_rows import GROUPS, Row

from launcher.distributed.hardware import find_gpu
from launcher.planner.machine import Rates, known_machine
from launcher.planner.speed import STEP_BYTES

ROOT = Path(__file__).resolve().parent.parent
MEASURED, PAGE = ROOT / "benchmarks/gpu_measured.json", ROOT / "docs/engineering/gpu.md"
SUMMARIES = (ROOT / "docs/gpu.md", ROOT / "README.md")
"""Pages with the table for users: a table whose head is SUMMARY_HEAD."""
SUMMARY_HEAD = "model, what is trained | GPU | tokens/s | MFU | GiB, plan / peak"
SUMMARY = (
    ("H100", "steps", "ddp, compiled", "Llama-3.2-1B", "all weights"),
    ("H100", "goals", "Qwen3-0.6B", "Qwen3-0.6B", "all weights, rows of 8,192"),
    ("H100", "goals", "Llama-3.1-8B, LoRA", "Llama-3.1-8B", "LoRA"),
    ("H100", "goals", "Qwen2.5-7B, LoRA", "Qwen2.5-7B", "LoRA"),
    ("H200", "families", "Llama-3.1-8B, QLoRA, full", "Llama-3.1-8B", "QLoRA, checkpointing"),
    ("H200", "goals", "Llama-3.1-8B, AdamW in int8", "Llama-3.1-8B", "all weights, AdamW in int8"),
)
"""Rows of the table for users: GPU, group and row, then model and what is trained."""
GPUS = ("H100", "H200")
"""GPUs of the tables, one of each."""
HEAD = """\
# GPU benchmarks: all figures

Every figure that a GPU has measured, beside the prediction that was made without one. [GPU benchmarks](../gpu.md) has the
table for users. `benchmarks/README.md` says how the figures are measured.

*Tokens* are sequences of a micro-batch x length x micro-batches of a step. On one GPU, rows of `ddp` and rows that name
neither strategy train with the strategy for one rank. *Copies* are those between weights, gradients and their buffers;
*again* is recomputation.
"""
FOUND = """\
## What the figures say

- **H100, 2026-11-26.** The measured peak is within 0.1 % of the plan for all 13 eager configurations, and 0.2 to 3.1 % below it
  for all 9 compiled ones. A step takes 0.84 to 1.13 times the predicted time, except with parameter offload (1.4 and 5.1 times).
  Every kernel has the CPU's bits or stays far below its limit. No step waits for the GPU. A resumed run, and one with a killed
  rank, have the bits of an undisturbed one. LoRA of Llama-3.1-8B is 15 % faster than NeMo Automodel's published figure, Qwen3-0.6B
  2.3 times as fast as prime-rl's, which recomputes all blocks.
- **H200, 2026-11-27.** 24 types of text models and 7 of images train to the losses of transformers. Layers of other families take
  0.81 to 1.35 times the predicted time, and memory within 1.2 % of the plan, but for the recurrent layers of Qwen3.5 in PyTorch's
  operators: 3.4 times, because the host launches 25,600 kernels a step.
- **Mended since.** FSDP with parameter offload copied gradients to pageable memory (the 5.1 times); no GPU has measured it since.
  gpt-oss kept all scores; a step now takes 0.70 times as long and 0.76 times the memory. flash-linear-attention ended every start
  with an illegal memory access; starts no longer end so, but no figure has its kernels.
- **Not measured.** Several GPUs; accelerate and Trainer beside the launcher. Qwen3-Next in float32 has equal losses and gradients
  in the first step; in later ones AdamW amplifies rounding.
"""
TITLES = {
    "steps": (
        "A step of Llama-3.2-1B",
        "Two micro-batches of 2 x 4,096 tokens, bfloat16, AdamW in float32.",
    ),
    "widths": (
        "Layers of Llama-3.1-8B",
        "Eight layers with embedding and head, two micro-batches of 2 x 4,096 tokens.",
    ),
    "families": (
        "Layers of other families",
        "Of their published widths, with embedding and head; two micro-batches of 1 or 2 x 4,096 tokens.",
    ),
    "memory": (
        "Memory",
        "Llama-3.2-1B, eager, one micro-batch of 2 x 4,096 tokens; *held back*: two, with one "
        "reduction. The plan should be at most 2 % below and 5 % above the peak. The times are of "
        "two steps after the first.",
    ),
}
PARTS = {
    "forward": "forward",
    "backward": "backward",
    "recomputation": "again",
    "communication": "copies",
    "offload": "host",
    "optimizer": "optimizer",
}
"""Names of the parts of a step on one GPU: its communication is copies."""


def measured_figures() -> dict[str, dict[str, Any]]:
    """By GPU and part: date, machine and figures; empty if no GPU has measured anything."""
    found: dict[str, dict[str, Any]] = json.loads(MEASURED.read_text())
    return found


def add(measured: dict[str, dict[str, Any]], file: Path) -> None:
    """Adds the parts of a gpu.json, in place of those of an earlier run."""
    for name, part in json.loads(file.read_text())["parts"].items():
        machine = part["machine"]
        listed = find_gpu(machine["gpu"])
        gpu = machine["gpu"] if listed is None else listed.name
        key = gpu if machine["gpus"] == 1 else f"{gpu} x {machine['gpus']}"
        figures = [row for command in part["commands"] for row in command["figures"]]
        if not figures:  # it was interrupted
            continue
        kept = {"date": part["date"], "machine": machine, "status": part["status"]}
        measured.setdefault(key, {})[name] = kept | {"figures": figures}


def figure(measured: dict[str, Any], gpu: str, part: str, row: str, column: str) -> str:
    """A cell of a table that a GPU has measured; empty if it has not."""
    key = {"kernels": "what", "checkpoint": "what"}.get(part, "row")
    for cells in measured.get(gpu, {}).get(part, {}).get("figures", []):
        if cells.get(key) == row:
            return str(cells.get(column, ""))
    return ""


def table(header: str, rows: list[list[str]]) -> list[str]:
    """The lines of a Markdown table, with an empty one around it."""
    lines = ["", f"| {header} |", f"|---|{'---|' * header.count('|')}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def runs(measured: dict[str, Any]) -> list[str]:
    """The machines that have measured, with date and versions."""
    rows = [
        [
            name,
            gpu,
            part["status"],
            part["date"],
            machine["torch"],
            machine["transformers"],
            machine["commit"],
        ]
        for gpu, parts in measured.items()
        for name, part in parts.items()
        for machine in [part["machine"]]
    ]
    if not rows:
        return [
            "",
            "**No GPU has measured anything yet**, so the columns *measured* are empty.",
            "",
        ]
    return table("part | GPU | status | date | torch | transformers | commit", rows)


def goals(plans: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """The table of goals."""
    rows = []
    for row in GROUPS["goals"]:
        goal = row.goal
        assert goal is not None
        gpu = goal.gpu.upper()
        plan = plans[f"{gpu} x {goal.gpus}"][f"goals: {row.name}"]
        key = gpu if goal.gpus == 1 else f"{gpu} x {goal.gpus}"
        speed = plan["tokens_per_second"]
        if goal.mfu is not None:
            wanted, predicted, ratio = (
                f"{goal.mfu:.0%} MFU",
                f"{plan['mfu']:.1%}",
                plan["mfu"] / goal.mfu,
            )
            column = "MFU"
        else:
            assert goal.tokens_per_second is not None
            wanted = f"{goal.tokens_per_second:,.0f} tokens/s"
            predicted, ratio = f"{speed:,.0f}", speed / goal.tokens_per_second
            column = "tokens/s"
        predicted += "" if ratio >= 1 else f" ({ratio - 1:+.0%})"
        found = figure(measured, key, "goals", row.name, column)
        for same in GROUPS["steps"]:  # with more steps
            if (same.config, same.overrides) == (row.config, row.overrides):
                found = figure(measured, key, "steps", same.name, column) or found
        if column == "tokens/s" and found:
            found = f"{float(found):,.0f}"
        rows.append(
            [row.name, f"{goal.gpus} {gpu}", tokens(row), wanted, predicted, found, goal.why]
        )
    head = "model | GPUs | tokens | goal | by plan | measured | why this goal"
    return table(head, rows)


def tokens(row: Row) -> str:
    """Sequences of a micro-batch x length x micro-batches."""
    return f"{row.micro_batch_size} x {row.length:,} x {row.micro_batches}"


def group_table(group: str, plans: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Time, MFU and memory of the rows of a group that a GPU has measured, beside the plan."""
    rows = []
    for gpu in GPUS:
        for row in GROUPS[group]:
            plan = plans[f"{gpu} x 1"][f"{group}: {row.name}"]
            columns = ("ms", "MFU", "GiB", "reserved GiB", "retries", "waits")
            there = {name: figure(measured, gpu, group, row.name, name) for name in columns}
            if not any(there.values()):
                continue
            parts = {PARTS[name]: 1000 * seconds for name, seconds in plan["parts"].items()}
            time = [f"{1000 * plan['seconds']:.0f}", there["ms"]]
            mfu = [f"{plan['mfu']:.1%}" if "mfu" in plan else "", there["MFU"]]
            memory = [f"{plan['peak'] / 2**30:.2f}", there["GiB"], there["reserved GiB"]]
            memory.append(there["retries"])
            reasons = ", ".join(f"{name} {ms:.0f}" for name, ms in parts.items() if ms >= 0.5)
            if group == "memory":
                rows.append([gpu, row.name, *memory, *time])
            else:
                rows.append([gpu, row.name, *time, *mfu, *memory, there["waits"], reasons])
    memory_head = "GiB by plan | GiB | reserved GiB | retries"
    if group == "memory":
        return table(f"GPU | row | {memory_head} | ms by plan | ms", rows)
    head = f"GPU | row | ms by plan | ms | MFU by plan | MFU | {memory_head} | waits"
    return table(f"{head} | parts of the plan, ms", rows)


MODELS_COLUMNS = (
    "model",
    "variant",
    "attention",
    "loss, error",
    "gradient norm, error",
    "loss, autocast",
    "gradient norm, autocast",
    "holds",
)


@dataclass(frozen=True)
class Expected:
    """A figure other than those of steps, and why it is expected."""

    part: str
    row: str
    """Its name in the figures of the part."""
    column: str
    value: str
    why: str


def expectations(rates: Rates) -> list[Expected]:
    """Rates and costs that the predictions assume, or that follow from what the code does."""
    adamw = {name: 1e12 * STEP_BYTES[name] / rates.memory_bandwidth for name in ("float32", "int8")}
    return [
        Expected(
            "kernels",
            "products, TFLOP/s",
            "figure",
            f"{rates.half_flops / 1e12:.0f}",
            "0.70 of the data sheet; a single product is faster than many in a row",
        ),
        Expected(
            "kernels",
            "copies, TB/s read and written",
            "figure",
            f"{rates.memory_bandwidth / 1e12:.2f}",
            "0.88 of the data sheet",
        ),
        Expected(
            "kernels",
            "to the host, GB/s",
            "figure",
            f"{rates.host_bandwidth / 1e9:.0f}",
            "0.75 of PCIe 5 x16, from page-locked memory",
        ),
        Expected(
            "kernels",
            "AdamW in float32, fused",
            "ms for 10^9 numbers",
            f"{adamw['float32']:.1f}",
            "28 bytes a number",
        ),
        Expected(
            "kernels",
            "AdamW in int8",
            "ms for 10^9 numbers",
            f"{adamw['int8']:.1f}",
            "16 bytes a number, and the time of the noise",
        ),
        Expected(
            "checkpoint",
            "first_stall",
            "ms",
            "seconds",
            "the first save page-locks its buffer, which may hold up launches",
        ),
        Expected(
            "checkpoint",
            "second_stall",
            "ms",
            "milliseconds",
            "one copy on the device's copy engine",
        ),
    ]


def others(measured: dict[str, Any]) -> list[str]:
    """The table of the rates and costs that a GPU has measured."""
    rows = []
    for gpu in GPUS:
        rates = known_machine(gpu.lower(), nodes=1, gpus_per_node=1).rates
        for one in expectations(rates):
            found = figure(measured, gpu, one.part, one.row, one.column)
            if not found:
                continue
            unit = f", {one.column}" if one.column != "figure" else ""
            name = one.row.replace("_stall", " save, stall of training")
            rows.append([gpu, f"{name}{unit}", one.value, found, one.why])
    return table("GPU | figure | predicted | measured | reason", rows)


def comparisons(measured: dict[str, Any]) -> list[str]:
    """The launcher beside the loop written by hand, and errors of kernels."""
    lines = []
    for gpu in GPUS:
        parts = measured.get(gpu, {})
        figures = parts.get("compare", {}).get("figures", [])
        rows = [[gpu, row["mode"], row["measure"], row["raw"], row["launcher"]] for row in figures]
        if rows:
            lines += table("GPU | mode | measure | raw loop | launcher / raw loop", rows)
        figures = parts.get("kernels", {}).get("figures", [])
        rows = [
            [gpu, row["what"], row["error"], row["limit"], row["holds"]]
            for row in figures
            if row.get("error")
        ]
        if rows:
            lines += table("GPU | kernel | error | limit | holds", rows)
    return lines


def families(measured: dict[str, Any]) -> list[str]:
    """The table of small models of many families, compared with transformers."""
    rows = [
        [gpu, *(row[name] for name in MODELS_COLUMNS)]
        for gpu in GPUS
        for row in measured.get(gpu, {}).get("models", {}).get("figures", [])
    ]
    return table(f"GPU | {' | '.join(MODELS_COLUMNS)}", rows) if rows else []


def summary() -> list[str]:
    """The lines of the table for users."""
    plans, measured = json.loads(PLANS.read_text())["machines"], measured_figures()
    rows = []
    for gpu, group, name, model, trained in SUMMARY:
        found = {key: figure(measured, gpu, group, name, key) for key in ("tokens/s", "MFU", "GiB")}
        speed = f"{float(found['tokens/s']):,.0f}" if found["tokens/s"] else ""
        memory = f"{plans[f'{gpu} x 1'][f'{group}: {name}']['peak'] / 2**30:.1f}"
        memory += f" / {float(found['GiB']):.1f}" if found["GiB"] else ""
        rows.append([f"{model}, {trained}", gpu, speed, found["MFU"], memory])
    return table(SUMMARY_HEAD, rows)[1:-1]


def with_summary(text: str) -> str:
    """A page with the table for users in place of the one that it has."""
    head = re.escape(f"| {SUMMARY_HEAD} |")
    return re.sub(rf"(?m)^{head}\n(\|.*\n)+", lambda _: "\n".join(summary()) + "\n", text)


def page() -> str:
    """The text of the page with all figures."""
    predicted, measured = json.loads(PLANS.read_text()), measured_figures()
    made, plans = predicted["made"], predicted["machines"]
    lines = [HEAD, "## Goals", ""]
    lines += [
        "All rows are compiled, in bfloat16, with full rows; tokens/s are those of all GPUs. A share "
        "in brackets is how far the prediction is below the goal. Automodel's and prime-rl's figures "
        "and their settings are in [Speed](speed.md#predicted-and-published-speeds).",
        *goals(plans, measured),
    ]
    for group, (title, text) in TITLES.items():
        lines += [f"## {title}", "", text, *group_table(group, plans, measured)]
    lines += [
        "## Families against transformers",
        "",
        "Small models with random weights and packed rows, three steps of AdamW; relative differences "
        "to a plain loop in float32 over single documents with transformers' eager attention. "
        "*Autocast* is that loop in bfloat16. `benchmarks/gpu_models.py` has the limits.",
        *families(measured),
        "",
        "## Rates and costs",
        *others(measured),
        "Besides, these are expected: every error of `kernels` below its limit; no retried allocation and no wait for "
        "the GPU in a step; a step of the launcher at most 1.02 times one of the loop written by hand; a resumed run "
        "with the bits of an uninterrupted one.",
        *comparisons(measured),
        "",
        f"Predictions of {made['date']}, commit {made['commit']}, torch {made['torch']}, transformers "
        f"{made['transformers']}.",
    ]
    lines = [
        line if line.startswith("|") else textwrap.fill(line, 118, break_on_hyphens=False)
        for line in lines[1:]
    ]
    lines += ["", "## Machines", *runs(measured), FOUND]
    return "\n".join([HEAD, *lines]).rstrip().replace("\n\n\n", "\n\n") + "\n"


def main() -> None:
    """Adds the figures of the files and writes the page."""
    measured = measured_figures()
    for name in sys.argv[1:]:
        add(measured, Path(name))
    MEASURED.write_text(json.dumps(measured, indent=1) + "\n")
    PAGE.write_text(page(), encoding="utf-8")
    for file in SUMMARIES:
        file.write_text(with_summary(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
