"""Runs several trainings one after another in the same processes, each marked in the devices' log.

The only argument is a JSON object that maps the name of each training to its arguments of
launcher/train.py. NULLGPU_GIB=SIZE among them sets the memory of the devices.
Hybrid sharding must come first: on null GPUs, splitting NCCL's communicator
crashes after another process group was destroyed (torch 2.13).
"""

import gc
import json
import os
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.distributed.environment import prepare_cuda

prepare_cuda(deterministic=False)

import torch  # noqa: E402

import launcher.run.run  # noqa: E402, F401
from launcher.distributed.spawn import end_process  # noqa: E402
from launcher.models import experts  # noqa: E402
from launcher.reliability.progress import Progress  # noqa: E402
from launcher.train import main  # noqa: E402
from tests.nullgpu.train import LIBRARY, marked  # noqa: E402

exchange_counts = experts.exchange_counts


def routed(ranked, here, group):
    """Exchanges counts, which have no values here, and returns those of a uniform routing."""

    def uniform(tensor):
        tolist(tensor)  # waits for the device
        counts = experts.uniform_counts(ranked.numel(), group.size())
        return counts, counts

    tolist = torch.Tensor.tolist
    with mock.patch.object(torch.Tensor, "tolist", uniform):
        return exchange_counts(ranked, here, group)


if __name__ == "__main__":
    Progress.step_done = marked
    experts.exchange_counts = routed
    gc.freeze()  # exclude imported modules: scanning them would take most of the time
    for name, arguments in json.loads(sys.argv[1]).items():
        LIBRARY.nullgpu_mark(f"training {name}".encode())
        sizes = [word for word in arguments if word.startswith("NULLGPU_GIB=")]
        os.environ.update(word.split("=") for word in sizes)  # the library reads it in each call
        if status := main([word for word in arguments if word not in sizes]):
            end_process(status)
        gc.collect()
        torch.cuda.empty_cache()  # the next training starts with zeroed memory
    end_process(0)
