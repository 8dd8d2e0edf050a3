"""Runs commands in real processes with a hard time limit. No process outlives its test."""

import contextlib
import gc
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
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


def with_device(command, device):
    """The words of a command, with run.device if it trains and does not set it."""
    words = [str(word) for word in command]
    trains = any(word.endswith("train.py") for word in words) and any(
        word.startswith("recipe=") for word in words
    )
    if trains and not any("run.device" in word for word in words):
        words.append(f"run.device={device}")
    return words


def inherited():
    """The environment variables of a process that a test starts."""
    # torch sets TORCHINDUCTOR_CACHE_DIR when it is first used in this process
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHINDUCTOR_CACHE_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return kept | {"TOKENIZERS_PARALLELISM": "false"}


def run(command, *, timeout=120, cwd=REPOSITORY, during=None, device=DEVICE, **variables):
    """Runs a command and calls `during(process)` while it runs.

    All its processes are killed at the time limit and if `during` raises. A process that is still
    alive after the command has ended is killed and raises AssertionError.

    timeout: seconds, multiplied by PATIENCE.
    device: run.device of a training that does not set it.
    """
    command = with_device(command, device)
    mark = SESSION + uuid.uuid4().hex
    environment = inherited() | {"PYTHONUNBUFFERED": "1", MARK: mark, **variables}
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


PRELOADED = ["tests.distributed.preloaded"]


def forked(script, *arguments, ranks=1, timeout=120, cwd=REPOSITORY, of_node=None, **variables):
    """Runs a Python script on `ranks` ranks without torchrun, and without the 5 CPU seconds that
    each process needs to import torch and transformers: the processes are forked from one that has
    imported them, once for all tests of this process.

    For tests of what ranks compute. `run` and `torchrun` are for tests of how they start and end:
    here a failed rank ends the others at once, and `cwd` is not on `sys.path`.

    timeout: seconds, multiplied by PATIENCE.
    of_node: ranks that take themselves for those of a node; None: all.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    words = with_device([script, *arguments], DEVICE)
    deadline = time.monotonic() + PATIENCE * timeout
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        processes = [
            context.Process(
                target=_forked_rank, args=(words, cwd, environment | variables, log.name)
            )
            for environment in _environments(ranks, of_node or ranks)
        ]
        try:
            for process in processes:
                process.start()
            waiting, failed = list(processes), []
            while waiting and not failed and time.monotonic() < deadline:
                connection.wait([p.sentinel for p in waiting], deadline - time.monotonic())
                waiting = [process for process in waiting if process.is_alive()]
                failed = [process.exitcode for process in processes if process.exitcode]
        finally:
            left = _end(processes)
        output = log.read()
    assert failed or not waiting, f"not finished after {PATIENCE * timeout} s: {words}\n{output}"
    assert failed or not left, f"processes were left behind by {words}\n{output[-4000:]}"
    return Result(failed[0] if failed else 0, output)


def _environments(ranks, of_node):
    """The environment variables of each rank; like those of torchrun if there are several."""
    if ranks == 1:
        return [inherited()]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": ranks}
    shared |= {"LOCAL_WORLD_SIZE": of_node}
    own = [shared | {"RANK": rank, "LOCAL_RANK": rank % of_node} for rank in range(ranks)]
    return [inherited() | {name: str(value) for name, value in each.items()} for each in own]


def _forked_rank(words, cwd, environment, log):
    os.setsid()  # its processes are one process group
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(cwd)
    # The rank's own processes start in the default way, not from this test's server
    multiprocessing.set_start_method(None, force=True)
    if "RANK" in environment:
        torch.set_num_threads(1)  # as under torchrun
    # A search for garbage among all that the server has imported would copy it: 80 MiB for each rank
    gc.unfreeze = lambda: None
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _end(processes):
    """Kills the process groups of ranks. Returns whether a rank that had ended left a process."""
    left = False
    for process in [process for process in processes if process.pid is not None]:
        ended = not process.is_alive()
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            left |= ended
        process.join()
    return left


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
            row["worth"] = [(index + i) % 5 / 8 for i in range(1, 1 + len(ids))]
            if not any(row["worth"][1:]):
                row["worth"] = 0.3
            out.write(json.dumps(row) + "\n")


def results_of(worker, folder, *arguments, ranks, timeout):
    """Runs a worker, a file of this package, on rows in the folder. Returns what it found.

    timeout: seconds, multiplied by PATIENCE.
    """
    write_rows(folder / "train.jsonl")
    script = Path(__file__).with_name(worker)
    forked(script, folder, *arguments, ranks=ranks, timeout=timeout).check()
    return json.loads((folder / "results.json").read_text())


def amount(request):
    """For a fixture of all tests of a file: `all` if long tests of the file are selected, which
    need every case of a worker; else `quick`."""
    selected = (item for item in request.session.items if item.path == request.path)
    return "all" if any(item.get_closest_marker("long") for item in selected) else "quick"


def cases(names, quick):
    """Parameters of a test: the names that are not in `quick` are long."""
    long = [name for name in names if name not in quick]
    marked = [pytest.param(name, marks=pytest.mark.long) for name in long]
    return [*(name for name in names if name in quick), *marked]


def end_worker(folder, results):
    """Ends the process of a worker, of which rank 0 writes the results. Every rank calls this."""
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # like the launcher: threads of torch can abort a normal exit of the interpreter
