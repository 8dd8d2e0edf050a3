"""What the host pays to launch a step: processor time of the launcher, of a raw loop and of other libraries.

    python benchmarks/overhead.py --sizes 1b 8b --rounds 5 --output table.md

Runs on GPUs, or without them on the devices of tests/nullgpu, whose kernels do nothing: what is left of a step is the work
of the host, which limits small micro-batches on fast GPUs. It needs PyTorch's CUDA build (`make test-cuda` installs one).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from compare import HERE, MODES, ROOT, SIZES, Bench, RunFailedError, describe_machine, gpu_name, run

STRATEGIES = ("ddp", "fsdp")
PEERS = {"accelerate": "accelerate", "trainer": "transformers", "fabric": "lightning_fabric"}
"""A loop of peers.py, and the package that it needs."""


@dataclass
class OverheadBench(Bench):
    """A comparison that other libraries take part in."""

    def cpu_milliseconds(self, side: str, strategy: str, skip: int) -> float:
        """Of all ranks, the median over the steps but the first `skip` of one run."""
        if side == "raw":
            steps = [float(line["cpu_seconds"]) for line in self.raw(f"{strategy}-bf16").lines]
        elif side == "launcher":
            steps = self._launcher_steps(strategy)
        else:
            steps = self._peer(side, strategy)
        return 1000 * statistics.median(steps[skip:])

    def _launcher_steps(self, strategy: str) -> list[float]:
        """Measured in each process, since on null GPUs the launcher's own record has no values, and no step is finite."""
        folder = self._next(f"{strategy}-launcher")
        self._launcher(
            MODES[f"{strategy}-bf16"],
            folder,
            script=HERE / "launcher_cpu.py",
            run={"max_skipped_steps": 10**6},
            checkpoint={"every_steps": None},
        )
        return self._sum_of_ranks(folder / "cpu", "launcher")

    def _peer(self, library: str, strategy: str) -> list[float]:
        folder = self._next(f"{strategy}-{library}")
        metrics = folder / "cpu"
        options: dict[str, object] = {
            "library": library,
            "strategy": strategy,
            "config": self.folder / "config.json",
            "data": self.folder / "rows.npy",
            "metrics": metrics,
            "steps": self.steps,
            "micro-batch-size": self.size.micro_batch_size,
            "accumulation": MODES[f"{strategy}-bf16"].accumulation,
            "learning-rate": self.learning_rate,
            "warmup-steps": self.warmup_steps,
        }
        given = [part for key, value in options.items() for part in (f"--{key}", value)]
        run(self._torchrun(HERE / "peers.py", *given), log=folder / "output.txt", limit=self.limit)
        return self._sum_of_ranks(metrics, library)

    def _sum_of_ranks(self, metrics: Path, side: str) -> list[float]:
        ranks = [json.loads(Path(f"{metrics}.{rank}").read_text()) for rank in range(self.ranks)]
        if any(len(steps) < self.steps for steps in ranks):
            raise RunFailedError(f"{side}: fewer than {self.steps} steps were measured")
        return [sum(step) for step in zip(*ranks, strict=True)]


def use_null_gpus(folder: Path, ranks: int) -> None:
    """Devices with memory for every size and strategy, in the environment of all runs."""
    sys.path.insert(0, str(ROOT))
    from tests.nullgpu.devices import null_gpus

    devices = null_gpus(folder, build_folder=ROOT / "build/nullgpu", count=ranks, gib=512)
    os.environ.update(
        {name: value for name, value in devices.variables.items() if name != "NULLGPU_LOG"}
    )


def table(results: dict[tuple[str, str, str], list[float]]) -> list[str]:
    """Markdown: a line for each size, strategy and side."""
    lines = [
        "| size | strategy | side | CPU ms a step, both ranks | / raw, median of rounds | all rounds |",
        "|---|---|---|---:|---:|---:|",
    ]
    for (size, strategy, side), values in results.items():
        raw = results[size, strategy, "raw"]
        ratios = [value / other for value, other in zip(values, raw, strict=False)]
        if ratios:
            span = f"{min(ratios):.3f} – {max(ratios):.3f}"
            middle = (
                f"{statistics.median(values):.1f} | **{statistics.median(ratios):.3f}** | {span}"
            )
            lines.append(f"| {size} | {strategy} | {side} | {middle} |")
    return lines


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1b", "8b"])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument(
        "--sides", nargs="+", choices=["launcher", *PEERS], default=["launcher", *PEERS]
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side, in turn")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of a run")
    parser.add_argument(
        "--skip", type=int, default=10, help="first steps of a run that are not counted"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds that one run may take")
    parser.add_argument("--output", type=Path, help="file for the table")
    arguments = parser.parse_args()
    missing = [
        side
        for side in arguments.sides
        if side in PEERS and importlib.util.find_spec(PEERS[side]) is None
    ]
    sides = ["raw", *(side for side in arguments.sides if side not in missing)]
    machine = describe_machine()
    results: dict[tuple[str, str, str], list[float]] = {}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        if gpu_name() is None:
            use_null_gpus(Path(folder), arguments.ranks)
        for size in arguments.sizes:
            path = Path(folder, size)
            path.mkdir()
            bench = OverheadBench(
                path, SIZES[size], arguments.ranks, arguments.steps, arguments.limit
            )
            bench.prepare()
            for strategy in arguments.strategies:
                for turn in range(
                    arguments.rounds + 1
                ):  # the first round warms the file cache and is not counted
                    for side in sides:
                        found = results.setdefault((size, strategy, side), [])
                        try:
                            milliseconds = bench.cpu_milliseconds(side, strategy, arguments.skip)
                        except RunFailedError as error:
                            print(error, file=sys.stderr)
                            failed.append(f"{size} {strategy} {side}")
                            continue
                        print(
                            f"{size} {strategy} {side}: {milliseconds:.1f} ms",
                            file=sys.stderr,
                            flush=True,
                        )
                        if turn:
                            found.append(milliseconds)
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
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
