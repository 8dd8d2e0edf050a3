"""Measures step time and CPU time with activation checkpointing, relative to a step without it.

    python benchmarks/checkpointing.py --rounds 3 --steps 16 --output checkpointing.md

Runs the launcher with each setting in turn, on the same model, data and strategy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from bench import MODES, SIZES, Bench, describe_machine, publish, ratios

SETTINGS: dict[str, dict[str, object] | None] = {
    "none": None,
    "selective, budget 0.75": {"mode": "selective", "budget": 0.75},
    "selective, budget 0.5": {"mode": "selective", "budget": 0.5},
    "selective": {"mode": "selective"},
    "selective, budget 0.25": {"mode": "selective", "budget": 0.25},
    "full": {"mode": "full"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--skip", type=int, default=4, help="first steps of a run that are not counted"
    )
    parser.add_argument("--mode", choices=list(MODES), default="fsdp-fp32")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    model = dict(SIZES["small"].model)
    model |= {
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.hidden * 11 // 4,
        "num_hidden_layers": arguments.layers,
        "max_position_embeddings": arguments.tokens,
    }
    size = replace(SIZES["small"], model=model, tokens=arguments.tokens)
    base = MODES[arguments.mode]
    for name, setting in SETTINGS.items():
        recipe = {**base.recipe, "activation_checkpointing": setting}
        MODES[name] = replace(base, recipe=recipe)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), size, 2, arguments.steps, limit=600)
        bench.prepare()
        for number in range(arguments.rounds):
            for name in SETTINGS:
                run = bench.run("launcher", name)
                peak = max(float(line["peak_memory_bytes"]) for line in run.lines)
                step, cpu = (
                    run.median(key, arguments.skip) for key in ("step_seconds", "cpu_seconds")
                )
                found[name].append((step, cpu, peak))
                print(f"{number + 1}: {name}: {step:.3f} s", file=sys.stderr, flush=True)
    machine = describe_machine()
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores; torch {machine['torch']}; commit "
        f"{machine['commit']}; {machine['date']}. {arguments.mode}, 2 ranks, {arguments.layers} "
        f"layers of {arguments.hidden}, {arguments.tokens} tokens; {arguments.rounds} rounds of "
        f"{arguments.steps} steps, the first {arguments.skip} not counted.",
        "",
        "| checkpointing | step time | CPU time | peak memory, MiB |",
        "|---|---|---|---:|",
    ]
    for name, runs in found.items():
        step_time, cpu_time = (
            ratios([run[k] for run in runs], [run[k] for run in found["none"]]) for k in (0, 1)
        )
        peak = statistics.median(run[2] for run in runs) / 2**20
        lines.append(f"| {name} | {step_time} | {cpu_time} | {peak:,.0f} |")
    publish("\n".join(lines) + "\n", arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
