"""The ranks that train one model together, and what each of them computes and holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The ranks that train one model together: all, or some in the self-test; in a memory plan, a
    group that does not exist.

    Ranks are numbered as replicate x shard x context parallel x tensor parallel, the last ones
    neighbours, because they exchange most.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    """All ranks of the layout. Losses and tokens are summed over them."""
    device: torch.device
    waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """A context that is entered while compute waits for the other ranks; a run passes a timer."""

    context_parallel_size: int = 1
    """Ranks that compute parts of the same sequences."""
    context_parallel_group: dist.ProcessGroup | None = None
    """The ranks that compute parts of this rank's sequences; None: it computes whole ones."""
    tensor_parallel_size: int = 1
    """Ranks that hold parts of the same layers, and compute the same tokens."""

    def with_sizes(self, context_parallel_size: int, tensor_parallel_size: int = 1) -> RankLayout:
        """The same ranks in a layout of these sizes. Every rank must call this."""
        group = None
        if context_parallel_size > 1:
            group = self.group
            if context_parallel_size < self.size:
                last = {"tensor": tensor_parallel_size} if tensor_parallel_size > 1 else {}
                mesh = self._mesh(data=-1, context=context_parallel_size, **last)
                group = mesh.get_group("context")
        return replace(
            self,
            context_parallel_size=context_parallel_size,
            context_parallel_group=group,
            tensor_parallel_size=tensor_parallel_size,
        )

    def mesh_with(self, *, replicate: int, **last: int) -> DeviceMesh:
        """The same ranks as (replicate, shard, X), for a dimension X of some neighbours: those that
        hold different experts, or parts of the same layers. The ranks along `shard` hold the same
        ones. Every rank must call this."""
        return self._mesh(replicate=replicate, shard=-1, **last)

    def _mesh(self, **sizes: int) -> DeviceMesh:
        members = torch.tensor(dist.get_process_group_ranks(self.group)).view(*sizes.values())
        return DeviceMesh(self.device.type, members, mesh_dim_names=tuple(sizes))

    @property
    def data_parallel_rank(self) -> int:
        """The number of this rank's part of a global batch's sequences, from 0 to
        `data_parallel_size` - 1."""
        return self.rank // (self.context_parallel_size * self.tensor_parallel_size)

    @property
    def data_parallel_size(self) -> int:
        """The number of parts into which the sequences of a global batch are divided."""
        return self.size // (self.context_parallel_size * self.tensor_parallel_size)

    @property
    def context_parallel_rank(self) -> int:
        """The number of this rank's part of each sequence, from 0 to `context_parallel_size` - 1."""
        return self.rank // self.tensor_parallel_size % self.context_parallel_size

    @property
    def tensor_parallel_rank(self) -> int:
        """The number of this rank's part of each layer, from 0 to `tensor_parallel_size` - 1. Sums
        over all ranks count the tokens of those with number 0."""
        return self.rank % self.tensor_parallel_size
