"""Runs the launcher and a hand-written loop in turn, on the same model, data and learning rates, and prints what each costs.

    python benchmarks/compare.py --pairs 5 --steps 30 --output table.md --json numbers.json

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TRAIN = ROOT / "launcher" / "train.py"
MARK = "LAUNCHER_BENCHMARK"
"""An environment variable that all processes of a run inherit, also those that leave its process group. A run inside
another one adds its mark to the other's."""


@dataclass(frozen=True)
class Mode:
    """A way to train, for both sides."""

    loop: str
    """The hand-written one."""
    recipe: dict[str, Any]
    """What the launcher's recipe says beside what all modes share."""
    bf16: bool = False
    flags: tuple[str, ...] = ()
    """Of the hand-written loop."""
    accumulation: int = 2
    """Micro-batches a step."""
    packed: bool = False
    """Rows hold several documents: kept apart by the launcher's attention on one side, by transformers' mask on the other."""


_BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
_CHECKPOINTING = {"mode": "full", "every_n_blocks": 1}


def _fsdp(mixed_precision: dict[str, str] | None, **more: Any) -> dict[str, Any]:
    return {"kind": "fsdp", "mixed_precision": mixed_precision, **more}


def _offload(mixed_precision: dict[str, str] | None) -> dict[str, Any]:
    strategy = _fsdp(mixed_precision, cpu_offload={"pin_memory": True})
    return {"strategy": strategy, "activation_checkpointing": _CHECKPOINTING}


MODES = {
    "ddp-fp32": Mode("raw_ddp.py", {"strategy": {"kind": "ddp", "mixed_precision": None}}),
    "ddp-bf16": Mode(
        "raw_ddp.py",
        {"strategy": {"kind": "ddp", "mixed_precision": {"param_dtype": "bfloat16"}}},
        bf16=True,
    ),
    "fsdp-fp32": Mode("raw_fsdp.py", {"strategy": _fsdp(None)}),
    "fsdp-bf16": Mode("raw_fsdp.py", {"strategy": _fsdp(_BF16)}, bf16=True),
    "fsdp-bf16-gathered": Mode(
        "raw_fsdp.py",
        {"strategy": _fsdp(_BF16, reshard_after_forward=True, reshard_after_backward=False)},
        bf16=True,
        flags=("--keep-gathered",),
        accumulation=4,
    ),
    "ddp-fp32-packed": Mode(
        "raw_ddp.py", {"strategy": {"kind": "ddp", "mixed_precision": None}}, packed=True
    ),
    "fsdp-bf16-packed": Mode("raw_fsdp.py", {"strategy": _fsdp(_BF16)}, bf16=True, packed=True),
    "offload-fp32": Mode("raw_fsdp_offload.py", _offload(None)),
    "offload-bf16": Mode("raw_fsdp_offload.py", _offload(_BF16), bf16=True),
}


@dataclass(frozen=True)
class Size:
    """A model and what it is fed."""

    model: dict[str, Any]
    """Fields of LlamaConfig."""
    tokens: int
    """Of a row."""
    micro_batch_size: int
    rows: int
    modes: tuple[str, ...]
    """Those that make sense with it."""


SIZES = {
    # A step of 0.2 to 0.6 s on two cores: where one takes milliseconds, only noise is measured
    "small": Size(
        model={
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        },
        tokens=256,
        micro_batch_size=2,
        rows=256,
        modes=tuple(MODES),
    ),
    # The shape of Llama-3.2-1B
    "1b": Size(
        model={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        tokens=4096,
        micro_batch_size=4,
        rows=128,
        modes=("ddp-bf16", "fsdp-bf16", "fsdp-bf16-gathered", "fsdp-bf16-packed", "offload-bf16"),
    ),
    # The shape of Llama-3.1-8B
    "8b": Size(
        model={
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
        tokens=4096,
        micro_batch_size=1,
        rows=128,
        modes=("fsdp-bf16", "fsdp-bf16-gathered", "fsdp-bf16-packed", "offload-bf16"),
    ),
}


class RunFailedError(Exception):
    """A process ended badly or not in time; the message holds the end of what it printed."""


def marked_processes(mark: str) -> list[int]:
    """Ids of the living processes whose environment has the mark, orphans too."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if any(v.startswith(f"{MARK}=".encode()) and mark.encode() in v for v in variables):
                    found.append(int(folder.name))
    return found


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines()


def exit_status(command: list[str], *, log: Path, limit: float, grace: float = 0) -> int | None:
    """Runs a command to its end and leaves none of its processes behind; returns its exit status.

    None: it took longer than `limit` seconds. It was interrupted (SIGINT), and killed where it
    had not ended `grace` seconds later.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: os.environ.get(MARK, "") + mark}
    # The launcher sets this one itself, and it makes memory on GPUs go further
    environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Where it is set, Python compiles the launcher's source at each start, which no installation does
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            if grace:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
            return None
        finally:
            while left := marked_processes(mark):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)


