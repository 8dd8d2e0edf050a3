"""Whether ranks that hold the same parameters hold the same bits: under ddp all ranks, with hybrid
sharding the ranks that hold the same shard."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from launcher.distributed.process_group import all_gather_single, gather
from launcher.errors import TrainingError
from launcher.models.safetensors_files import Tensors
from launcher.models.shards import local_columns, local_rows

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers by the bytes of an element. A longer element is read as several integers."""
_FACTOR, _BITS = 0x9E3779B97F4A7C15, (1 << 63) - 1
"""Each parameter's sum is multiplied by a different power, so that an exchange of two parameters is
found."""


class Replicas:
    """The parameters of this rank, and the ranks that hold the same ones."""

    def __init__(self, tensors: Tensors, group: dist.ProcessGroup) -> None:
        """`tensors`: the result of `model_and_optimizer`. Every rank of the group must call
        this."""
        self._parameters = {
            name.removeprefix("model."): tensor
            for name, tensor in tensors.items()
            if name.startswith("model.")
        }
        self._group = group
        parts = []
        for name, tensor in self._parameters.items():
            (local, row), columns = local_rows(tensor), local_columns(tensor)
            parts.append((name, row, columns and columns.start, tuple(local.shape)))
        self._own = zlib.crc32(repr(parts).encode())
        self._parts = gather(self._own, group)

    @property
    def exist(self) -> bool:
        """Whether any two ranks hold the same parameters."""
        return len(set(self._parts)) < len(self._parts)

    def check(self) -> None:
        """Compares checksums, if any two ranks hold the same parameters. Every rank must call this.
        Raises TrainingError on every rank, with the parameters and ranks that differ."""
        if not self.exist:
            return
        sums = self._sums()
        own = 0
        for value in sums.values():
            own = (own + value) * _FACTOR & _BITS
        mine = torch.tensor([own])
        found = torch.empty(len(self._parts), dtype=torch.int64)
        all_gather_single(found, mine, group=self._group)
        self._compare(found.tolist(), sums)

    def _compare(self, checksums: list[int], sums: dict[str, int]) -> None:
        first: dict[int, int] = {}
        every = zip(self._parts, checksums, strict=True)
        if any(first.setdefault(part, checksum) != checksum for part, checksum in every):
            everyone = gather((self._own, sums), self._group)
            raise TrainingError(_describe(everyone), reason="replicas_differ")

    @torch.no_grad()
    def _sums(self) -> dict[str, int]:
        """The sum of the bits of each parameter, read as integers: in any order the same."""
        sums = []
        for tensor in self._parameters.values():
            local = local_rows(tensor)[0].flatten()
            bits = local.view(_INTEGERS.get(local.element_size(), torch.int32))
            if local.nbytes % 8 == local.storage_offset() * local.element_size() % 8 == 0:
                bits = bits.view(torch.int64)  # several at once: ten times as fast on CPUs
            sums.append(bits.sum(dtype=torch.int64))
        values = torch.stack(sums).tolist() if sums else []
        return dict(zip(self._parameters, values, strict=True))


def _describe(everyone: Sequence[tuple[int, Mapping[str, int]]]) -> str:
    """Says which parameters differ, and on which ranks. `everyone` has the part and the sums of
    each rank."""
    names: dict[str, None] = {}
    ranks: dict[int, None] = {}
    first: dict[int, int] = {}
    for rank, (part, sums) in enumerate(everyone):
        other = first.setdefault(part, rank)
        differing = [name for name, value in sums.items() if everyone[other][1][name] != value]
        names |= dict.fromkeys(differing)
        ranks |= dict.fromkeys([other, rank] if differing else [])
    some = ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "")
    listed = ", ".join(map(str, list(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")
    return (
        f"ranks {listed} hold copies of the same parameters, but with other values: {len(names)} of "
        f"{len(everyone[0][1])} parameters ({some}). Faulty hardware, or code that changes "
        "parameters on some ranks only, does that; the older checkpoints were compared and are good"
    )
