"""Runs all tests and benchmarks that need a GPU, in parts, and writes the results to one folder.

    make gpu-first                           # calls 1 and 2: the first fifteen minutes on one GPU
    make gpu-first CALL=3                    # one call
    make gpu-first PRINT=1                   # their commands, for a machine that takes a string
    make test-gpu                            # all parts, the most informative first
    make test-gpu PART="kernels steps"       # some of them

README.md lists the parts. For each part, gpu.json contains its status, duration, measurements,
machine, versions and commit. gpu.md shows the same as tables, and logs/ contains the output of each
command. They are written after each command, so a part that exceeds its limit keeps its
measurements; logs/ has each row as soon as it is measured. A later call adds to them.

Exit status: 0 if all parts passed, 1 if a part failed or exceeded its limit, 2 if nothing can run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bench import HERE, ROOT, describe_machine, exit_status
from gpu_logs import Rows, diagnosis, milliseconds, outcomes, tables

GRACE = 10
"""Seconds that an interrupted command gets to write its measurements."""
LOGGERS = {"wandb", "tensorboard"}
"""Requirements that may be missing, because no part imports them."""
TESTS = "tests/gpu/test_gpu.py"
SOME_TESTS = {
    "values": "(varlen and mistral) or (deterministic and fsdp) or compiled_dropout",
    "out_of_memory": "out_of_memory",
    "resume": "(resumed and fsdp and true and not offload) or (killed and fsdp)",
    "contexts": "cuda_context",
    "plan": "allocator",
}
"""Tests that other parts run than `tests`, as expressions of pytest."""
START = 15
"""Seconds of a call before its first part: wheels are installed."""
CALLS = {
    "1": (270, {"kernels": 85, "steps": 95, "values": 65}),
    "2": (400, {"widths": 125, "memory": 70, "compare": 65, "checkpoint": 45, "resume": 70}),
    "3": (400, {"peers": 110, "tuning": 45, "steps": 130, "goals": 90}),
    "4": (370, {"models": 185, "families": 155}),
}
"""Seconds of calls on a lent GPU, and of their parts: the most informative first. The first two fit
fifteen minutes; the third measures what they left open, or what has changed since, and the
fourth other families than Llama. Time that a part
does not use is left to those after it. Starting a machine takes half a minute to two minutes more."""
GROUPS = ("steps", "widths", "families", "memory", "goals")
"""Groups of gpu_rows.py, each a part."""
OTHERS = ("doctor", "contexts", "tests", "plan")
_MEASURED = itertools.chain.from_iterable(parts for _, parts in CALLS.values())
PARTS = ("plans", *dict.fromkeys(_MEASURED), *OTHERS)
"""All parts in their order; the calls find the plans in the repository."""
LONGEST_COMMAND = 2000
"""Characters of a command that a machine takes."""
MOST_FILES = 8
"""Files that a machine returns."""
LARGEST_TREE = 64 * 2**20
"""Bytes of sources and wheels that travel to a machine."""
CACHE, PACKAGES = ROOT / "build/gpu-cache", ROOT / "build/gpu-packages"
"""Compiled kernels and installed wheels: the second call finds those of the first."""
DESCRIBE = """
import json, torch, transformers
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "gpu": gpus[0].name if gpus else None,
    "gpus": len(gpus),
    "gpu_memory_gib": round(gpus[0].total_memory / 2**30, 1) if gpus else None,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
}))
"""
"""Run in a separate process, because the tests count the CUDA contexts on each GPU."""


@dataclass(frozen=True)
class Command:
    """One command of a part."""

    name: str
    words: Sequence[object]
    """Arguments of the Python interpreter."""
    figures: Callable[[str], Rows]
    """Extracts the measurements from the output."""


def commands(part: str, *, gpu: str, gpus: int, quick: bool, logs: Path) -> list[Command]:
    """The commands of a part. quick: a smoke test of small models, few steps and some tests."""
    size = "small" if quick else "1b"
    ranks: list[object] = ["--ranks", gpus]
    words: list[object]
    marks = "gpu and not long" if quick else "gpu"

    def pytest(name: str, expression: str, *, processes: int = 1) -> Command:
        options = f"-m pytest {TESTS} -vv --durations=0 --tb=short"
        if processes > 1 and importlib.util.find_spec("xdist") is not None:
            options += f" --numprocesses {processes}"
        return Command(name, [*options.split(), "-m", marks, "-k", expression], outcomes)

    def steps(group: str) -> Command:
        words: list[object] = [HERE / "gpu_steps.py", "--group", group]
        if gpus > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            words = [*torchrun, f"--nproc-per-node={gpus}", *words]
        if (plans := logs.parent / "plans.json").exists():
            words += ["--plans", plans]
        return Command(group, [*words, *(["--tiny", "--eager"] if quick else [])], tables)

    if part == "kernels":
        return [Command(part, [HERE / "gpu_kernels.py", *(["--tiny"] if quick else [])], tables)]
    if part == "models":
        return [Command(part, [HERE / "gpu_models.py", *(["--tiny"] if quick else [])], tables)]
    if part in GROUPS:
        return [steps(part)]
    if part == "values":
        return [
            pytest("values", SOME_TESTS["values"], processes=3),
            pytest("out_of_memory", SOME_TESTS["out_of_memory"]),  # needs the GPU alone
        ]
    if part == "resume":
        return [pytest(part, SOME_TESTS[part], processes=3)]
    if part == "contexts":  # nothing else may use the GPU
        return [pytest(part, SOME_TESTS[part])]
    if part == "tests":
        others = " or ".join(f"({expression})" for expression in SOME_TESTS.values())
        return [pytest(part, f"not ({others})", processes=4)]
    if part == "compare":
        words = [HERE / "compare.py", *ranks, "--rounds", 1, "--cold", "--no-losses"]
        words += ["--steps", 4, "--skip", 1] if quick else ["--steps", 12, "--skip", 4]
        words += ["--device-size", size]
        modes = ["fsdp-bf16-packed"] if quick else ["fsdp-bf16-packed", "fsdp-bf16"]
        return [Command(part, [*words, "--modes", *modes], tables)]
    if part == "peers":
        words = [HERE / "compare.py", *ranks, "--rounds", 1, "--cold", "--no-losses"]
        words += ["--steps", 4, "--skip", 1] if quick else ["--steps", 12, "--skip", 4]
        words += ["--device-size", size, "--modes", "fsdp-bf16-chosen"]
        return [Command(part, [*words, "--sides", "launcher", "accelerate", "trainer"], tables)]
    if part == "tuning":
        words = [HERE / "gpu_kernels.py", "--sections", "variants"]
        return [Command(part, [*words, *(["--tiny"] if quick else [])], tables)]
    if part == "checkpoint":
        # Large batches for the full run: short steps could not hide an asynchronous save
        short = ["--megabytes", 50, "--repeats", 2]
        full = ["--megabytes", 2000, "--repeats", 2, "--rows", 16384]
        words = [HERE / "checkpoint.py", *ranks, *(short if quick else full)]
        return [Command(part, [*words, "--strategy", "fsdp"], milliseconds)]
    if part == "plans":  # of this machine, at this commit
        words = [HERE / "gpu_plans.py", "--gpus", gpu, *ranks, "--groups"]
        words += ["steps"] if quick else ["steps", "widths", "memory"]
        return [Command(part, [*words, "--output", logs.parent / "plans.json"], tables)]
    if part == "doctor":
        file = logs / "doctor.json"
        words = ["-m", "launcher.cli.main", "doctor", f"ranks={gpus}", f"out={file}"]
        return [Command("doctor", words, diagnosis(file))]
    assert part == "plan"
    few = ["--strategies", "ddp", "fsdp, full", "--rows", 1] if quick else []
    words = [HERE / "memory.py", *ranks, *few, "--sizes"]
    return [
        Command(name, [*words, name], tables) for name in (["tiny"] if quick else ["0.1b", "3b"])
    ]


def run_command(command: Command, *, part: str, log: Path, seconds: float) -> dict[str, Any]:
    """Runs a command with a time limit; returns its status, duration and measurements."""
    record: dict[str, Any] = {"name": command.name, "seconds": 0, "figures": []}
    if seconds < 1:
        return {**record, "status": "not started: the part's time was up"}
    words = [sys.executable, *map(str, command.words)]
    print(f"{part}: {' '.join(words)}\n    prints into {log}", flush=True)
    started = time.monotonic()
    code = exit_status(words, log=log, limit=seconds, grace=GRACE)
    record["seconds"] = round(time.monotonic() - started, 1)
    status = "passed" if code == 0 else f"failed with status {code}"
    if code is None:
        status = f"not done in {seconds:.0f} s"
    try:
        record["figures"] = command.figures(log.read_text(errors="replace"))
    except (OSError, ValueError, LookupError) as error:
        status += f"; its figures cannot be read: {type(error).__name__}: {error}"
    print(f"{part}: {command.name}: {status}, {record['seconds']} s", flush=True)
    return {**record, "status": status}


def markdown(parts: dict[str, Any]) -> str:
    """The report of all parts, as Markdown."""
    lines = ["| part | status | seconds | date | commit |", "|---|---|---:|---|---|"]
    machines: dict[str, list[str]] = {}
    for name, part in parts.items():
        on = dict(part["machine"])
        status, seconds, commit = part["status"], part["seconds"], on.pop("commit")
        lines.append(f"| {name} | {status} | {seconds} | {part['date']} | {commit} |")
        machines.setdefault(", ".join(f"{key} {on[key]}" for key in on), []).append(name)
    lines += [f"\n{', '.join(names)}: {machine}." for machine, names in machines.items()]
    for name, part in parts.items():
        for command in part["commands"]:
            title = f"## {name}: {command['name']}"
            lines += ["", title, f"{command['status']}, {command['seconds']} s"]
            header: list[str] = []
            for row in command["figures"]:
                if list(row) != header:  # the next table
                    header = list(row)
                    lines += ["", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
                cells = ("" if v is None else str(v).replace("|", "/") for v in row.values())
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(results: Path, parts: dict[str, Any]) -> None:
    """Replaces gpu.json and gpu.md."""
    for name, text in (
        ("gpu.json", json.dumps({"parts": parts}, indent=1)),
        ("gpu.md", markdown(parts)),
    ):
        new = results / f"{name}.new"
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(results / name)


def import_from(folder: Path) -> None:
    """Puts the folder first on the import path of this process and its subprocesses."""
    sys.path.insert(0, str(folder))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}" if before else str(folder)


def refuse(message: str) -> NoReturn:
    """Prints the message and exits with status 2."""
    print(message, file=sys.stderr)
    sys.exit(2)


def installed(package: str) -> str | None:
    """The version of an installed package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_packages() -> dict[str, str]:
    """Requirements of the launcher and its tests that are not satisfied, by package."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    missing = {}
    for requirement in map(Requirement, [*project["dependencies"], "pytest>=8"]):
        found = installed(requirement.name)
        good = found is not None and requirement.specifier.contains(found, prereleases=True)
        if not good and requirement.name not in LOGGERS:
            missing[requirement.name] = f"{requirement} (here: {found or 'none'})"
    return missing


def add_wheels(wheels: Path) -> None:
    """Installs the missing packages from wheels, beside the sources, and adds them to the import
    path; a later call finds them there.

    Exits if there are no wheels or pip fails.
    """
    found = {file: file.name.partition("-")[0] for file in wheels.glob("*.whl")}
    if not found:
        refuse(f"WHEELS={wheels}: there are no wheels; `make gpu-wheels` downloads them")
    import_from(PACKAGES)
    outdated = {name.replace("-", "_").lower() for name in missing_packages()}
    needed = [file for file, name in found.items() if not installed(name) or name in outdated]
    if needed:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        words = [*pip, "--upgrade", "--target", PACKAGES, *sorted(needed)]
        if code := subprocess.run(list(map(str, words)), check=False).returncode:
            refuse(f"pip failed with status {code}")


def call_command(call: str, *, wheels: Path, commit: str) -> str:
    """The command of a call, for a machine that copies the sources and returns the files in $OUT.

    The limits of its parts end before that of the command, and that one before the call's.
    """
    seconds, _ = CALLS[call]
    words = f"benchmarks/gpu.py --call {call} --wheels {wheels} --commit {commit}"
    return f'timeout {seconds - 5} python3 {words} --results "$OUT"'


def tree_bytes(wheels: Path) -> int:
    """Bytes of what travels: tracked files, others that git does not ignore, and the wheels."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {ROOT / name for name in listed.split("\0") if name} | set(wheels.glob("*.whl"))
    return sum(file.stat().st_size for file in files if file.exists())


