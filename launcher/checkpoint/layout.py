"""Which rank writes what, where it lies, and how the tensors are found again. torch.distributed.checkpoint plans; the
files and the index are ours: safetensors and JSON, so that nothing that is read can execute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from launcher.checkpoint.files import rank_file
from launcher.models.safetensors_files import DTYPE_NAMES, DTYPES, Shape, make_header

ALIGNMENT = 4096
"""Of the data in a file, for writing past the page cache."""
LOCAL = "local."
"""Before the names of what is a rank's own."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Layout:
    """A rank's file, byte for byte, but for the values; and on rank 0 the index of all."""

    header: bytes
    places: dict[str, tuple[int, int]]
    """For each name the first byte and the number of bytes."""
    size: int
    """Of the file."""
    index: bytes | None
    """index.json."""


def signature(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """Changes where a layout would."""
    return tuple((name, tensor.shape, tensor.dtype, getattr(tensor, "placements", None)) for name, tensor in tensors.items())


def plan(tensors: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> Layout:
    """Agrees with the other ranks on who writes what: each part of a tensor once. All ranks of `group` must call it."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
    mine = planner.create_local_plan()
    plans: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, plans, group=group, group_dst=0)
    metadata: Metadata | None = None
    if plans is not None:
        try:
            plans, metadata = planner.create_global_plan(plans)
        except Exception as error:  # the others wait for an answer
            plans = [error] * size
    received: list[Any] = [None]
    dist.scatter_object_list(received, plans, group=group, group_src=0)
    if isinstance(received[0], Exception):
        raise received[0]
    items = received[0].items
    parts = {item.index.fqn: local_part(tensors[item.index.fqn]) for item in items}
    assert len(parts) == len(items), "a rank holds one part of a tensor"
    values = {**parts, **{LOCAL + name: tensor for name, tensor in local.items()}}
    widest_first = sorted(values, key=lambda name: -values[name].dtype.itemsize)
    shapes = {name: Shape.of(values[name]) for name in widest_first}
    header, places = make_header(shapes, alignment=ALIGNMENT)
    found = [(item.index.fqn, list(item.index.offset), list(parts[item.index.fqn].shape), places[item.index.fqn][0]) for item in items]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(found, gathered, group=group, group_dst=0)
    index = None
    if gathered is not None and metadata is not None:
        index = _index(metadata, gathered)
    return Layout(header, places, len(header) + sum(size for _, size in places.values()), index)


def _index(metadata: Metadata, gathered: Sequence[Sequence[tuple[str, list[int], list[int], int]]]) -> bytes:
    tensors: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        tensors[name] = {"dtype": DTYPE_NAMES[entry.properties.dtype], "shape": list(entry.size), "parts": []}
    for rank, parts in enumerate(gathered):
        for name, offsets, sizes, at in parts:
            tensors[name]["parts"].append([rank_file(rank), at, offsets, sizes])
    return json.dumps({"tensors": tensors}, separators=(",", ":")).encode()


def read_index(text: bytes) -> Metadata:
    """What torch.distributed.checkpoint wants to know of a checkpoint; `storage_data` has file and first byte of each part.

    Raises ValueError, KeyError or TypeError for what is no index.
    """
    described: dict[str, Any] = {}
    storage: dict[MetadataIndex, tuple[str, int]] = {}
    for name, entry in json.loads(text)["tensors"].items():
        shape, chunks = _shape(entry["shape"]), []
        for file, at, offsets, sizes in entry["parts"]:
            chunk = ChunkStorageMetadata(offsets=_shape(offsets), sizes=_shape(sizes))
            if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
                raise ValueError(f"{name} has a part of another shape")
            if any(start + size > whole for start, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
                raise ValueError(f"{name} has a part outside of it")
            chunks.append(chunk)
            storage[MetadataIndex(name, chunk.offsets)] = (str(file), int(at))
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
            raise ValueError(f"{name} is not whole")
        described[name] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry["dtype"]]), shape, chunks)
    return Metadata(state_dict_metadata=described, storage_data=storage)


def _shape(numbers: Any) -> torch.Size:
    if not isinstance(numbers, list) or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r} is no shape")
    return torch.Size(numbers)
