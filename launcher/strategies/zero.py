"""ZeRO-1 (Rajbhandari et al., 2020): every rank holds whole parameters and whole reduced gradients,
but the optimizer state of its rows alone. It updates these rows, and the ranks gather them.

The optimizer's parameters are DTensors as of FSDP, so optimizers and checkpoints treat both alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

Pairs = list[tuple[nn.Parameter, Any]]
"""Each whole parameter with its shard (of `shard_rows`), which is the optimizer's."""


def shard_rows(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A view of this rank's rows as a DTensor, divided as by FSDP; a scalar itself."""
    if not whole.ndim:
        return whole
    size, rank = mesh.size(), mesh.get_local_rank()
    chunk = -(-whole.shape[0] // size)
    mine = whole.detach()[rank * chunk : (rank + 1) * chunk]
    sharded: torch.Tensor = DTensor.from_local(
        mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return sharded


def shard_update(optimizer: torch.optim.Optimizer, pairs: Pairs) -> None:
    """Makes the optimizer's step read gradients of whole parameters, update shards, gather them,
    and free the gradients."""
    pairs = [(whole, shard) for whole, shard in pairs if isinstance(shard, DTensor)]
    optimizer.register_step_pre_hook(partial(_shard_gradients, pairs))
    optimizer.register_step_post_hook(partial(_gather, pairs))


def _shard_gradients(pairs: Pairs, *unused: Any) -> None:
    for whole, shard in pairs:
        if whole.grad is not None:
            shard.grad = shard_rows(whole.grad, shard.device_mesh)


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renames it."""


@torch.no_grad()
def _gather(pairs: Pairs, *unused: Any) -> None:
    works = []
    for whole, shard in pairs:
        whole.grad = None
        group, mine = shard.device_mesh.get_group(), shard.to_local()
        if whole.shape[0] % group.size() == 0 and whole.is_contiguous():
            works.append(_all_gather(whole.detach(), mine, group, async_op=True))
            continue
        chunk = -(-whole.shape[0] // group.size())
        rows = whole.new_empty(group.size() * chunk, *whole.shape[1:])
        padded = rows[group.rank() * chunk :][:chunk]
        padded[: len(mine)] = mine
        _all_gather(rows, padded, group)
        whole.copy_(rows[: len(whole)])
    for work in works:
        work.wait()
