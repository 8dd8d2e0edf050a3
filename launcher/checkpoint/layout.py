"""Which rank writes which rows of each tensor, and where they lie in the files.

The tensors are safetensors and the index is JSON, so reading a checkpoint cannot execute code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.checkpoint.direct_io import ALIGNMENT
from launcher.checkpoint.files import rank_file
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
    tensors: Mapping[str, torch.Tensor],
    local: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
) -> Layout:
    """Plans the files. All ranks of `group` must call it. local: this rank's own tensors."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    written = _written_here(tensors, rank, size)
    parts = {name: local_part(tensors[name]) for name in written}
    values = {**parts, **{LOCAL + name: tensor for name, tensor in local.items()}}
    widest_first = sorted(values, key=lambda name: -values[name].dtype.itemsize)
    shapes = {name: Shape.of(values[name]) for name in widest_first}
    header, spans = make_header(shapes, alignment=ALIGNMENT)
    found = []
    for name, part in parts.items():
        first = local_rows(tensors[name])[1]
        offsets = [first, *[0] * (part.ndim - 1)] if part.ndim else []
        found.append((name, [rank_file(rank), spans[name][0], offsets, list(part.shape)]))
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(found, gathered, group=group, group_dst=0)
    index = None if gathered is None else _index(tensors, gathered)
    return Layout(header, spans, len(header) + sum(count for _, count in spans.values()), index)


def _written_here(tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> list[str]:
    """Names of the tensors that this rank writes its part of.

    Several ranks have the same rows of a plain tensor or of a hybrid-sharded one. One of them
    writes these: the one with the fewest bytes so far. Each rank computes the same assignment.
    """
    loads: dict[int, list[int]] = {}
    names = []
    for name in sorted(
        tensors, key=lambda name: (-tensors[name].numel() * tensors[name].itemsize, name)
    ):
        tensor = tensors[name]
        copies, copy = ranks, rank
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            hybrid = mesh.ndim == 2
            copies, copy = (mesh.size(0), mesh.get_local_rank(0)) if hybrid else (1, 0)
        load = loads.setdefault(copies, [0] * copies)
        writer = load.index(min(load))
        load[writer] += tensor.numel() * tensor.itemsize
        if writer == copy and local_part(tensor).numel():
            names.append(name)
    return names


def _index(
    tensors: Mapping[str, torch.Tensor], gathered: Sequence[Sequence[tuple[str, Any]]]
) -> bytes:
    index: dict[str, Any] = {
        name: {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "parts": []}
        for name, tensor in tensors.items()
    }
    for parts in gathered:
        for name, part in parts:
            index[name]["parts"].append(part)
    return json.dumps({"tensors": index}, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Part:
    """Consecutive rows (of dimension 0) of a stored tensor. A scalar is one row."""

    first: int
    rows: int
    file: str
    at: int
    """First byte in the file."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: Shape
    parts: list[Part]


def read_index(text: bytes) -> dict[str, StoredTensor]:
    """The tensors in index.json. Raises ValueError, KeyError or TypeError if it is no index."""
    found: dict[str, StoredTensor] = {}
    for name, entry in json.loads(text)["tensors"].items():
        shape, parts = _sizes(entry["shape"]), []
        for file, at, offsets, sizes in entry["parts"]:
            start, size = _sizes(offsets), _sizes(sizes)
            if len(start) != len(shape) or size[1:] != shape[1:] or any(start[1:]):
                raise ValueError(f"{name} has a part of another shape")
            first, rows = (start[0], size[0]) if shape else (0, 1)
            if shape and first + rows > shape[0]:
                raise ValueError(f"{name} has a part outside of it")
            parts.append(Part(first, rows, str(file), int(at)))
        if math.prod(shape) and sum(part.rows for part in parts) != (shape[0] if shape else 1):
            raise ValueError(f"{name} is not complete")
        found[name] = StoredTensor(Shape(shape, DTYPES[entry["dtype"]]), parts)
    return found


def _sizes(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(
        isinstance(number, int) and number >= 0 for number in numbers
    ):
        raise ValueError(f"{numbers!r} is no shape")
    return tuple(numbers)
