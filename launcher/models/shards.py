"""This rank's part of a tensor that FSDP shards."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from launcher.models.nf4 import is_packed, quantize


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's part of a tensor, and the row (of dimension 0) of the whole where it starts."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh, first, rows = tensor.device_mesh, 0, tensor.shape[0]
    # The last dimension of the mesh splits first, like torch.chunk. fully_shard splits what expert
    # parallelism has left
    for index in reversed(range(mesh.ndim)):
        if not tensor.placements[index].is_replicate():
            chunk = -(-rows // mesh.size(index))
            begin = min(mesh.get_local_rank(index) * chunk, rows)
            first, rows = first + begin, min(chunk, rows - begin)
    return tensor.to_local(), first


def copy_local_rows(target: torch.Tensor, values: torch.Tensor, begin: int = 0) -> None:
    """Copies this rank's rows from `values`: the whole tensor, or its rows from `begin` on."""
    local, row = local_rows(target)
    write(local, values[row - begin : row - begin + len(local)] if local.ndim else values)


def write(local: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values to a parameter or buffer, or rows of it; to one in NF4 they are quantized."""
    if is_packed(local) and values.is_floating_point():
        quantize(values, local)
    else:
        local.copy_(values)


def sharded_zeros(like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """float32 zeros of another shape with as many rows, sharded as `like`."""
    local = local_rows(like.detach())[0]
    zeros = torch.zeros(len(local), *shape[1:], device=local.device)
    if not isinstance(like, DTensor):
        return zeros
    mesh, stride = like.device_mesh, torch.empty(shape, device="meta").stride()
    sharded: torch.Tensor = DTensor.from_local(
        zeros, mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return sharded


def compute_device(tensor: torch.Tensor) -> torch.device:
    """The device that computes with a tensor, also if its shard is offloaded to host memory."""
    if isinstance(tensor, DTensor):
        return torch.device(tensor.device_mesh.device_type)
    return tensor.device
