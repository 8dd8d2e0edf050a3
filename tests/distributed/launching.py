"""Runs commands in real processes with a hard time limit. No process outlives its test."""

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
"""run.device of trainings in tests: the CPU, also with a CUDA or ROCm build of torch."""
MARK = "LAUNCHER_TEST_RUN"
"""Environment variable that all processes of a run inherit. It identifies the workers of torchrun,
which have their own process groups."""
PATIENCE = 3
"""Factor for all time limits. The limits are chosen for an idle machine; this allows for three
parallel test processes on slow cores."""


def wait_until(condition, *, seconds=60, process=None):
    """Returns whether the condition became true before the time limit and the process's end.

    seconds: time limit, multiplied by PATIENCE.
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
    """Standard output and error. torchrun prefixes each line of a worker with its rank."""

    def check(self, status=0):
        assert self.status == status, (
            f"exit status {self.status}, expected {status}; output:\n{self.output[-8000:]}"
        )
        return self


def run(command, *, timeout=120, cwd=REPOSITORY, during=None, device=DEVICE, **variables):
    """Runs a command and calls `during(process)` while it runs.

    All its processes are killed at the time limit and if `during` raises. A process that is still
    alive after the command has ended is killed and raises AssertionError.

    timeout: seconds, multiplied by PATIENCE.
    device: run.device of a training that does not set it.
    """
    command = [str(part) for part in command]
    trains = any(part.endswith("train.py") for part in command) and any(
        part.startswith("recipe=") for part in command
    )
    if trains and not any("run.device" in part for part in command):
        command.append(f"run.device={device}")
    # torch sets TORCHINDUCTOR_CACHE_DIR when it is first used in this process
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
            f"not finished after {PATIENCE * timeout} s: {' '.join(command)}\n{output[-8000:]}"
        ) from None
    deadline = time.monotonic() + 5  # child processes need a moment to end
    while (left := _processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    _kill(mark)
    assert not left, f"processes were left behind: {list(left.values())}\n{output[-4000:]}"
    return Result(process.returncode, output)


def torchrun(*arguments, ranks, **options):
    """Runs torchrun on this machine, with a free port."""
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
    """Returns the command lines of the live processes of a run, by process id."""
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
