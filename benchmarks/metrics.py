"""Measures the cost of metrics: runs with all sinks and a record per step against minimal logging.

    python benchmarks/metrics.py --rounds 5 --steps 200 --output table.md [overrides]

Runs both in turn and prints the ratio (on / off) of tokens/s and of CPU time per step: the median,
smallest and largest of the rounds. By default it uses the recipe `quickstart` with two ranks on
CPUs. The first 50 steps are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import ROOT, publish, torchrun

SKIPPED, EVERY = 50, 50
SIDES = {
    "off": [f"logging.every_steps={EVERY}"],
    "on": ["logging.every_steps=1", "logging.tensorboard=true", "logging.wandb={project: cost, mode: offline}"],
}  # fmt: skip


def measure(folder: Path, side: str, options: argparse.Namespace) -> tuple[float, float]:
    """Runs one side; returns tokens/s and CPU seconds per step."""
    steps = options.steps + SKIPPED
    words = [ROOT / "launcher/train.py", f"recipe={options.recipe}", f"run.dir={folder}"]
    words += [f"run.max_steps={steps}", "checkpoint={every_steps: null, export: null}"]
    words += ["evaluation.max_batches=1", *SIDES[side], *options.overrides]
    command = torchrun(options.ranks, *words)
    subprocess.run(command, check=True, capture_output=True, timeout=options.limit)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] > SKIPPED and "loss" in line]
    tokens_per_step = lines[-1]["tokens_per_second"] * lines[-1]["step_seconds"]
    seconds, cpu = (
        statistics.mean(line[key] for line in lines) for key in ("step_seconds", "cpu_seconds")
    )
    return tokens_per_step / seconds, cpu


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help=f"a multiple of {EVERY}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=600, help="time limit per run in seconds")
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", default=["run.device=cpu"])
    options = parser.parse_args()
    rounds = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            order = list(SIDES) if number % 2 else list(SIDES)[::-1]
            found = {side: measure(Path(folder) / side, side, options) for side in order}
        rounds.append(tuple(on / off for on, off in zip(found["on"], found["off"], strict=True)))
        print(f"round {number + 1}: {found}", file=sys.stderr)
    lines = ["| on / off | median | smallest | largest |", "|---|---|---|---|"]
    for name, ratios in zip(
        ("tokens/s", "CPU time per step"), zip(*rounds, strict=True), strict=True
    ):
        lines.append(
            f"| {name} | {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |"
        )
    table = "\n".join(lines) + "\n"
    publish(table, options.output)


if __name__ == "__main__":
    main()
