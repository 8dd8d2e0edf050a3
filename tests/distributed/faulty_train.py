"""launcher/train.py with a fault in it: FAULT=KIND:RANK:STEP.

raise, hang: the rank raises, or sleeps, in this step.
memory       FAULT=memory:RANK:STEP:ROWS: memory runs out where a micro-batch has more than so many rows
kill         the rank kills itself
block        the rank kills itself, and no other rank comes back from this step: each waits in a call of C that never returns,
             raises nothing and does not hold the interpreter's lock, as a collective of NCCL does whose peer is gone
ignore       the same, but the others wait in Python and ignore every exception
ONCE=FILE: a rank that kills itself makes this file first. A start that finds it has no fault.
TIMEOUTS=FOLDER: rank 0 notes there what timeouts the process groups have in its first and third step.
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
    """A lock that is taken a second time; a signal does not end the wait."""
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


def note_timeouts(step):
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

    from launcher.training import loss

    kind, rank, at, *rows = os.environ["FAULT"].split(":")
    original, calls = loss.summed_loss, [0]
    if os.path.exists(os.environ.get("ONCE", "")):
        kind = "none"

    def summed_loss(model, micro_batch):
        calls[0] += model.training
        note_timeouts(calls[0])
        if kind in ("block", "ignore") and calls[0] == int(at):
            if os.environ["RANK"] == rank:
                time.sleep(1)  # the others are blocked by then
                kill_this_rank()
            (block_in_c if kind == "block" else ignore_everything)()
        if os.environ.get("RANK", "0") == rank and calls[0] == int(at):
            if kind == "raise":
                raise ValueError("a fault of this test")
            if kind == "memory" and len(micro_batch["input_ids"]) > int(rows[0]):
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of ..."
                )
            if kind == "kill":
                time.sleep(2)  # the numbers of the step before have arrived by then
                kill_this_rank()
            if kind == "hang":
                time.sleep(10**6)
        return original(model, micro_batch)

    loss.summed_loss = summed_loss


def start():
    """Installs the fault once torch may be imported, then trains."""
    from launcher import train

    prepare = train.prepare_cuda

    def then_install(**options):
        prepare(**options)
        install()

    train.prepare_cuda = then_install
    sys.exit(train.main())


if __name__ == "__main__":
    start()