def print_calls(wheels: Path, commit: str) -> None:
    """Prints both commands and what they need. Exits if a machine would not take them."""
    size = tree_bytes(wheels)
    if size > LARGEST_TREE:
        refuse(f"the sources and {wheels} have {size / 2**20:.0f} MiB; at most 64 may travel")
    if not list(wheels.glob("*.whl")):
        refuse(f"{wheels} has no wheels; `make gpu-wheels` downloads them")
    print(f"# The sources and {wheels} must be there: {size / 2**20:.0f} MiB. $OUT is a folder.")
    for call, (seconds, parts) in CALLS.items():
        print(f"# Call {call}, {seconds} s: {', '.join(parts)}")
        print(call_command(call, wheels=wheels, commit=commit))


def machine_here(commit: str | None) -> dict[str, Any]:
    """Describes the machine; the key `gpu` is None if torch finds no GPU."""
    words = [sys.executable, "-c", DESCRIBE]
    described = subprocess.run(words, capture_output=True, text=True, check=False)
    if described.returncode:
        refuse(f"torch does not work here:\n{described.stderr[-2000:]}")
    machine: dict[str, Any] = describe_machine() | json.loads(described.stdout.splitlines()[-1])
    del machine["date"]  # each part records its own date
    machine["driver"] = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError, IndexError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        query_result = subprocess.run(query, capture_output=True, text=True, check=True)
        machine["driver"] = query_result.stdout.split()[0]
    return machine | ({"commit": commit} if commit else {})