def run(command: list[str], *, log: Path, limit: float) -> float:
    """Runs a command to its end and leaves none of its processes behind; returns the time it was started at.

    Raises RunFailedError where it takes longer than `limit` seconds or ends with a status other than 0.
    """
    started = time.time()
    status = exit_status(command, log=log, limit=limit)
    if status != 0:
        what = (
            f"took longer than {limit:.0f} s" if status is None else f"ended with status {status}"
        )
        # Ranks of the launcher print into logs of their own
        logs = [log, *sorted(log.parent.glob("run/log/rank_*.log"))]
        ends = [
            f"the end of {file.relative_to(log.parent)}:\n" + "\n".join(_lines(file)[-30:])
            for file in logs
        ]
        raise RunFailedError("\n".join([" ".join(command), what, *ends]))
    return started


@dataclass
class Measured:
    """What one run wrote, a line a step."""

    lines: list[dict[str, Any]]
    seconds_to_first_step: float

    def median(self, key: str, skip: int) -> float:
        """Over the steps after the first `skip`."""
        return statistics.median(float(line[key]) for line in self.lines[skip:])


@dataclass
class Bench:
    """One comparison: where it writes, and what all of its runs share."""

    folder: Path
    size: Size
    ranks: int
    steps: int
    limit: float
    learning_rate: float = 1e-3
    warmup_steps: int = 5
    count: int = 0

    def prepare(self) -> None:
        """Writes the data for both sides: random rows, all full."""
        rows = np.random.default_rng(0).integers(
            0, self.size.model["vocab_size"], (self.size.rows, self.size.tokens), dtype=np.int32
        )
        np.save(self.folder / "rows.npy", rows)
        with (self.folder / "rows.jsonl").open("w") as file:
            file.writelines(json.dumps({"input_ids": row.tolist()}) + "\n" for row in rows)
        # The same rows as documents of many lengths, which fill them again
        chance = np.random.default_rng(1)
        places = np.zeros_like(rows)
        with (self.folder / "documents.jsonl").open("w") as file:
            for row, place in zip(rows, places, strict=True):
                cuts = np.sort(
                    chance.choice(
                        np.arange(1, len(row)), size=int(chance.integers(1, 6)), replace=False
                    )
                )
                for document in np.split(row, cuts):
                    file.write(json.dumps({"input_ids": document.tolist()}) + "\n")
                place[:] = np.concatenate([np.arange(len(part)) for part in np.split(row, cuts)])
        np.save(self.folder / "positions.npy", places)
        (self.folder / "config.json").write_text(json.dumps(self.size.model))

    def _next(self, name: str) -> Path:
        self.count += 1
        folder = self.folder / f"{self.count:03}-{name}"
        folder.mkdir()
        return folder

    def _torchrun(self, *arguments: object) -> list[str]:
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            self.ranks,
        ]
        return [str(argument) for argument in (*start, *arguments)]

    def _measured(self, file: Path, started: float) -> Measured:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        if len(lines) != self.steps:
            raise RunFailedError(f"{file}: {len(lines)} lines for {self.steps} steps")
        return Measured(lines, lines[0]["time"] - started)

    def _launcher(
        self, mode: Mode, folder: Path, script: Path = TRAIN, **changes: dict[str, Any]
    ) -> float:
        recipe: dict[str, Any] = {
            "run": {"name": "benchmark", "dir": str(folder / "run"), "max_steps": self.steps},
            "model": {"config": {"model_type": "llama", **self.size.model}, "attention": "sdpa"},
            "data": {
                "kind": "tokens",
                "train": [str(self.folder / ("documents.jsonl" if mode.packed else "rows.jsonl"))],
                "sequence_length": self.size.tokens,
                "packing": True,
                "shuffle": False,
                "workers": 0,
                "cache": str(self.folder / "cache"),
            },
            "batch": {
                "global_batch_size": self.size.micro_batch_size * mode.accumulation * self.ranks,
                "micro_batch_size": self.size.micro_batch_size,
            },
            "optimizer": {"learning_rate": self.learning_rate},
            "schedule": {"kind": "cosine", "warmup_steps": self.warmup_steps, "min_ratio": 0.1},
            "evaluation": {"every_steps": None},
            "checkpoint": {"export": None},
            **mode.recipe,
        }
        for section, keys in changes.items():
            recipe[section] = {**recipe[section], **keys}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        command = self._torchrun(script, f"recipe={folder / 'recipe.yaml'}")
        return run(command, log=folder / "output.txt", limit=self.limit)

    def initial_weights(self, mode: Mode) -> Path:
        """The weights that the launcher starts from, under every strategy: exported after a step without a learning rate.

        What this run does for the first time, such as making the launcher's token store, is done for the others too.
        """
        folder = self._next("initial-weights")
        self._launcher(
            mode,
            folder,
            run={"max_steps": 1},
            optimizer={"learning_rate": 0.0},
            checkpoint={"export": "at_end"},
        )
        return folder / "run" / "hf" / "model.safetensors"

    def launcher(self, name: str) -> Measured:
        """A run of the launcher."""
        folder = self._next(f"{name}-launcher")
        started = self._launcher(MODES[name], folder)
        return self._measured(folder / "run" / "metrics.jsonl", started)

    def raw(self, name: str, weights: Path | None = None) -> Measured:
        """A run of the hand-written loop; without weights it starts from random ones of its own, as the launcher does."""
        mode = MODES[name]
        folder = self._next(f"{name}-raw")
        options: dict[str, object] = {
            "config": self.folder / "config.json",
            "data": self.folder / "rows.npy",
            "metrics": folder / "metrics.jsonl",
            "steps": self.steps,
            "micro-batch-size": self.size.micro_batch_size,
            "accumulation": mode.accumulation,
            "learning-rate": self.learning_rate,
            "warmup-steps": self.warmup_steps,
        }
        if mode.packed:
            options["positions"] = self.folder / "positions.npy"
        elif weights is not None:
            options["weights"] = weights
        given = [part for key, value in options.items() for part in (f"--{key}", value)]
        command = self._torchrun(
            HERE / mode.loop, *given, *mode.flags, *(["--bf16"] if mode.bf16 else [])
        )
        return self._measured(
            folder / "metrics.jsonl", run(command, log=folder / "output.txt", limit=self.limit)
        )


