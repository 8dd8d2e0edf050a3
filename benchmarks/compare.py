"""Compares the launcher with a hand-written loop and other libraries, on the same model and data.

    python benchmarks/compare.py --rounds 5 --steps 30 --output table.md --json numbers.json

Runs them in turn and prints the cost of each. README.md describes the measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import (
    MODES,
    ROOT,
    SIDES,
    SIZES,
    Bench,
    Measured,
    RunFailedError,
    describe_machine,
    flops_per_token,
    installed,
    publish,
    ratios,
    working_folder,
)


@dataclass
class Result:
    """The runs of a mode, by side."""

    runs: dict[str, list[Measured]] = field(default_factory=dict)
    same_weights: dict[str, Measured] = field(default_factory=dict)
    """By side, its run from the launcher's initial weights. For the launcher: its first run."""

    def loss_differences(self, side: str) -> list[float]:
        """Relative differences of the launcher's losses from a side's, for each step.

        Infinite if the launcher skipped the step or the other loss is 0, as it is on null GPUs.
        """
        both = zip(self.same_weights[side].lines, self.same_weights["launcher"].lines, strict=True)
        losses = [(other["loss"], launcher["loss"]) for other, launcher in both]
        return [math.inf if not a or b is None else abs(b - a) / abs(a) for a, b in losses]


def measurements(
    bench: Bench, name: str, *, skip: int, gpu: str | None
) -> dict[str, tuple[str, Callable[[Measured], float]]]:
    """For each measurement: its format and a function that computes it."""
    tokens = (
        bench.size.micro_batch_size * MODES[name].accumulation * bench.ranks * bench.size.tokens
    )

    def rate(run: Measured) -> float:
        return tokens / run.median("step_seconds", skip)

    def peak(run: Measured) -> float:
        # The launcher logs the peak since its previous line; the other loops, since the start
        return max(float(line["peak_memory_bytes"]) for line in run.lines) / 2**20

    found: dict[str, tuple[str, Callable[[Measured], float]]] = {
        "step time, ms": ("{:.1f}", lambda run: 1000 * run.median("step_seconds", skip)),
        "CPU time per step, ms": ("{:.1f}", lambda run: 1000 * run.median("cpu_seconds", skip)),
        "tokens/s": ("{:,.0f}", rate),
        "peak memory, MiB": ("{:,.0f}", peak),
        "start to end of step 1, s": ("{:.2f}", lambda run: run.seconds_to_first_step),
    }
    if gpu is not None:
        sys.path.insert(0, str(ROOT))
        from launcher.distributed.hardware import peak_flops  # standard library only

        peak_rate = peak_flops(gpu)
        if peak_rate is not None:
            share = flops_per_token(bench.size) / (peak_rate * bench.ranks)
            found["MFU"] = ("{:.1%}", lambda run: rate(run) * share)
    return found


def report(
    results: dict[str, Result],
    *,
    bench: Bench,
    size: str,
    sides: list[str],
    skip: int,
    machine: dict[str, Any],
    failed: list[str],
) -> str:
    """The whole report, as Markdown."""
    about = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    if machine["gpu"] is not None:
        about += f", {bench.ranks} of {machine['gpu']}"
    rounds = max((len(result.runs.get("raw", [])) for result in results.values()), default=0)
    model = bench.size.model
    lines = [
        f"{about}; Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}; "
        f"commit {machine['commit']}; {machine['date']}.",
        "",
        f"{size}: Llama, hidden {model['hidden_size']}, {model['num_hidden_layers']} layers, vocabulary {model['vocab_size']:,}; "
        f"{bench.size.tokens} tokens, micro-batch {bench.size.micro_batch_size}, 2 micro-batches a step (gathered: 4), "
        f"{bench.ranks} ranks; {rounds} rounds of {bench.steps} steps, the first {skip} not counted. Other columns: "
        "ratio to the raw loop in the same round, median (smallest – largest).",
        "",
        f"| mode | measure | {' | '.join(sides)} |",
        f"|---|---|{'---:|' * len(sides)}",
    ]
    for name, result in results.items():
        raw = result.runs.get("raw", [])
        for what, (text, number) in measurements(
            bench, name, skip=skip, gpu=machine["gpu"]
        ).items():
            values = {side: [number(run) for run in result.runs.get(side, [])] for side in sides}
            cells = [ratios(values[side], values["raw"]) for side in sides if side != "raw"]
            if raw:
                first = text.format(statistics.median(values["raw"]))
                lines.append(f"| {name} | {what} | {first} | {' | '.join(cells)} |")
    lines += losses(results, sides)
    waits = [
        f"{name} {statistics.median(shares):.2%} ({max(shares):.2%})"
        for name, result in results.items()
        if (
            shares := [
                line["data_seconds"] / line["step_seconds"]
                for run in result.runs.get("launcher", [])
                for line in run.lines[skip:]
            ]
        )
    ]
    if waits:
        lines += [
            "",
            f"Share of a step that the launcher waited for data, median (largest): {', '.join(waits)}.",
        ]
    if failed:
        lines += ["", f"Failed: {', '.join(failed)}."]
    return "\n".join(lines) + "\n"


