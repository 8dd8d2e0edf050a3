"""Runs launcher/train.py with an injected fault: FAULT=KIND:RANK:STEP.

Kinds:

raise    The rank raises an exception in this step.
hang     The rank sleeps in this step.
memory   FAULT=memory:RANK:STEP:ROWS: the rank runs out of memory in this step if a micro-batch has
         more than ROWS rows.
kill     The rank kills itself in this step.
exit     The rank calls sys.exit(0) in this step.
block    The rank kills itself, and all other ranks block in this step in a C call. The call does
         not return, raises nothing and does not hold the GIL, like an NCCL collective with a dead
         peer.
ignore   Like block, but the other ranks wait in Python and ignore every exception.

Other environment variables:

ONCE=FILE         A rank creates this file before it kills itself. If the file exists at the start,
                  no fault is injected. Needed by block and ignore: the other ranks create FILE.RANK.
TIMEOUTS=FOLDER   Rank 0 writes the timeouts of the process groups in steps 1 and 3 to FOLDER.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def block_in_c():
    """Deadlocks on a mutex that this thread already holds. Signals do not interrupt the wait."""
    lock = ctypes.create_string_buffer(256)  # zeros: PTHREAD_MUTEX_INITIALIZER
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


def ignore_everything():
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(10**6)


def kill_this_rank():
    if "ONCE" in os.environ:
        Path(os.environ["ONCE"]).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_other_ranks():
    """Waits until all other ranks have begun to block."""
    ranks = set(range(int(os.environ["WORLD_SIZE"]))) - {int(os.environ["RANK"])}
    while not all(os.path.exists(f"{os.environ['ONCE']}.{rank}") for rank in ranks):
        time.sleep(0.02)


def record_timeouts(step):
    from torch.distributed import distributed_c10d

    if "TIMEOUTS" in os.environ and os.environ.get("RANK", "0") == "0" and step in (1, 3):
        groups = distributed_c10d._world.pg_map
        found = [
            (
                group.group_desc,
                group._get_backend(group._device_types[0]).options._timeout.total_seconds(),
            )
            for group in groups
        ]
        Path(os.environ["TIMEOUTS"], f"step_{step}.json").write_text(json.dumps(found))


def install():
    import torch

    from launcher.objectives.next_token import NextToken

    kind, rank, at, *rows = os.environ["FAULT"].split(":")
    original, calls = NextToken.loss, [0]
    if os.path.exists(os.environ.get("ONCE", "")):
        kind = "none"

    def loss(self, model, micro_batch):
        calls[0] += model.training
        record_timeouts(calls[0])
        if kind in ("block", "ignore") and calls[0] == int(at):
            if os.environ["RANK"] == rank:
                wait_for_other_ranks()
                kill_this_rank()
            Path(f"{os.environ['ONCE']}.{os.environ['RANK']}").touch()
            (block_in_c if kind == "block" else ignore_everything)()
        if os.environ.get("RANK", "0") == rank and calls[0] == int(at):
            if kind == "raise":
                raise ValueError("a fault of this test")
            if kind == "memory" and len(micro_batch.inputs["input_ids"]) > int(rows[0]):
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of ..."
                )
            if kind == "exit":
                sys.exit(0)
            if kind == "kill":
                time.sleep(2)  # rank 0 has received the metrics of the previous step by then
                kill_this_rank()
            if kind == "hang":
                time.sleep(10**6)
        return original(self, model, micro_batch)

    NextToken.loss = loss


def start():
    """Trains, and injects the fault as soon as torch may be imported."""
    from launcher import train

    prepare = train.prepare_cuda

    def prepare_and_install(**options):
        prepare(**options)
        install()

    train.prepare_cuda = prepare_and_install
    sys.exit(train.main())


if __name__ == "__main__":
    start()
