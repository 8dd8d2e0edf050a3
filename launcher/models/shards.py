"""This rank's part of a tensor that FSDP shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from launcher.models.nf4 import is_packed, quantize, shape_of


def chunk(size: int, parts: int, number: int) -> range:
    """The part with this number of a dimension that DTensors divide, like torch.chunk; the last
    parts may be empty."""
    width = -(-size // parts)
    return range(min(number * width, size), min((number + 1) * width, size))


def chunks(size: int, parts: int) -> list[range]:
    """All parts of a dimension that DTensors divide."""
    return [chunk(size, parts, number) for number in range(parts)]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; autograd follows it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's part of a tensor, and the row (of dimension 0) of the whole where it starts."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    return tensor.to_local(), _local_range(tensor, 0).start


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this rank's parts of these tensors. Tensors with one storage count several times."""
    return sum(local_part(tensor.detach()).nbytes for tensor in tensors)


def local_columns(tensor: torch.Tensor) -> range | None:
    """This rank's part of dimension 1, which tensor parallelism may divide; None: all of it. Of a
    weight in NF4, it is in numbers, not in bytes."""
    if isinstance(tensor, DTensor) and any(getattr(p, "dim", 0) == 1 for p in tensor.placements):
        part, size, width = _local_range(tensor, 1), tensor.shape[1], shape_of(tensor)[1]
        return range(part.start * width // size, part.stop * width // size)
    return None


def takes_whole_rows(tensor: torch.Tensor) -> bool:
    """Whether `write` needs whole rows of values for this rank's part of a tensor: all of a row's
    numbers decide on its scale in NF4."""
    return is_packed(tensor) or local_columns(tensor) is None


def _local_range(tensor: DTensor, dimension: int) -> range:
    mesh, part = tensor.device_mesh, range(tensor.shape[dimension] if tensor.ndim else 1)
    # The last dimension of the mesh splits first. fully_shard splits what expert or tensor
    # parallelism has left
    for index in reversed(range(mesh.ndim)):
        if getattr(tensor.placements[index], "dim", None) == dimension:
            own = chunk(len(part), mesh.size(index), mesh.get_local_rank(index))
            part = part[own.start : own.stop]
    return part


def copy_local_rows(target: torch.Tensor, values: torch.Tensor, begin: int = 0) -> None:
    """Copies this rank's part from `values`: the whole tensor, or its rows from `begin` on."""
    local, row = local_rows(target)
    if local.ndim:
        values = values[row - begin : row - begin + len(local)]
    write(local, values, local_columns(target))


def write(local: torch.Tensor, values: torch.Tensor, columns: range | None = None) -> None:
    """Copies values, or some columns of them, to a parameter or buffer, or rows of it; to one in NF4
    they are quantized."""
    width = (values.shape[-1] if columns is None else len(columns)) if values.ndim else 1
    # Bytes that are no weight in NF4 have the shape of their values
    if is_packed(local) and local.shape[-1] != width:
        quantize(values, local, columns)
    else:
        local.copy_(values if columns is None else values[:, columns.start : columns.stop])


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


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor on the device that computes with it. All ranks that shard it must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: torch.Tensor = tensor.to(compute_device(tensor)).full_tensor()  # type: ignore[attr-defined]
    return whole


def compute_device(tensor: torch.Tensor) -> torch.device:
    """The device that computes with a tensor, also if its shard is offloaded to host memory."""
    if isinstance(tensor, DTensor):
        return torch.device(tensor.device_mesh.device_type)
    return tensor.device
