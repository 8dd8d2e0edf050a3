"""Which rank writes which rows of each tensor, and where they lie in its safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.distributed.process_group import gather
from launcher.files import ALIGNMENT
from launcher.models.safetensors_files import DTYPES, Tensors
from launcher.models.shards import local_columns, local_rows

LOCAL = "local."
"""Prefix of the names of a rank's own tensors."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of this rank's part of a tensor; a view where it is contiguous."""
    return local_rows(tensor)[0].contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Holders:
    """Which ranks hold which tensors."""

    ranks: range
    """The ranks that hold this rank's tensors: the first one has the number 0 among them."""
    every: Mapping[str, torch.Tensor]
    """The dtypes and shapes of the tensors of all ranks, on the meta device."""
    elsewhere: Set[str] = frozenset()
    """Names of this rank's tensors that other ranks write, too: a pipeline's first stage and its last
    one have the same embedding."""


def holders(tensors: Tensors, *, stage: range, group: dist.ProcessGroup) -> Holders:
    """Finds out which ranks of the group hold which tensors. All of them must call it. stage: this
    rank's neighbours, which hold the same tensors as this rank."""
    if len(stage) == dist.get_world_size(group):
        return Holders(stage, tensors)
    first = dist.get_rank(group) == stage.start
    mine = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} if first else {}
    every: dict[str, torch.Tensor] = {}
    elsewhere: Set[str] = frozenset()
    for rank, found in enumerate(gather(mine, group)):
        if rank == stage.start:
            elsewhere = every.keys() & tensors.keys()
        for name, (dtype, shape) in found.items():
            every.setdefault(name, torch.empty(shape, dtype=dtype, device="meta"))
    return Holders(stage, every, elsewhere)


Box = tuple[int, ...]
"""First row and number of rows of a part; then first column and number of columns, unless it has
all. Empty: no part."""


class Written(NamedTuple):
    """The boxes of the tensors that a rank writes."""

    boxes: Sequence[Box]
    """Each once; the first one is empty."""
    numbers: Sequence[int]
    """The number of the box of each tensor of all ranks, by sorted names."""


def written_boxes(boxes: Mapping[str, Box], names: Iterable[str]) -> Written:
    """What a rank writes with these boxes. names: the tensors of all ranks."""
    number_of: dict[Box, int] = {(): 0}
    numbers = [number_of.setdefault(boxes.get(name, ()), len(number_of)) for name in sorted(names)]
    return Written([*number_of], numbers)


@dataclass(frozen=True)
class Layout:
    """What this rank writes."""

    header: bytes
    starts: dict[str, int]
    """First byte of each tensor, in order."""
    size: int
    """Size of the file in bytes."""
    written: Written
    every: Tensors
    """`Holders.every`."""


def plan(
    tensors: Tensors, local: Tensors, group: dist.ProcessGroup, held: Holders | None = None
) -> Layout:
    """Plans this rank's file; `local` are its own tensors. held: None: all ranks of `group` hold
    these tensors."""
    held = held or Holders(range(dist.get_world_size(group)), tensors)
    own = {name: tensor for name, tensor in tensors.items() if name not in held.elsewhere}
    names = _written_by(dist.get_rank(group) - held.ranks.start, len(held.ranks), own)
    rows = {name: local_rows(tensors[name]) for name in names}
    parts = {name: part for name, (part, _) in rows.items()}
    boxes: dict[str, Box] = {
        name: (first, len(part) if part.ndim else 1, *_columns(tensors[name]))
        for name, (part, first) in rows.items()
    }
    layout = _lay_out(parts | {LOCAL + name: tensor for name, tensor in local.items()})
    return Layout(*layout, written_boxes(boxes, held.every), held.every)


def index_of(every: Tensors, written: Sequence[Written]) -> bytes:
    """The content of index.json. every: the tensors of all ranks. written: what each rank writes.

    Tensors with the same parts share one list of them. A model has few such lists, because the parts
    follow from the rows, the division and the writer. With a list for each tensor, the index of 70B
    parameters on 1,024 ranks would have 72 MiB.
    """
    lists: dict[tuple[int, ...], int] = {}
    tensors = {}
    columns = zip(*(rank.numbers for rank in written), strict=True)
    for name, numbers in zip(sorted(every), columns, strict=True):
        tensor, parts = every[name], lists.setdefault(numbers, len(lists))
        shape = list(tensor.shape)
        tensors[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "parts": parts}
    parts_of_lists = [
        [[rank, *written[rank].boxes[number]] for rank, number in enumerate(numbers) if number]
        for numbers in lists
    ]
    index = {"parts": parts_of_lists, "tensors": tensors}
    return json.dumps(index, separators=(",", ":")).encode()


def _columns(tensor: torch.Tensor) -> list[int]:
    """First column and number of columns of this rank's part; nothing if it has all."""
    columns = local_columns(tensor)
    return [] if columns is None else [columns.start, len(columns)]


def _lay_out(tensors: Tensors) -> tuple[bytes, dict[str, int], int]:
    """The header of a safetensors file, the first byte of each tensor, and the file's size.

    Tensors lie without gaps, so those with wider elements come first.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].itemsize):
        tensor, start = tensors[name], end
        end += tensor.nbytes
        shape, offsets = list(tensor.shape), [start, end]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    first = len(text) + 8
    starts = {name: first + header[name]["data_offsets"][0] for name in header if name in tensors}
    return len(text).to_bytes(8, "little") + text, starts, first + end


def _written_by(rank: int, ranks: int, tensors: Tensors) -> list[str]:
    """Names of the tensors of which this rank writes its part. All ranks compute the same result.

    Several ranks hold the same part of a tensor that is plain, hybrid-sharded, or whole on tensor
    parallel ranks. Of these ranks, the one with the fewest bytes so far writes this part.
    """
    loads: dict[int, list[int]] = {}
    names = []
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        tensor = tensors[name]
        copies, copy = ranks, rank
        if isinstance(tensor, DTensor):
            mesh, hybrid = tensor.device_mesh, tensor.placements[0].is_replicate()
            # Tensor parallel ranks have meshes of their own for what each of them has whole
            copies, copy = ranks // mesh.size(), rank % (ranks // mesh.size())
            if hybrid:
                copy += copies * mesh.get_local_rank(0)
                copies *= mesh.size(0)
        load = loads.setdefault(copies, [0] * copies)
        writer = load.index(min(load))
        load[writer] += tensor.nbytes
        if writer == copy and local_rows(tensor)[0].numel():
            names.append(name)
    return names
