"""Plans what gpu_steps.py measures, without a GPU: memory and time of each row, for plans.json.

    make gpu-plans                                                        # for one H100 and one H200
    python benchmarks/gpu_plans.py --gpus a100 --ranks 8 --output plans.json

A machine lent for minutes should not spend them on plans. The file has the peak in bytes, the
seconds of a step with their parts, and the commit. Plans in the file that are not asked for are
kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench import describe_machine
from gpu_rows import GROUPS, Row, rows_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PLANS = Path(__file__).with_name("plans.json")
"""What is in the repository."""


def key(gpu: str, ranks: int) -> str:
    """The key of a machine in the file."""
    return f"{gpu} x {ranks}"


def planned(path: Path, gpu: str, ranks: int) -> dict[str, Any]:
    """The plans of a machine by `GROUP: ROW`; empty if the file has none."""
    plans: dict[str, Any] = json.loads(path.read_text())["machines"] if path.exists() else {}
    found: dict[str, Any] = plans.get(key(gpu, ranks), {})
    return found


def plan(row: Row, gpu: str, ranks: int) -> dict[str, Any]:
    """Peak, time and MFU of a row on one node, by plan."""
    from launcher.distributed.hardware import peak_flops
    from launcher.models.build import build_model
    from launcher.models.flops import token_flops
    from launcher.planner.machine import known_machine
    from launcher.planner.plan import make_plan
    from launcher.planner.profile import profile_model
    from launcher.planner.speed import estimate_time
    from launcher.planner.work import Work

    machine = known_machine(gpu, nodes=1, gpus_per_node=ranks)
    recipe = row.recipe(ranks)
    made = make_plan(recipe, machine)
    profile = profile_model(recipe, device=machine.device)
    times = estimate_time(Work(profile, recipe, ranks=machine.ranks), machine)
    speed = row.tokens(ranks) / times.total
    found = {
        "peak": made.step.peak.components.total,
        "needed": made.needed,
        "seconds": round(times.total, 5),
        "parts": {name: round(value, 5) for name, value in vars(times).items()},
        "tokens_per_second": round(speed, 1),
    }
    peak = peak_flops(machine.name)
    if recipe.lora is None and peak is not None:
        model = build_model(recipe.model, sequence_length=row.length, labels=None)
        flops = token_flops(model).at(row.length)
        found["mfu"] = round(speed * flops / peak / ranks, 4)
    return found


def main() -> int:
    """Adds the plans to the file."""
    from launcher.distributed.hardware import find_gpu

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", nargs="+", default=["h100", "h200"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--output", type=Path, default=PLANS)
    options = parser.parse_args()
    before = json.loads(options.output.read_text()) if options.output.exists() else {}
    machines: dict[str, Any] = before.get("machines", {})
    described = describe_machine()
    about = {name: described[name] for name in ("commit", "date", "torch", "transformers")}
    jobs = [
        (gpu, options.ranks, group, row)
        for gpu in options.gpus
        for group in options.groups
        if group != "goals"
        for row in rows_of(group, gpu=None, ranks=options.ranks)
    ]
    if "goals" in options.groups:  # each on its own machine
        goals = [(row, row.goal) for row in GROUPS["goals"] if row.goal is not None]
        jobs += [(goal.gpu, goal.gpus, "goals", row) for row, goal in goals]
    print("| machine | group | row | ms | GiB |\n|---|---|---|---|---|")
    for gpu, ranks, group, row in jobs:
        listed = find_gpu(gpu)
        name = key(listed.name if listed is not None else gpu, ranks)
        found = plan(row, gpu, ranks)
        machines.setdefault(name, {})[f"{group}: {row.name}"] = found
        ms, gib = 1000 * found["seconds"], found["peak"] / 2**30
        print(f"| {name} | {group} | {row.name} | {ms:.1f} | {gib:.2f} |", flush=True)
    new = options.output.with_suffix(".new")
    new.write_text(json.dumps({"made": about, "machines": machines}, indent=1) + "\n")
    new.replace(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