def main() -> int:
    """Runs the parts and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, metavar="PART", default=PARTS, help=" ".join(PARTS))
    add("--call", choices=CALLS, help="the parts of a call, with their limits")
    add("--print", action="store_true", help="prints the commands of the calls, and runs nothing")
    add("--results", type=Path, default=ROOT / "build/gpu", help="folder for the results")
    add("--wheels", type=Path, help="folder with wheels of missing packages")
    add("--limit", type=float, default=530, help=f"seconds per part, plus {GRACE} to end it")
    add("--quick", action="store_true", help="smoke test with small models and few steps")
    add("--commit", help="commit of these files, if there is no git repository")
    arguments = parser.parse_args()
    if arguments.print:
        wheels = arguments.wheels or Path("build/wheels")
        print_calls(wheels, arguments.commit or describe_machine()["commit"])
        return 0
    end = time.monotonic() + START
    limits: dict[str, float] = dict.fromkeys(arguments.parts, arguments.limit + GRACE)
    if arguments.call is not None:
        limits = dict(CALLS[arguments.call][1])
    # A shell starts background jobs with SIGINT ignored, and subprocesses would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results: Path = arguments.results.resolve()
    logs = results / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    import_from(ROOT)
    os.environ["PYTHONUNBUFFERED"] = "1"  # logs are complete even if a command is killed
    os.environ["COLUMNS"] = "200"  # pytest truncates failure reasons at this width
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE / "triton"))
    if arguments.wheels is not None:
        add_wheels(arguments.wheels)
    if missing := missing_packages():
        lines = "\n  ".join([f"{sys.executable} lacks packages:", *missing.values()])
        refuse(f"{lines}\nInstall them; without network: WHEELS=FOLDER, see benchmarks/README.md")
    machine = machine_here(arguments.commit)
    if machine["gpu"] is None:
        refuse(f"torch {machine['torch']} of {sys.executable} sees no GPU")
    file = results / "gpu.json"
    done: dict[str, Any] = json.loads(file.read_text())["parts"] if file.exists() else {}
    failed = []
    for part, limit in limits.items():
        for old in logs.glob(f"{part}[-.]*"):
            old.unlink()
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        record = {"machine": machine, "date": date, "status": "not finished", "seconds": 0}
        records: list[dict[str, Any]] = []
        done.pop(part, None)
        done[part] = record | {"commands": records}
        started = time.monotonic()
        end = limit + (started if arguments.call is None else end)
        for command in commands(
            part,
            gpu=machine["gpu"],
            gpus=machine["gpus"],
            quick=arguments.quick,
            logs=logs,
        ):
            write(results, done)
            left = end - GRACE - time.monotonic()
            log = logs / f"{part}-{command.name}.log"
            records.append(run_command(command, part=part, log=log, seconds=left))
            done[part]["seconds"] = round(time.monotonic() - started, 1)
        bad = [f"{one['name']}: {one['status']}" for one in records if one["status"] != "passed"]
        done[part]["status"] = "; ".join(bad) or "passed"
        write(results, done)
        failed += [f"{part}: {one}" for one in bad]
    print(f"\n{markdown(done)}\nResults: {results / 'gpu.md'} and gpu.json")
    if failed:
        print("Failed:", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
