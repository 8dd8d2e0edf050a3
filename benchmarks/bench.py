"""Runs the launcher and other training loops on the same model, data and learning rates."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from shapes import LLAMA_1B, LLAMA_8B

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TRAIN = ROOT / "launcher" / "train.py"
MARK = "LAUNCHER_BENCHMARK"
"""Environment variable that marks all processes of a run.

Processes inherit it even if they leave the process group. A nested run appends its own mark.
"""


@dataclass(frozen=True)
class Mode:
    """A training mode, for the launcher and the hand-written loop."""

    loop: str
    """File name of the hand-written loop."""
    recipe: dict[str, Any]
    """Recipe keys of this mode, added to those that all modes share."""
    bf16: bool = False
    flags: tuple[str, ...] = ()
    """Command-line flags of the hand-written loop."""
    accumulation: int = 2
    """Micro-batches per step."""
    peers: str = ""
    """The equivalent strategy of peers.py; empty if there is none."""
    packed: bool = False
    """Rows contain several documents.

    The launcher masks them in its attention kernel, the hand-written loop with transformers' mask.
    """


_BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
_CHECKPOINTING = {"mode": "full", "every_n_blocks": 1}


def _fsdp(mixed_precision: dict[str, str] | None, **more: Any) -> dict[str, Any]:
    # The collectives of raw_fsdp.py
    same = {"reshard_after_forward": True, "sync_every_micro_batch": True}
    return {"kind": "fsdp", "mixed_precision": mixed_precision, **same, **more}


def _offload(mixed_precision: dict[str, str] | None) -> dict[str, Any]:
    strategy = _fsdp(mixed_precision, cpu_offload={"pin_memory": True})
    return {"strategy": strategy, "activation_checkpointing": _CHECKPOINTING}


MODES = {
    "ddp-fp32": Mode(
        "raw_ddp.py", {"strategy": {"kind": "ddp", "mixed_precision": None}}, peers="ddp"
    ),
    "ddp-bf16": Mode(
        "raw_ddp.py",
        {"strategy": {"kind": "ddp", "mixed_precision": {"param_dtype": "bfloat16"}}},
        bf16=True,
        peers="ddp",
    ),
    "fsdp-fp32": Mode("raw_fsdp.py", {"strategy": _fsdp(None)}, peers="fsdp"),
    "fsdp-bf16": Mode("raw_fsdp.py", {"strategy": _fsdp(_BF16)}, bf16=True, peers="fsdp"),
    "fsdp-bf16-gathered": Mode(
        "raw_fsdp.py",
        {"strategy": _fsdp(_BF16, reshard_after_backward=False)},
        bf16=True,
        flags=("--keep-gathered",),
        accumulation=4,
    ),
    "fsdp-fp32-auto": Mode(
        "raw_fsdp.py",
        {"strategy": {"kind": "fsdp", "mixed_precision": None}},
        flags=("--reduce-once",),
        accumulation=4,
    ),
    "fsdp-bf16-auto": Mode(
        "raw_fsdp.py",
        {"strategy": {"kind": "fsdp", "mixed_precision": _BF16}},
        bf16=True,
        flags=("--reduce-once",),
        accumulation=4,
    ),
    "fsdp-bf16-chosen": Mode(  # what the launcher chooses for a long run on GPUs
        "raw_fsdp.py",
        {
            "strategy": {"kind": "fsdp", "mixed_precision": _BF16},
            "model": {"compile": True},
        },
        bf16=True,
        peers="fsdp",
    ),
    "ddp-fp32-packed": Mode(
        "raw_ddp.py", {"strategy": {"kind": "ddp", "mixed_precision": None}}, packed=True
    ),
    "fsdp-bf16-packed": Mode("raw_fsdp.py", {"strategy": _fsdp(_BF16)}, bf16=True, packed=True),
    "offload-fp32": Mode("raw_fsdp.py", _offload(None), flags=("--offload",)),
    "offload-bf16": Mode("raw_fsdp.py", _offload(_BF16), bf16=True, flags=("--offload",)),
}


@dataclass(frozen=True)
class Size:
    """A model and the shape of its data."""

    model: dict[str, Any]
    """Fields of LlamaConfig."""
    tokens: int
    """Tokens per row."""
    micro_batch_size: int
    rows: int
    modes: tuple[str, ...]
    """Names of the modes that are run with this size by default."""


_SMALL_MODEL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

SIZES = {
    # A step takes 0.2 to 0.6 s on two cores. Much shorter steps would measure only noise
    "small": Size(
        model=_SMALL_MODEL,
        tokens=256,
        micro_batch_size=2,
        rows=256,
        modes=tuple(MODES),
    ),
    # A realistic vocabulary: full logits are 4,096 x 32,000 float32 numbers, 0.5 GiB
    "32k": Size(
        model=_SMALL_MODEL | {"vocab_size": 32000, "max_position_embeddings": 1024},
        tokens=1024,
        micro_batch_size=4,
        rows=64,
        modes=tuple(MODES),
    ),
    "1b": Size(
        model=LLAMA_1B | {"max_position_embeddings": 8192},
        tokens=4096,
        micro_batch_size=2,  # the raw loops' full logits and activations fit 79 GiB
        rows=128,
        modes=("ddp-bf16", "fsdp-bf16", "fsdp-bf16-gathered", "fsdp-bf16-packed", "offload-bf16"),
    ),
    "8b": Size(
        model=LLAMA_8B | {"max_position_embeddings": 8192},
        tokens=4096,
        micro_batch_size=1,
        rows=128,
        modes=("fsdp-bf16", "fsdp-bf16-gathered", "fsdp-bf16-packed", "offload-bf16"),
    ),
}


LAUNCHER = ("launcher", "launcher-full-logits")
"""The default recipe, and one with `model.chunked_loss: false`, which computes the loss like the
other sides."""
PEERS = {"accelerate": "accelerate", "trainer": "transformers", "fabric": "lightning_fabric"}
"""Loops of peers.py, each with the package that it requires."""
SIDES = ("raw", *LAUNCHER, *PEERS)


def installed(sides: Sequence[str]) -> list[str]:
    """The sides whose package is installed."""
    return [s for s in sides if s not in PEERS or importlib.util.find_spec(PEERS[s]) is not None]


class RunFailedError(Exception):
    """A process failed or timed out; the message contains the end of its output."""


def marked_processes(mark: str) -> list[int]:
    """PIDs of the running processes whose environment has the mark, including orphans."""
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
    """Runs a command, kills the processes that it leaves behind, and returns its exit status.

    Returns None if it takes longer than `limit` seconds. With `grace`, it then gets SIGINT, and is
    killed if it still runs `grace` seconds later.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: os.environ.get(MARK, "") + mark}
    # The launcher sets this, so the other sides get it too. It reduces fragmentation on GPUs
    environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # If it is set, Python compiles the launcher's source at every start, unlike in an installation
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
    """Runs a command, kills the processes that it leaves behind, and returns its start time.

    Raises RunFailedError if it takes longer than `limit` seconds or its exit status is not 0.
    """
    started = time.time()
    status = exit_status(command, log=log, limit=limit)
    if status != 0:
        what = (
            f"took longer than {limit:.0f} s" if status is None else f"ended with status {status}"
        )
        # Each rank of the launcher writes its output to a log of its own
        logs = [log, *sorted(log.parent.glob("run/log/rank_*.log"))]
        ends = [
            f"the end of {file.relative_to(log.parent)}:\n" + "\n".join(_lines(file)[-30:])
            for file in logs
        ]
        raise RunFailedError("\n".join([" ".join(command), what, *ends]))
    return started


