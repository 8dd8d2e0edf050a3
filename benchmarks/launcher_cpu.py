"""Runs the launcher's training and records the CPU time of each step. Started by other scripts.

    torchrun --nproc-per-node 2 benchmarks/launcher_cpu.py recipe=FOLDER/recipe.yaml

Each rank writes FOLDER/cpu.RANK, and on a GPU the allocator's counters to FOLDER/memory.RANK. It
exits after the last step, without the final checkpoint, which takes longer than the steps.
"""

import itertools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launcher.distributed.environment import prepare_cuda

prepare_cuda(deterministic=False)  # before torch is imported, as launcher/train.py does

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from raw_common import cpu_seconds  # noqa: E402

from launcher.recipe.load import load_recipe  # noqa: E402
from launcher.reliability.progress import Progress  # noqa: E402
from launcher.train import main  # noqa: E402


def measure(recipe: str) -> None:
    """Patches Progress to record each step's CPU time and to exit after the last step."""
    last = load_recipe([recipe], ranks=None).recipe.run.max_steps
    step_done = Progress.step_done
    times = [cpu_seconds()]

    def counted(self: Progress, step: int) -> None:
        step_done(self, step)
        times.append(cpu_seconds())
        if step == last:
            file = Path(recipe.partition("=")[2]).with_name(f"cpu.{dist.get_rank()}")
            file.write_text(json.dumps([b - a for a, b in itertools.pairwise(times)]))
            if torch.cuda.is_available():
                file.with_name(f"memory.{dist.get_rank()}").write_text(
                    json.dumps(torch.cuda.memory_stats())
                )
            dist.barrier()
            os._exit(0)

    Progress.step_done = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    measure(sys.argv[1])
    sys.exit(main())
