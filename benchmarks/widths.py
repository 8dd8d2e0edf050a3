"""Trains layers of Llama-3.1-8B's widths with the launcher, and compares plan and measurement.

    python benchmarks/widths.py                                # all GPUs, one rank per GPU
    python benchmarks/widths.py --size small --steps 6 --configurations eager-full-packed

Prints a row of a Markdown table for each configuration: time and memory by plan and measured, MFU
(as in metrics.jsonl), the memory that the allocator reserved, and how often it retried an
allocation, for which it waits for the GPU. A configuration that fails has its reason in the row.
Exit status: 1 if one failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench import HERE, SIZES, Bench, Mode, RunFailedError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.cli.plan import detect_gpus
from launcher.planner.machine import Machine, known_machine
from launcher.planner.plan import make_plan
from launcher.planner.profile import profile_model
from launcher.planner.search import concrete
from launcher.planner.speed import estimate_time
from launcher.recipe.load import load_recipe

LAYERS = 8
CONFIGURATIONS = [
    "-".join(words)
    for words in itertools.product(
        ("eager", "compiled"), ("full", "selective"), ("packed", "padded")
    )
]
"""`eager` or `compiled` blocks, activation checkpointing, and rows of documents or of one each."""
COLUMNS = (
    "configuration | ms a step by plan | ms a step | tokens/s | MFU | peak GiB by plan | peak GiB "
    "| reserved GiB | retries | s to step 1"
)
SKIP = 4
"""First steps whose time does not count: they compile and allocate."""


@dataclass
class WidthsBench(Bench):
    """Runs of the launcher that report the allocator's counters."""

    def measure(self, configuration: str, machine: Machine) -> list[str]:
        """The cells of a configuration's row after its name. Raises RunFailedError."""
        blocks, checkpointing, rows = configuration.split("-")
        fsdp = {"kind": "fsdp", "mixed_precision": {"param_dtype": "bfloat16"}}
        checkpoint = {"mode": checkpointing}
        mode = Mode(
            "", {"strategy": fsdp, "activation_checkpointing": checkpoint}, bf16=True, packed=True
        )
        folder = self._new_folder(configuration)
        started = self._launcher(
            mode,
            folder,
            script=HERE / "launcher_cpu.py",
            run={"max_skipped_steps": 10**6},  # null GPUs compute no finite gradients
            model={"compile": blocks == "compiled", "attention": "auto"},
            data={"packing": rows == "packed"},
            checkpoint={"every_steps": None},
        )
        text = (folder / "run/metrics.jsonl").read_text()
        lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        file = folder / "memory.0"
        counters = json.loads(file.read_text()) if file.exists() else {}
        loaded = load_recipe([f"recipe={folder}/recipe.yaml"], ranks=self.ranks, files=False)
        recipe = concrete(loaded.recipe, machine)
        profile = profile_model(recipe, device=machine.device)
        planned = make_plan(recipe, machine).step.peak.components.total
        peak = max(line["peak_memory_bytes"] for line in lines)
        reserved = counters.get("reserved_bytes.all.current", 0)
        return [
            f"{1000 * estimate_time(profile, recipe, machine).total:.0f}",
            median(lines, "step_seconds", "{:.0f}", 1000),
            median(lines, "tokens_per_second", "{:,.0f}"),
            median(lines, "mfu", "{:.1%}"),
            f"{planned / 2**30:.2f}",
            f"{peak / 2**30:.2f}",
            f"{reserved / 2**30:.2f}",
            str(counters.get("num_alloc_retries", "")),
            f"{lines[0]['time'] - started:.1f}",
        ]


def median(lines: list[dict[str, Any]], key: str, text: str, factor: float = 1) -> str:
    """The median of a metric over the steps that count; empty if it is not known."""
    values = [factor * line[key] for line in lines if line["step"] > SKIP and line.get(key)]
    return text.format(statistics.median(values)) if values else ""


def main() -> int:
    """Prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="8b", help="the widths")
    parser.add_argument(
        "--configurations", nargs="+", choices=CONFIGURATIONS, default=CONFIGURATIONS
    )
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=150, help="time limit per run in seconds")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    layers = min(LAYERS, size.model["num_hidden_layers"])
    size = replace(size, model=size.model | {"num_hidden_layers": layers}, micro_batch_size=2)
    name, memory, _ = detect_gpus() or ("cpu", None, 0)
    machine = known_machine(
        name,
        nodes=1,
        gpus_per_node=arguments.ranks,
        memory=memory,
        host_memory=None,
        overrides=None,
    )
    failed = False
    print(f"| {COLUMNS} |\n|---|{'---:|' * COLUMNS.count('|')}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = WidthsBench(Path(folder), size, arguments.ranks, arguments.steps, arguments.limit)
        bench.prepare()
        for configuration in arguments.configurations:
            try:
                cells = bench.measure(configuration, machine)
            except RunFailedError as error:
                print(error, file=sys.stderr)
                failed = True
                reason = "out of memory" if "out of memory" in str(error) else "failed: see the log"
                cells = ["", reason, *[""] * 7]
            print(f"| {configuration} | {' | '.join(cells)} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
