"""Measures how the cost of a step grows with micro-batch, accumulation, tokens, layers and ranks.

    python benchmarks/growth.py --output growth.md --plot growth.svg

Runs the raw loop and the launcher in turn and varies one quantity at a time. Fits the exponent p of
cost ~ quantity ** p to the CPU time per step of all ranks. --plot requires matplotlib.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import MODES, SIZES, Bench, RunFailedError, describe_machine, publish

QUANTITIES: dict[str, Sequence[int]] = {
    "micro-batch": (1, 2, 4, 8),
    "accumulation": (1, 2, 4, 8),
    "tokens": (128, 256, 512, 1024),
    "layers": (2, 4, 8, 16),
    "ranks": (1, 2, 4),
}
SIDES = ("raw", "launcher")
Points = dict[tuple[str, str], list[float]]
"""CPU milliseconds per step for each value, by quantity and side."""


def bench_of(
    folder: Path, quantity: str, value: int, *, mode: str, steps: int
) -> tuple[Bench, str]:
    """A comparison in which one quantity has this value, and the name of its mode."""
    size = replace(SIZES["small"], micro_batch_size=1)
    accumulation, ranks, model = 1, 2, dict(size.model)
    if quantity == "micro-batch":
        size = replace(size, micro_batch_size=value)
    elif quantity == "tokens":
        size = replace(size, tokens=value)
        model["max_position_embeddings"] = value
    elif quantity == "layers":
        model["num_hidden_layers"] = value
    elif quantity == "accumulation":
        accumulation = value
    else:
        ranks = value
    name = f"{mode}, {accumulation} micro-batches"
    MODES[name] = replace(MODES[mode], accumulation=accumulation)
    return Bench(folder, replace(size, model=model), ranks, steps, limit=600), name


def exponent(values: Sequence[int], costs: Sequence[float]) -> float:
    """Least-squares slope of log(cost) over log(value)."""
    xs, ys = [math.log(value) for value in values], [math.log(cost) for cost in costs]
    return statistics.linear_regression(xs, ys).slope


def measure(quantity: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """CPU milliseconds per step for each value of a quantity, by side: medians over the rounds."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for value in QUANTITIES[quantity]:
        with tempfile.TemporaryDirectory() as folder:
            bench, name = bench_of(
                Path(folder), quantity, value, mode=arguments.mode, steps=arguments.steps
            )
            bench.prepare()
            costs: dict[str, list[float]] = {side: [] for side in SIDES}
            for _ in range(arguments.rounds):
                for side in SIDES:
                    cpu = bench.run(side, name).median("cpu_seconds", arguments.skip)
                    costs[side].append(1000 * cpu)
        for side in SIDES:
            found[side].append(statistics.median(costs[side]))
        text = ", ".join(f"{side} {found[side][-1]:.0f} ms" for side in SIDES)
        print(f"{quantity} {value}: {text}", file=sys.stderr, flush=True)
    return found


def table(results: Points) -> list[str]:
    """Markdown table with one row per quantity."""
    lines = [
        "| quantity | values | raw, CPU ms per step | launcher | launcher / raw | exponent, raw | launcher |",
        "|---|---|---|---|---|---:|---:|",
    ]
    for quantity in dict.fromkeys(quantity for quantity, _ in results):
        values = QUANTITIES[quantity]
        raw, launcher = (results[quantity, side] for side in SIDES)
        texts = [", ".join(f"{cost:.0f}" for cost in side) for side in (raw, launcher)]
        ratios = ", ".join(f"{b / a:.3f}" for a, b in zip(raw, launcher, strict=True))
        slopes = " | ".join(f"{exponent(values, side):.2f}" for side in (raw, launcher))
        shown = ", ".join(map(str, values))
        lines.append(f"| {quantity} | {shown} | {texts[0]} | {texts[1]} | {ratios} | {slopes} |")
    return lines


def plot(results: Points, file: Path) -> None:
    """Saves a plot with one panel per quantity and logarithmic axes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    quantities = list(dict.fromkeys(quantity for quantity, _ in results))
    figure, panels = pyplot.subplots(1, len(quantities), figsize=(3.2 * len(quantities), 3))
    for panel, quantity in zip(
        panels if len(quantities) > 1 else [panels], quantities, strict=True
    ):
        values = QUANTITIES[quantity]
        for side, style in zip(SIDES, ("o--", "s-"), strict=True):
            costs = results[quantity, side]
            label = f"{side}: exponent {exponent(values, costs):.2f}"
            panel.loglog(values, costs, style, label=label)
        panel.set_xticks(values, [str(value) for value in values])
        panel.minorticks_off()
        panel.set_xlabel(quantity)
        panel.legend(fontsize=7)
    figure.axes[0].set_ylabel("CPU ms per step, all ranks")
    figure.tight_layout()
    figure.savefig(file)


def main() -> int:
    """Runs the measurements and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quantities", nargs="+", choices=list(QUANTITIES), default=list(QUANTITIES)
    )
    parser.add_argument("--mode", choices=["ddp-fp32", "fsdp-fp32"], default="fsdp-fp32")
    parser.add_argument("--rounds", type=int, default=2, help="runs per side, in turn")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps per run")
    parser.add_argument("--skip", type=int, default=4, help="first steps that are not counted")
    parser.add_argument("--output", type=Path, help="file for the table")
    parser.add_argument("--plot", type=Path, help="SVG file for the plot")
    arguments = parser.parse_args()
    machine, failed = describe_machine(), []
    results: dict[tuple[str, str], Any] = {}
    for quantity in arguments.quantities:
        try:
            found = measure(quantity, arguments)
        except RunFailedError as error:
            print(error, file=sys.stderr)
            failed.append(quantity)
            continue
        results |= {(quantity, side): costs for side, costs in found.items()}
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores; torch {machine['torch']}, transformers "
        f"{machine['transformers']}; commit {machine['commit']}; {machine['date']}; {arguments.mode}, a Llama of 4 "
        f"layers, 1 micro-batch of 1 row of 256 tokens per rank, 2 ranks, unless stated otherwise; medians of "
        f"{arguments.rounds} runs of {arguments.steps} steps, the first {arguments.skip} not counted.",
        "",
        *table(results),
    ]
    lines += ["", f"Failed: {', '.join(failed)}."] if failed else []
    text = "\n".join(lines) + "\n"
    publish(text, arguments.output)
    if arguments.plot is not None and results:
        plot(results, arguments.plot)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