def torchrun(ranks: int, *words: object) -> list[str]:
    """The command that starts a script and its arguments with torchrun on this machine."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*start, f"--nproc-per-node={ranks}", *map(str, words)]


def publish(text: str, file: Path | None) -> None:
    """Prints the text, and writes it to the file if one is given."""
    print(text)
    if file is not None:
        file.write_text(text, encoding="utf-8")


@dataclass
class Measured:
    """The metrics of one run, one line per step."""

    lines: list[dict[str, Any]]
    seconds_to_first_step: float

    def median(self, key: str, skip: int) -> float:
        """The median of a metric over the steps after the first `skip`."""
        return statistics.median(float(line[key]) for line in self.lines[skip:])


@dataclass
class Bench:
    """One comparison: its output folder, and the settings that all of its runs share."""

    folder: Path
    size: Size
    ranks: int
    steps: int
    limit: float
    learning_rate: float = 1e-3
    warmup_steps: int = 5
    count: int = 0

    def prepare(self) -> None:
        """Writes the model config and the data for all sides: rows of random tokens, all full."""
        rows = np.random.default_rng(0).integers(
            0, self.size.model["vocab_size"], (self.size.rows, self.size.tokens), dtype=np.int32
        )
        np.save(self.folder / "rows.npy", rows)
        with (self.folder / "rows.jsonl").open("w") as file:
            file.writelines(json.dumps({"input_ids": row.tolist()}) + "\n" for row in rows)
        # The same rows, cut into documents of various lengths. Packing restores the rows
        chance = np.random.default_rng(1)
        positions = np.zeros_like(rows)
        with (self.folder / "documents.jsonl").open("w") as file:
            for row, row_positions in zip(rows, positions, strict=True):
                cuts = np.sort(
                    chance.choice(
                        np.arange(1, len(row)), size=int(chance.integers(1, 6)), replace=False
                    )
                )
                for document in np.split(row, cuts):
                    file.write(json.dumps({"input_ids": document.tolist()}) + "\n")
                row_positions[:] = np.concatenate(
                    [np.arange(len(part)) for part in np.split(row, cuts)]
                )
        np.save(self.folder / "positions.npy", positions)
        (self.folder / "config.json").write_text(json.dumps(self.size.model))

    def _new_folder(self, name: str) -> Path:
        self.count += 1
        folder = self.folder / f"{self.count:03}-{name}"
        folder.mkdir()
        return folder

    def _read_metrics(self, file: Path, started: float) -> Measured:
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
        }
        for section, keys in (*mode.recipe.items(), *changes.items()):
            recipe[section] = {**recipe.get(section, {}), **keys}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        command = torchrun(self.ranks, script, f"recipe={folder / 'recipe.yaml'}")
        return run(command, log=folder / "output.txt", limit=self.limit)

    def initial_weights(self, mode: Mode) -> Path:
        """Exports the launcher's initial weights, which are the same under every strategy.

        They are exported after one step with a learning rate of 0. This run also writes the
        launcher's token store, so the runs that follow find it in the cache.
        """
        folder = self._new_folder("initial-weights")
        self._launcher(
            mode,
            folder,
            run={"max_steps": 1},
            optimizer={"learning_rate": 0.0},
            checkpoint={"export": "at_end"},
        )
        return folder / "run" / "hf" / "model.safetensors"

    def can_run(self, side: str, name: str) -> bool:
        """Whether the side supports the mode on this machine."""
        if side in ("accelerate", "trainer") and MODES[name].peers == "fsdp":
            return gpu_name() is not None or "NULLGPU_COUNT" in os.environ  # no FSDP on CPUs
        return side not in PEERS or bool(MODES[name].peers)

    def run(self, side: str, name: str, weights: Path | None = None) -> Measured:
        """Runs a side in a mode, from random weights if none are given.

        Raises RunFailedError.
        """
        folder = self._new_folder(f"{name}-{side}")
        if side in LAUNCHER:
            changes: dict[str, Any] = {"model": {"chunked_loss": side == "launcher"}}
            started = self._launcher(MODES[name], folder, **changes)
            return self._read_metrics(folder / "run" / "metrics.jsonl", started)
        command = self._loop(side, MODES[name], folder / "metrics.jsonl", weights)
        started = run(command, log=folder / "output.txt", limit=self.limit)
        return self._read_metrics(folder / "metrics.jsonl", started)

    def _loop(self, side: str, mode: Mode, metrics: Path, weights: Path | None) -> list[str]:
        """The command that runs the raw loop or a loop of peers.py."""
        options: dict[str, object] = {
            "config": self.folder / "config.json",
            "data": self.folder / "rows.npy",
            "metrics": metrics,
            "steps": self.steps,
            "micro-batch-size": self.size.micro_batch_size,
            "accumulation": mode.accumulation,
            "learning-rate": self.learning_rate,
            "warmup-steps": self.warmup_steps,
        }
        if side in PEERS:
            options |= {"library": side, "strategy": mode.peers}
        if mode.packed:
            options["positions"] = self.folder / "positions.npy"
        elif weights is not None:
            options["weights"] = weights
        given = [part for key, value in options.items() for part in (f"--{key}", value)]
        script = HERE / ("peers.py" if side in PEERS else mode.loop)
        return torchrun(self.ranks, script, *given, *mode.flags, *(["--bf16"] if mode.bf16 else []))


def ratios(values: Sequence[float], raw: Sequence[float]) -> str:
    """Ratios to the raw loop's runs of the same rounds, as `median (smallest – largest)`."""
    found = [value / other for value, other in zip(values, raw, strict=False)]
    if not found:
        return ""
    return f"**{statistics.median(found):.3f}** ({min(found):.3f} – {max(found):.3f})"


def flops_per_token(size: Size) -> float:
    """6 N + 12 L h T, as in the launcher. N includes the head (tied or not), not the embeddings."""
    model = size.model
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    head = model.get("head_dim", hidden // heads)
    attention: int = 2 * hidden * head * heads + 2 * hidden * head * model["num_key_value_heads"]
    layer = attention + 3 * hidden * model["intermediate_size"] + 2 * hidden
    parameters: int = model["num_hidden_layers"] * layer + hidden + model["vocab_size"] * hidden
    return float(6 * parameters + 12 * model["num_hidden_layers"] * hidden * size.tokens)


def gpu_name() -> str | None:
    """Name of the first GPU, or None if there is no GPU."""
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
    """Hardware, software versions, commit and date of the measurements."""
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


@contextlib.contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """A folder for the runs: `keep`, or a temporary folder that is removed afterwards."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="launcher-benchmark-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
