"""Starts real processes, with a hard time limit, and leaves none behind."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]


DEVICE = "cpu" if torch.version.cuda or torch.version.hip else "auto"
"""Of trainings in tests: the CPU, whatever the machine has."""


@dataclass
class Result:
    status: int
    output: str
    """Standard output and error together, each line of a torchrun worker marked with its rank."""

    def check(self, status=0):
        assert self.status == status, (
            f"exit status {self.status}, not {status}; what was printed:\n{self.output[-8000:]}"
        )
        return self


def run(command, *, timeout=120, cwd=REPOSITORY, during=None, device=DEVICE, **variables):
    """Runs a command; `during(process)` is called while it runs. Its whole process group is killed at the time limit.

    device: run.device of a training that does not give it.
    """
    command = [str(part) for part in command]
    trains = any(part.endswith("train.py") for part in command) and any(
        part.startswith("recipe=") for part in command
    )
    if trains and not any("run.device" in part for part in command):
        command.append(f"run.device={device}")
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", **variables}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        if during is not None:
            during(process)
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(
            f"not done after {timeout} s: {' '.join(command)}\n{output[-8000:]}"
        ) from None
    finally:
        left = _still_there(process.pid)
        if left:
            os.killpg(process.pid, signal.SIGKILL)
    assert not left, f"processes were left behind: {left}\n{output[-4000:]}"
    return Result(process.returncode, output)


def torchrun(*arguments, ranks, **options):
    """torchrun on this machine, with a port of its own."""
    return run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            ranks,
            "--tee",
            "3",
            *arguments,
        ],
        **options,
    )


def _still_there(group):
    """Command lines of the processes of a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except (OSError, IndexError):
            continue
    return found
