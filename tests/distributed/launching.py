"""Starts real processes, with a hard time limit, and leaves none behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch

from tests import REPOSITORY

DEVICE = "cpu" if torch.version.cuda or torch.version.hip else "auto"
"""Of trainings in tests: the CPU, whatever the machine has."""
MARK = "LAUNCHER_TEST_RUN"
"""A variable that all processes of a run inherit: torchrun's workers have process groups of their own."""
PATIENCE = 3
"""Time limits are given for a machine that does nothing else; this factor is for three test processes on slow cores."""


def wait_until(condition, *, seconds=60, process=None):
    """Whether the condition became true in time, and before the process ended.

    seconds: times PATIENCE.
    """
    deadline = time.monotonic() + PATIENCE * seconds
    while time.monotonic() < deadline and (process is None or process.poll() is None):
        if condition():
            return True
        time.sleep(0.02)
    return False


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
    """Runs a command; `during(process)` is called while it runs. All its processes are killed at the time limit, and
    if `during` raises.

    timeout: seconds, times PATIENCE.
    device: run.device of a training that does not give it.
    """
    command = [str(part) for part in command]
    trains = any(part.endswith("train.py") for part in command) and any(
        part.startswith("recipe=") for part in command
    )
    if trains and not any("run.device" in part for part in command):
        command.append(f"run.device={device}")
    # torch sets the last one when it is first used in this process
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHINDUCTOR_CACHE_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in own}
    mark = uuid.uuid4().hex
    environment |= {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        MARK: mark,
        **variables,
    }
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
        output, _ = process.communicate(timeout=PATIENCE * timeout)
    except BaseException as error:
        _kill(mark)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise AssertionError(
            f"not done after {PATIENCE * timeout} s: {' '.join(command)}\n{output[-8000:]}"
        ) from None
    deadline = time.monotonic() + 5  # those that end with their parent need a moment
    while (left := _processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    _kill(mark)
    assert not left, f"processes were left behind: {list(left.values())}\n{output[-4000:]}"
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


def _processes(mark):
    """Command lines of the living processes of a run, by process id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def _kill(mark):
    while left := _processes(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