@dataclass
class Result:
    """A mode's runs."""

    pairs: list[tuple[Measured, Measured]] = field(default_factory=list)
    """(raw, launcher), one after the other."""
    same_weights: Measured | None = None
    """The hand-written loop from the launcher's initial weights."""

    def loss_differences(self) -> list[float]:
        """Relative, of each step; empty where the hand-written loop had other weights.

        Infinite where the launcher skipped the step, or the other loss is 0 (on null GPUs it is).
        """
        if (
            self.same_weights is None or not self.pairs
        ):  # of packed rows too: other documents meet in them
            return []
        both = zip(self.same_weights.lines, self.pairs[0][1].lines, strict=True)
        losses = [(raw["loss"], launcher["loss"]) for raw, launcher in both]
        return [math.inf if not a or b is None else abs(b - a) / abs(a) for a, b in losses]


def flops_per_token(size: Size) -> float:
    """6 N + 12 L h T, as the launcher counts: N without input embeddings, but with the head, be it tied or not."""
    model = size.model
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    head = model.get("head_dim", hidden // heads)
    attention: int = 2 * hidden * head * heads + 2 * hidden * head * model["num_key_value_heads"]
    layer = attention + 3 * hidden * model["intermediate_size"] + 2 * hidden
    parameters: int = model["num_hidden_layers"] * layer + hidden + model["vocab_size"] * hidden
    return float(6 * parameters + 12 * model["num_hidden_layers"] * hidden * size.tokens)


def gpu_name() -> str | None:
    """Of the first GPU; None: there is none."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.splitlines()[0].strip() if found.stdout.strip() else None


def describe_machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    processors = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(
        (line.split(":", 1)[1].strip() for line in processors if line.startswith("model name")),
        "unknown",
    )
    commit = ""
    with contextlib.suppress(OSError):  # git is not installed
        words = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpu_name(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "commit": commit.strip() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


@dataclass(frozen=True)
class Measure:
    """A row of the table: a number of each run."""

    name: str
    text: str
    """How the number is written."""
    raw: list[float]
    launcher: list[float]

    def row(self, mode: str) -> str:
        """A line of Markdown."""
        ratios = [launcher / raw for raw, launcher in zip(self.raw, self.launcher, strict=True)]
        sides = [self.text.format(statistics.median(side)) for side in (self.raw, self.launcher)]
        span = f"{min(ratios):.3f} – {max(ratios):.3f}"
        return f"| {mode} | {self.name} | {sides[0]} | {sides[1]} | **{statistics.median(ratios):.3f}** | {span} |"


def measures(
    result: Result, *, bench: Bench, mode: Mode, skip: int, gpu: str | None
) -> list[Measure]:
    """The rows of a mode."""
    sides = [[pair[side] for pair in result.pairs] for side in (0, 1)]
    tokens = bench.size.micro_batch_size * mode.accumulation * bench.ranks * bench.size.tokens
    seconds = [[run.median("step_seconds", skip) for run in side] for side in sides]
    rates = [[tokens / value for value in side] for side in seconds]
    # A line of the launcher has the peak since the line before, one of a raw loop the peak since the start
    memory = [
        [max(line["peak_memory_bytes"] for line in run.lines) / 2**20 for run in side]
        for side in sides
    ]
    rows = [
        Measure("step time, ms", "{:.1f}", *[[1000 * value for value in side] for side in seconds]),
        Measure(
            "CPU time a step, ms, all ranks",
            "{:.1f}",
            *[[1000 * run.median("cpu_seconds", skip) for run in s] for s in sides],
        ),
        Measure("tokens/s", "{:,.0f}", *rates),
        Measure("peak GPU memory, MiB" if gpu else "peak resident memory, MiB", "{:,.0f}", *memory),
        Measure(
            "start to end of step 1, s",
            "{:.2f}",
            *[[run.seconds_to_first_step for run in side] for side in sides],
        ),
    ]
    if gpu is not None:
        sys.path.insert(0, str(ROOT))
        from launcher.planner.hardware import peak_flops  # standard library only

        peak = peak_flops(gpu)
        if peak is not None:
            share = flops_per_token(bench.size) / (peak * bench.ranks)
            rows.insert(
                3, Measure("MFU", "{:.1%}", *[[rate * share for rate in side] for side in rates])
            )
    return rows


def report(
    results: dict[str, Result],
    *,
    bench: Bench,
    size: str,
    skip: int,
    machine: dict[str, Any],
    failed: list[str],
) -> str:
    """Everything, as Markdown."""
    about = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    if machine["gpu"] is not None:
        about += f", {bench.ranks} of {machine['gpu']}"
    pairs = max((len(result.pairs) for result in results.values()), default=0)
    model = bench.size.model
    lines = [
        f"{about}; Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}; "
        f"commit {machine['commit']}; {machine['date']}.",
        "",
        f"{size}: Llama, hidden {model['hidden_size']}, {model['num_hidden_layers']} layers, vocabulary {model['vocab_size']:,}; "
        f"{bench.size.tokens} tokens, micro-batch {bench.size.micro_batch_size}, 2 micro-batches a step (gathered: 4), "
        f"{bench.ranks} ranks; {pairs} pairs of runs of {bench.steps} steps, the first {skip} not counted.",
        "",
        "| mode | measure | raw loop | launcher | launcher / raw, median of pairs | all pairs |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, result in results.items():
        if result.pairs:
            lines += [
                m.row(name)
                for m in measures(
                    result, bench=bench, mode=MODES[name], skip=skip, gpu=machine["gpu"]
                )
            ]
    waits = {
        name: [
            line["data_seconds"] / line["step_seconds"]
            for _, run in result.pairs
            for line in run.lines[skip:]
        ]
        for name, result in results.items()
        if result.pairs
    }
    if waits:
        text = ", ".join(
            f"{name} {statistics.median(shares):.2%} ({max(shares):.2%})"
            for name, shares in waits.items()
        )
        lines += [
            "",
            f"Share of a step that the launcher waited for data, median (largest): {text}.",
        ]
    compared = {
        name: differences
        for name, result in results.items()
        if (differences := result.loss_differences())
    }
    if compared:
        lines += [
            "",
            "Losses from the same weights, launcher against raw loop, relative difference:",
            "",
        ]
        lines += ["| mode | step 1 | largest of all steps |", "|---|---:|---:|"]
        lines += [
            f"| {name} | {differences[0]:.1e} | {max(differences):.1e} |"
            for name, differences in compared.items()
        ]
    if failed:
        lines += ["", f"Failed: {', '.join(failed)}."]
    return "\n".join(lines) + "\n"


def as_json(results: dict[str, Result]) -> dict[str, Any]:
    """The numbers of every step of every run."""

    def plain(measured: Measured) -> dict[str, Any]:
        return {"seconds_to_first_step": measured.seconds_to_first_step, "steps": measured.lines}

    return {
        name: {
            "pairs": [
                {"raw": plain(raw), "launcher": plain(launcher)} for raw, launcher in result.pairs
            ],
            "raw_from_the_launchers_weights": plain(result.same_weights)
            if result.same_weights is not None
            else None,
        }
        for name, result in results.items()
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of a run")
    parser.add_argument(
        "--skip", type=int, default=5, help="first steps of a run that are not counted"
    )
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side, in turn")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=list(MODES),
        metavar="MODE",
        help=f"some of: {', '.join(MODES)}",
    )
    parser.add_argument(
        "--device-size", choices=list(SIZES), default="small", help="1b: for a machine with GPUs"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds that one run may take")
    parser.add_argument(
        "--no-losses", action="store_true", help="leave out the runs that compare the losses"
    )
    parser.add_argument("--output", type=Path, help="file for the table")
    parser.add_argument("--json", type=Path, help="file for the numbers of every step")
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for recipes, data and outputs of the runs; without it they are removed",
    )
    arguments = parser.parse_args()
    if arguments.steps <= arguments.skip:
        parser.error(f"--steps {arguments.steps} leaves nothing after --skip {arguments.skip}")
    return arguments


@contextlib.contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """A folder for the runs, removed afterwards unless it is to be kept."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="launcher-benchmark-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(name: str, result: Result, *, bench: Bench, pairs: int, weights: Path | None) -> None:
    """Fills in a mode's result. Raises RunFailedError; what was measured before stays."""
    # The first run of a mode reads files that later ones find in memory: it must not be one of those that are compared
    same_weights = bench.raw(name, weights)
    result.same_weights = same_weights if weights is not None and not MODES[name].packed else None
    for pair in range(pairs):
        raw, launcher = bench.raw(name), bench.launcher(name)
        result.pairs.append((raw, launcher))
        steps = [
            f"{1000 * side.median('step_seconds', bench.steps // 3):.0f}"
            for side in (raw, launcher)
        ]
        print(
            f"{name}: pair {pair + 1} of {pairs}: step time {steps[0]} ms raw, {steps[1]} ms launcher",
            file=sys.stderr,
            flush=True,
        )


def main() -> int:
    """Measures and prints; the exit status."""
    arguments = parse_arguments()
    # So that what is cleaned up after Ctrl-C is cleaned up after a SIGTERM too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    size = SIZES[arguments.device_size]
    names = arguments.modes or list(size.modes)
    machine = describe_machine()
    results: dict[str, Result] = {}
    failed: list[str] = []
    with working_folder(arguments.keep) as folder:
        bench = Bench(folder, size, arguments.ranks, arguments.steps, arguments.limit)
        bench.prepare()
        try:
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
                    pairs=arguments.pairs,
                    weights=None if arguments.no_losses else weights,
                )
            except RunFailedError as error:
                print(error, file=sys.stderr)
                failed.append(name)
            except (KeyboardInterrupt, SystemExit):  # the report has what was measured before
                failed.append(f"{name} and what follows it (interrupted)")
                break
    text = report(
        results,
        bench=bench,
        size=arguments.device_size,
        skip=arguments.skip,
        machine=machine,
        failed=failed,
    )
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)
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
