"""Which rank writes which rows of each tensor, and where they lie in the files.

The tensors are safetensors and the index is JSON, so reading a checkpoint cannot execute code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.checkpoint.files import ALIGNMENT, rank_file
from launcher.models.safetensors_files import DTYPE_NAMES, DTYPES, Shape, make_header
from launcher.models.shards import local_rows

LOCAL = "local."
"""Prefix of the names of a rank's own tensors."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; a plain tensor itself."""
    return local_rows(tensor)[0].detach()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Layout:
    """Where everything lies in this rank's file; on rank 0 also the index of all files."""

    header: bytes
    spans: dict[str, tuple[int, int]]
    """First byte and number of bytes of each tensor."""
    size: int
    """Of the file."""
    index: bytes | None
    """Content of index.json."""


def signature(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """Changes if the layout would change."""
    return tuple(
        (name, tensor.shape, tensor.dtype, getattr(tensor, "placements", None))
        for name, tensor in tensors.items()
    )


def plan(
    tensors: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor], group: dist.ProcessGroup
) -> Layout:
    """Plans the files. All ranks of `group` must call it. local: this rank's own tensors."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = {name: local_part(tensors[name]) for name in _written_by(rank, size, tensors)}
    values = {**parts, **{LOCAL + name: tensor for name, tensor in local.items()}}
    widest_first = sorted(values, key=lambda name: -values[name].dtype.itemsize)
    shapes = {name: Shape.of(values[name]) for name in widest_first}
    header, spans = make_header(shapes, alignment=ALIGNMENT)
    # A part: file, first byte, first row and number of rows; a scalar is one row
    mine = {
        name: [rank_file(rank), spans[name][0], local_rows(tensors[name])[1], _rows(part)]
        for name, part in parts.items()
    }
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, gathered, group=group, group_dst=0)
    index = None
    if gathered is not None:
        entries = {
            name: {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "parts": [parts[name] for parts in gathered if name in parts],
            }
            for name, tensor in tensors.items()
        }
        index = json.dumps(entries, separators=(",", ":")).encode()
    return Layout(header, spans, len(header) + sum(count for _, count in spans.values()), index)


def _rows(part: torch.Tensor) -> int:
    return part.shape[0] if part.ndim else 1


def _written_by(rank: int, ranks: int, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that this rank writes its part of.

    Several ranks have the same rows of a plain tensor or of a hybrid-sharded one. The one with the
    fewest bytes so far writes them. Each rank computes the same assignment.
    """
    loads: dict[int, list[int]] = {}
    names = []
    sizes = {name: tensor.numel() * tensor.itemsize for name, tensor in tensors.items()}
    for name in sorted(tensors, key=lambda name: (-sizes[name], name)):
        tensor = tensors[name]
        copies, copy = ranks, rank
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            hybrid = mesh.ndim == 2
            copies, copy = (mesh.size(0), mesh.get_local_rank(0)) if hybrid else (1, 0)
        load = loads.setdefault(copies, [0] * copies)
        writer = load.index(min(load))
        load[writer] += sizes[name]
        if writer == copy and local_part(tensor).numel():
            names.append(name)
    return names


@dataclass(frozen=True)
class Part:
    """Consecutive rows (of dimension 0) of a stored tensor."""

    file: str
    at: int
    """First byte in the file."""
    first: int
    rows: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: Shape
    parts: list[Part]


def read_index(text: bytes) -> dict[str, StoredTensor]:
    """The tensors in index.json. Raises ValueError, LookupError or TypeError if it is no index."""
    return {
        name: StoredTensor(
            Shape(tuple(entry["shape"]), DTYPES[entry["dtype"]]),
            [Part(*part) for part in entry["parts"]],
        )
        for name, entry in json.loads(text).items()
    }
