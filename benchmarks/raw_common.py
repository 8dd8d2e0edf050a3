"""Shared by the hand-written loops: arguments, process group, data, weights and measurements.

Nothing is imported from launcher/, because the launcher is compared with these loops.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import resource
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

IGNORED = -100


def parse_arguments(description: str, *flags: str, **choices: list[str]) -> argparse.Namespace:
    """Parses the arguments of a loop.

    flags, choices: additional switches and options of this loop.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, required=True, help="JSON: fields of LlamaConfig")
    parser.add_argument("--data", type=Path, required=True, help=".npy: token ids (rows, tokens)")
    parser.add_argument(
        "--positions",
        type=Path,
        help=".npy: position ids (rows, tokens), if rows contain several documents",
    )
    parser.add_argument(
        "--metrics",
        type=Path,
        required=True,
        help="file to which rank 0 writes one JSON line per step",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        help="safetensors file with the initial weights; default: random weights",
    )
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps")
    parser.add_argument(
        "--micro-batch-size", type=int, required=True, help="rows per rank per forward pass"
    )
    parser.add_argument(
        "--accumulation", type=int, required=True, help="micro-batches per optimizer step"
    )
    parser.add_argument("--learning-rate", type=float, required=True, help="peak learning rate")
    parser.add_argument("--warmup-steps", type=int, required=True, help="steps of linear warm-up")
    parser.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16; float32 otherwise"
    )
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, required=True)
    return parser.parse_args()


def start(*, offload: bool = False) -> tuple[int, int, torch.device]:
    """Initializes the process group; returns rank, world size and device."""
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_float32_matmul_precision("high")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # With offload, clipping all-reduces the norm in host memory, which NCCL does not support
        dist.init_process_group("cpu:gloo,cuda:nccl" if offload else "nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    if device.type == "cpu" or offload:
        # torchrun sets OMP_NUM_THREADS=1, which leaves cores idle with fewer ranks than cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    return dist.get_rank(), dist.get_world_size(), device


def end() -> None:
    """Destroys the process group and exits. Call it after the loop's variables went out of scope.

    With torch 2.13 a normal exit sometimes hangs or aborts. DistributedDataParallel is in a
    reference cycle and keeps the process group alive. If the garbage collector destroys the group,
    this thread holds the GIL while gloo's thread may wait for it. If gloo's thread still runs when
    the interpreter exits, the process aborts.
    """
    gc.collect()
    dist.destroy_process_group()
    os._exit(0)


def read_config(file: Path) -> LlamaConfig:
    """The model config, with the same attention implementation as the launcher."""
    return LlamaConfig(**json.loads(file.read_text()), attn_implementation="sdpa")


def load_rows(
    file: Path, device: torch.device, positions: Path | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor, float]:
    """Loads all data to the device; returns model inputs, targets and the mean targets per row.

    Inputs and targets have the shape (rows, tokens). The last token of a document has no target.
    With `positions`, rows contain several documents, and transformers builds a document mask from
    position_ids.
    """
    inputs = torch.from_numpy(np.load(file)).to(torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    targets[:, :-1] = inputs[:, 1:]
    named = {"input_ids": inputs.to(device)}
    if positions is not None:
        position_ids = torch.from_numpy(np.load(positions)).to(torch.int64)
        targets[:, :-1][position_ids[:, 1:] == 0] = IGNORED
        named["position_ids"] = position_ids.to(device)
    return named, targets.to(device), float((targets != IGNORED).sum()) / len(targets)


@torch.no_grad()
def load_weights(model: nn.Module, file: Path) -> None:
    """Copies the tensors of a safetensors file into the model, sharded or not."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as weights:
        for name, parameter in model.named_parameters():
            whole = weights.get_tensor(name.replace("_checkpoint_wrapped_module.", ""))
            target: torch.Tensor = parameter
            if isinstance(parameter, DTensor):
                # fully_shard splits dim 0 like chunk; ranks beyond the last chunk have empty shards
                chunks = whole.chunk(parameter.device_mesh.size())
                rank = parameter.device_mesh.get_local_rank()
                whole = chunks[rank] if rank < len(chunks) else whole[:0]
                target = parameter.to_local()
            target.copy_(whole)


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """Fused AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


def learning_rate_at(
    step: int, *, peak: float, warmup_steps: int, steps: int, floor: float = 0.1
) -> float:
    """Linear warm-up, then a cosine decay to floor * peak at the last step. Steps count from 1."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / (steps - warmup_steps)
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


class Meter:
    """Writes one JSON line per step, with the same measurements as the launcher.

    Each step all-gathers a few numbers over the ranks and reads the loss, which synchronizes with
    the device. The launcher does the same if it logs every step.
    """

    def __init__(self, file: Path, rank: int, ranks: int, device: torch.device) -> None:
        self._file = file.open("w", buffering=1) if rank == 0 else None
        self._ranks, self._device = ranks, device
        self._all_gather = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )  # renamed in torch 2.13
        self._since, self._cpu = time.perf_counter(), cpu_seconds()

    def record(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """loss: this rank's contribution to the sum over ranks; grad_norm: equal on all ranks."""
        mine, norm = torch.stack([loss.double(), grad_norm.double()]).tolist()
        numbers = torch.tensor(
            [mine, cpu_seconds() - self._cpu, self._peak_bytes()],
            dtype=torch.float64,
            device=self._device,
        )
        gathered = torch.empty(self._ranks * 3, dtype=torch.float64, device=self._device)
        self._all_gather(gathered, numbers)
        by_rank = gathered.cpu().view(self._ranks, 3)
        now = time.perf_counter()
        if self._file is not None:
            line = {
                "step": step,
                "loss": float(by_rank[:, 0].sum()),
                "grad_norm": norm,
                "step_seconds": now - self._since,
                "cpu_seconds": float(by_rank[:, 1].sum()),
                "peak_memory_bytes": int(by_rank[:, 2].max()),
                "time": time.time(),
            }
            self._file.write(json.dumps(line) + "\n")
        self._since, self._cpu = now, cpu_seconds()

    def _peak_bytes(self) -> int:
        """CUDA: peak of allocated bytes; CPU: peak of resident bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
