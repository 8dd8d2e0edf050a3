"""Draws docs/memory.svg: planned memory of a GPU under each strategy.

    python docs/memory_chart.py

The model has the shape of Llama-3.1-8B: one sequence of 4,096 tokens on each of 8 GPUs of 80 GB.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from shapes import LLAMA_8B

from launcher.planner.machine import known_machine
from launcher.planner.plan import make_plan
from launcher.recipe.load import load_recipe

SIZES = ["data.sequence_length=4096", "batch.global_batch_size=8", "batch.micro_batch_size=1"]
FULL = "activation_checkpointing={mode: full}"
STRATEGIES = {
    "ddp: whole model on each GPU": ["recipe=ddp"],
    "fsdp: sharded over 8 GPUs": ["recipe=fsdp"],
    "fsdp with full activation checkpointing": ["recipe=fsdp", FULL],
    "fsdp_offload: shards in host memory, full checkpointing": ["recipe=fsdp_offload"],
}
"""The rows of the chart, and the recipe of each."""
PARTS = {
    "weights": (("parameters", "gathered"), "#3b6fb6"),
    "gradients": (("gradients",), "#e08a2e"),
    "optimizer state": (("optimizer",), "#8a5fb5"),
    "activations": (("activations", "logits"), "#3f9e5f"),
    "buffers, driver and margin": (("communication", "temporary", "outside"), "#8b929b"),
}
"""The parts of the chart: for each, the components of the plan and the color."""
WIDTH, LEFT, SCALE, ROW = 480, 14, 2.6, 56  # pixels; SCALE: per GiB


def planned(strategy: str) -> tuple[dict[str, float], float]:
    """GiB of each part at the peak, and the memory of the GPU in GiB."""
    config = [f"model.config.{key}={json.dumps(value)}" for key, value in LLAMA_8B.items()]
    recipe = load_recipe([*STRATEGIES[strategy], *config, *SIZES], ranks=8, files=False).recipe
    machine = known_machine(
        "h100", nodes=1, gpus_per_node=8, memory=None, host_memory=None, overrides=None
    )
    plan = make_plan(recipe, machine)
    sizes = vars(plan.step.peak.components) | {"outside": plan.context + plan.margin}
    assert machine.memory is not None
    parts = {part: sum(sizes[key] for key in keys) / 2**30 for part, (keys, _) in PARTS.items()}
    return parts, machine.memory / 2**30


def text(x: float, y: float, words: str, *, style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{words}</text>'


def draw(plans: dict[str, tuple[dict[str, float], float]]) -> Sequence[str]:
    """The lines of the SVG. The background is light, so that the text is readable on dark pages."""
    small, bold = 'font-size="12" fill="#57606a"', 'font-weight="600"'
    right = f'text-anchor="end" {bold}'
    height = 150 + ROW * len(plans)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#1f2328">',
        "<title>Memory of one GPU under each strategy</title>",
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="8" fill="#ffffff" '
        'stroke="#d0d7de"/>',
        text(LEFT, 24, "Peak memory of one of 8 GPUs, Llama-3.1-8B", style=bold),
        text(LEFT, 42, "AdamW, bfloat16, one sequence of 4,096 tokens on each GPU", style=small),
    ]
    x, y = LEFT, 56
    for part, (_, color) in PARTS.items():
        if part == "activations":  # two lines of keys
            x, y = LEFT, 74
        lines.append(f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{color}"/>')
        lines.append(text(x + 17, y + 11, part, style='font-size="12"'))
        x += 130
    for row, (strategy, (parts, memory)) in enumerate(plans.items()):
        y, x, total = 116 + ROW * row, float(LEFT), sum(parts.values())
        lines.append(text(LEFT, y - 6, strategy, style='font-size="13"'))
        for part, size in parts.items():
            fill = PARTS[part][1]
            width = size * SCALE
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill="{fill}">'
                f"<title>{part}: {size:.1f} GiB</title></rect>"
            )
            x += width
        fits = "fits" if total <= memory else "does not fit"
        lines.append(text(WIDTH - LEFT, y - 6, f"{total:.0f} GiB: {fits}", style=right))
        edge, bottom = LEFT + SCALE * memory, 100 + ROW * len(plans)
        lines.append(
            f'<line x1="{edge:.0f}" y1="{y - 2}" x2="{edge:.0f}" y2="{y + 26}" stroke="#c0392b" '
            'stroke-width="2"/>'
        )
    lines += [
        text(
            edge - 6,
            bottom,
            f"red line, a GPU of 80 GB: {memory:.1f} GiB",
            style='font-size="12" fill="#c0392b"',
        ),
        text(
            LEFT,
            height - 30,
            "Predicted by launcher plan. On one H100, plans of 13 other",
            style=small,
        ),
        text(
            LEFT,
            height - 14,
            "configurations were within 0.1 % of the measured peak.",
            style=small,
        ),
        "</svg>",
    ]
    return lines


def main() -> None:
    file = Path(__file__).with_name("memory.svg")
    lines = draw({strategy: planned(strategy) for strategy in STRATEGIES})
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main()
