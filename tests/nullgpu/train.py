"""Runs launcher/train.py on null GPUs, marks each finished step in the log, and injects a fault.

FAULT=KIND:RANK:STEP injects a fault after the rank has finished the step, in the first start only.
Kinds:
kill          the process is killed
block         the rank's next collective never completes
lose_device   all later device calls fail
out_of_memory the next allocations fail
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.distributed.environment import prepare_cuda

prepare_cuda(deterministic=False)  # before torch is imported, as launcher/train.py does

from launcher.checkpoint.replicas import Replicas  # noqa: E402
from launcher.distributed.spawn import end_process  # noqa: E402
from launcher.errors import RecipeError  # noqa: E402
from launcher.reliability.progress import Progress  # noqa: E402
from launcher.run.reporting import Reporter  # noqa: E402
from launcher.train import main  # noqa: E402
from launcher.training import evaluation  # noqa: E402
from launcher.training import model as training_model  # noqa: E402
from tests.nullgpu.devices import preloaded  # noqa: E402

LIBRARY = preloaded()
# Without values, the device counts no target in an evaluation, and gradients may be not finite
evaluation.refuse_without_targets = lambda objective, where: None
Reporter._check = lambda self, record: None
Replicas._compare = lambda self, checksums, sums: None
step_done = Progress.step_done
check_isolation = training_model.check_isolation


def forward_passes_only(*arguments, **options):
    """Checks that packed documents are kept apart, but does not believe the answer: logits have no
    values here."""
    with contextlib.suppress(RecipeError):
        check_isolation(*arguments, **options)


training_model.check_isolation = forward_passes_only


def fault(kind: str) -> None:
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "block":
            LIBRARY.nullgpu_block_next_collective()
        case "lose_device":
            LIBRARY.nullgpu_lose_device()
        case "out_of_memory":
            import torch

            torch.cuda.empty_cache()  # otherwise the next steps may not allocate
            LIBRARY.nullgpu_fail_allocations(1000)
        case _:
            raise ValueError(f"FAULT: unknown kind {kind}")


def marked(self: Progress, step: int) -> None:
    step_done(self, step)
    LIBRARY.nullgpu_mark(f"step {step}".encode())
    kind, rank, at = (os.environ.get("FAULT") or "none:-1:-1").split(":")
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first_start and (int(rank), int(at)) == (int(os.environ.get("RANK", "0")), step):
        fault(kind)


if __name__ == "__main__":
    Progress.step_done = marked
    end_process(main())
