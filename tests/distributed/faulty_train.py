"""launcher/train.py with a fault in it: FAULT=raise:RANK:STEP, hang:RANK:STEP, kill:RANK:STEP or memory:RANK:STEP:ROWS, for
lack of memory where a micro-batch has more than so many rows."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def install():
    import torch

    from launcher import loss

    kind, rank, at, *rows = os.environ["FAULT"].split(":")
    original, calls = loss.summed_loss, [0]

    def summed_loss(model, micro_batch):
        calls[0] += model.training
        if os.environ.get("RANK", "0") == rank and calls[0] == int(at):
            if kind == "raise":
                raise ValueError("a fault of this test")
            if kind == "memory" and len(micro_batch["input_ids"]) > int(rows[0]):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of ...")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
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