def losses(results: dict[str, Result], sides: list[str]) -> list[str]:
    """Markdown lines that compare the launcher's losses with those of the other sides."""
    compared = {
        name: [side for side in sides if side in result.same_weights and side != "launcher"]
        for name, result in results.items()
        if "launcher" in result.same_weights
    }
    rows = [
        f"| {name} | {side} | {found[0]:.1e} | {max(found):.1e} |"
        for name, others in compared.items()
        for side in others
        if (found := results[name].loss_differences(side))
    ]
    if not rows:
        return []
    head = ["| mode | side | step 1 | largest of all steps |", "|---|---|---:|---:|"]
    return ["", "Launcher's losses against those of others, relative difference:", "", *head, *rows]


def as_json(results: dict[str, Result]) -> dict[str, Any]:
    """The metrics of every step of every run."""

    def plain(run: Measured) -> dict[str, Any]:
        return {"seconds_to_first_step": run.seconds_to_first_step, "steps": run.lines}

    return {
        name: {
            "runs": {side: [plain(run) for run in runs] for side, runs in result.runs.items()},
            "from_the_same_weights": {s: plain(run) for s, run in result.same_weights.items()},
        }
        for name, result in results.items()
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps per run")
    parser.add_argument(
        "--skip", type=int, default=5, help="first steps of a run that are not counted"
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs per side, in turn")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=list(MODES),
        metavar="MODE",
        help=f"some of: {', '.join(MODES)}",
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=SIDES[1:],
        default=["launcher"],
        help="sides to compare with the raw loop; accelerate, trainer and fabric double the time",
    )
    parser.add_argument(
        "--device-size", choices=list(SIZES), default="small", help="1b: for a machine with GPUs"
    )
    parser.add_argument("--limit", type=float, default=600, help="time limit per run in seconds")
    parser.add_argument(
        "--no-losses", action="store_true", help="skip the runs that compare the losses"
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="with --no-losses: skip the runs before the first round, which warm the file cache",
    )
    parser.add_argument("--output", type=Path, help="file for the table")
    parser.add_argument("--json", type=Path, help="file for the metrics of every step")
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder in which recipes, data and outputs are kept; default: they are removed",
    )
    arguments = parser.parse_args()
    if arguments.steps <= arguments.skip:
        parser.error(f"--steps {arguments.steps} leaves nothing after --skip {arguments.skip}")
    if arguments.cold and not arguments.no_losses:
        parser.error(
            "--cold: give --no-losses too; losses are compared in runs before the first round"
        )
    return arguments


def compare(
    name: str,
    result: Result,
    *,
    bench: Bench,
    sides: list[str],
    rounds: int,
    weights: Path | None,
    cold: bool = False,
) -> None:
    """Runs a mode on all sides, and adds the runs to `result`.

    Raises RunFailedError; the runs before the failure are kept.
    """
    sides = [side for side in sides if bench.can_run(side, name)]
    # The first run of a side warms the file cache, so its times are not compared
    for side in [] if cold else sides:
        if side != "launcher":  # initial_weights was its first run
            first = bench.run(side, name, weights)
            if weights is not None and not MODES[name].packed:  # packed: other documents per row
                result.same_weights[side] = first
    for turn in range(rounds):
        for side in sides:
            result.runs.setdefault(side, []).append(bench.run(side, name))
        if result.same_weights and "launcher" in sides:
            result.same_weights["launcher"] = result.runs["launcher"][0]
        seconds = {
            side: result.runs[side][-1].median("step_seconds", bench.steps // 3) for side in sides
        }
        times = ", ".join(f"{side} {1000 * value:.0f} ms" for side, value in seconds.items())
        print(f"{name}: round {turn + 1} of {rounds}: {times}", file=sys.stderr, flush=True)


def main() -> int:
    """Runs the comparison and returns the exit status."""
    arguments = parse_arguments()
    # Clean up after SIGTERM in the same way as after Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    size = SIZES[arguments.device_size]
    names = arguments.modes or list(size.modes)
    sides = ["raw", *installed(arguments.sides)]
    machine = describe_machine()
    results: dict[str, Result] = {}
    failed = [f"{side} (not installed)" for side in arguments.sides if side not in sides]
    with working_folder(arguments.keep) as folder:
        bench = Bench(folder, size, arguments.ranks, arguments.steps, arguments.limit)
        bench.prepare()
        weights = None
        try:
            if not arguments.cold:
                weights = bench.initial_weights(MODES[names[0]])
        except RunFailedError as error:
            print(error, file=sys.stderr)
            return 1
        for name in names:
            results[name] = Result()
            try:
                compare(
                    name,
                    results[name],
                    bench=bench,
                    sides=sides,
                    rounds=arguments.rounds,
                    weights=None if arguments.no_losses else weights,
                    cold=arguments.cold,
                )
            except RunFailedError as error:
                print(error, file=sys.stderr)
                failed.append(name)
            except (KeyboardInterrupt, SystemExit):  # report the runs that are complete
                failed.append(f"{name} and what follows it (interrupted)")
                break
    text = report(
        results,
        bench=bench,
        size=arguments.device_size,
        sides=sides,
        skip=arguments.skip,
        machine=machine,
        failed=failed,
    )
    publish(text, arguments.output)
    if arguments.json is not None:
        settings = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(arguments).items()
        }
        arguments.json.write_text(
            json.dumps({"machine": machine, "arguments": settings, "modes": as_json(results)})
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
