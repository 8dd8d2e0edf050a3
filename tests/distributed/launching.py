"""Runs commands in real processes with a hard time limit. No process outlives its test."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import REPOSITORY
from tests.limits import MARK, SESSION, kill, marked_processes

DEVICE = "cpu" if torch.version.cuda or torch.version.hip else "auto"
"""run.device of trainings in tests: the CPU, also with a CUDA or ROCm build of torch."""
PATIENCE = 4
"""Factor for all time limits. The limits are chosen for an idle machine; this allows for four
parallel test processes on slow cores."""


def free_port():
    """Returns a port that no other test and no outgoing connection takes (`ip_local_port_range`).

    The port of a socket bound to port 0 may be taken before torchrun binds it.
    """
    for port in random.SystemRandom().sample(range(13000, 20000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise AssertionError("no free port")


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
    mark = SESSION + uuid.uuid4().hex
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
        kill(mark)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise AssertionError(
            f"not finished after {PATIENCE * timeout} s: {' '.join(command)}\n{output[-8000:]}"
        ) from None
    deadline = time.monotonic() + 20 * PATIENCE  # child processes need a moment to end
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    kill(mark)
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


def write_rows(file, count=53):
    """Writes learnable rows of different lengths, some with masked labels, and with weights for
    data.weights_column.

    The default number of rows is not divisible by any batch size.
    """
    randomness = random.Random(3)
    with file.open("w") as out:
        for index in range(count):
            start, stride = randomness.randrange(64), randomness.choice([1, 3, 5])
            ids = [(start + stride * i) % 64 for i in range(randomness.randint(2, 32))]
            row: dict[str, Any] = {"input_ids": ids}
            if index % 3 == 0:
                row["labels"] = [
                    -100 if i < len(ids) // 2 else token for i, token in enumerate(ids)
                ]
            row["weights"] = [(index + i) % 5 / 8 for i in range(1, 1 + len(ids))]
            if not any(row["weights"][1:]):
                row["weights"] = 0.3
            out.write(json.dumps(row) + "\n")


def results_of(worker, folder, *arguments, ranks, timeout):
    """Runs a worker, a file of this package, on rows in the folder. Returns what it found.

    timeout: seconds, multiplied by PATIENCE.
    """
    write_rows(folder / "train.jsonl")
    script = Path(__file__).with_name(worker)
    torchrun(script, folder, *arguments, ranks=ranks, timeout=timeout).check()
    return json.loads((folder / "results.json").read_text())


def end_worker(folder, results):
    """Ends the process of a worker, of which rank 0 writes the results. Every rank calls this."""
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # like the launcher: threads of torch can abort a normal exit of the interpreter
