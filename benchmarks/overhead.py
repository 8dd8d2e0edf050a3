"""Compares the host's CPU time per step of the launcher, a raw loop and other libraries.

    python benchmarks/overhead.py --sizes 1b 8b --rounds 5 --output table.md

Runs on GPUs, or without GPUs on the devices of tests/nullgpu. Their kernels do nothing, so a step
consists only of the host's work, which is the limit for small micro-batches on fast GPUs. Requires
PyTorch's CUDA build (`make test-cuda` installs one).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from bench import (
    HERE,
    LAUNCHER,
    MODES,
    ROOT,
    SIDES,
    SIZES,
    Bench,
    RunFailedError,
    describe_machine,
    gpu_name,
    installed,
    publish,
    ratios,
)

STRATEGIES = ("ddp", "fsdp")


@dataclass
class OverheadBench(Bench):
    """Measures the launcher's CPU time in each process.

    On null GPUs the launcher's metrics have no values, because no step has finite gradients.
    """

    def cpu_milliseconds(self, side: str, strategy: str, skip: int) -> float:
        """CPU milliseconds per step of all ranks: the median over the steps after `skip`."""
        mode = f"{strategy}-bf16"
        if side not in LAUNCHER:
            return 1000 * self.run(side, mode).median("cpu_seconds", skip)
        folder = self._new_folder(f"{mode}-{side}")
        self._launcher(
            MODES[mode],
            folder,
            script=HERE / "launcher_cpu.py",
            run={"max_skipped_steps": 10**6},
            model={"chunked_loss": side == "launcher"},
            checkpoint={"every_steps": None},
        )
        ranks = [json.loads((folder / f"cpu.{rank}").read_text()) for rank in range(self.ranks)]
        milliseconds: float = 1000 * statistics.median(
            [sum(step) for step in zip(*ranks, strict=True)][skip:]
        )
        return milliseconds


def use_null_gpus(folder: Path, ranks: int) -> None:
    """Sets the environment of all runs to null GPUs with memory for every size and strategy."""
    sys.path.insert(0, str(ROOT))
    from tests.nullgpu.devices import null_gpus

    devices = null_gpus(folder, build_folder=ROOT / "build/nullgpu", count=ranks, gib=512)
    os.environ.update(
        {name: value for name, value in devices.variables.items() if name != "NULLGPU_LOG"}
    )


def table(results: dict[tuple[str, str, str], list[float]]) -> list[str]:
    """Markdown table with one row per size, strategy and side."""
    lines = [
        "| size | strategy | side | CPU ms a step, all ranks | / raw, median of rounds (all) |",
        "|---|---|---|---:|---:|",
    ]
    for (size, strategy, side), values in results.items():
        if values:
            ratio = ratios(values, results[size, strategy, "raw"])
            lines.append(
                f"| {size} | {strategy} | {side} | {statistics.median(values):.1f} | {ratio} |"
            )
    return lines


def measure(
    size: str,
    folder: Path,
    sides: list[str],
    arguments: argparse.Namespace,
    results: dict[tuple[str, str, str], list[float]],
) -> list[str]:
    """Adds the measurements of a size to the results; returns the names of the failed runs."""
    shape = replace(SIZES[size], micro_batch_size=1)
    bench = OverheadBench(folder, shape, arguments.ranks, arguments.steps, arguments.limit)
    bench.prepare()
    failed = []
    for strategy, turn, side in itertools.product(
        arguments.strategies, range(arguments.rounds + 1), sides
    ):
        name, found = f"{size} {strategy} {side}", results.setdefault((size, strategy, side), [])
        try:
            milliseconds = bench.cpu_milliseconds(side, strategy, arguments.skip)
        except RunFailedError as error:
            print(error, file=sys.stderr)
            failed.append(name)
            continue
        print(f"{name}: {milliseconds:.1f} ms", file=sys.stderr, flush=True)
        if turn:  # the first round warms the file cache and is not counted
            found.append(milliseconds)
    return failed


def main() -> int:
    """Runs the measurements and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1b", "8b"])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--sides", nargs="+", choices=SIDES[1:], default=list(SIDES[1:]))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="runs per side, in turn")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps per run")
    parser.add_argument(
        "--skip", type=int, default=10, help="first steps of a run that are not counted"
    )
    parser.add_argument("--limit", type=float, default=300, help="time limit per run in seconds")
    parser.add_argument("--output", type=Path, help="file for the table")
    arguments = parser.parse_args()
    sides = ["raw", *installed(arguments.sides)]
    missing = [side for side in arguments.sides if side not in sides]
    machine = describe_machine()
    results: dict[tuple[str, str, str], list[float]] = {}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        if gpu_name() is None:
            use_null_gpus(Path(folder), arguments.ranks)
        try:
            for size in arguments.sizes:
                path = Path(folder, size)
                path.mkdir()
                failed += measure(size, path, sides, arguments, results)
        except KeyboardInterrupt:  # report the runs that are complete
            failed.append("what follows it (interrupted)")
    gpus = machine["gpu"] or "null GPUs (no kernels)"
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores; {arguments.ranks} x {gpus}; torch {machine['torch']}, "
        f"transformers {machine['transformers']}; commit {machine['commit']}; {machine['date']}; "
        f"{arguments.rounds} rounds of {arguments.steps} steps, the first {arguments.skip} not counted.",
        "",
        *table(results),
    ]
    lines += [f"\nNot installed: {', '.join(missing)}."] if missing else []
    lines += [f"\nFailed: {', '.join(sorted(set(failed)))}."] if failed else []
    text = "\n".join(lines) + "\n"
    publish(text, arguments.output)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
