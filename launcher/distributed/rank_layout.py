"""The ranks that train one model together: the sizes of their groups, and what each rank computes
and holds.

The recipe is checked with these sizes, so importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class ParallelSize:
    """A key of the recipe's `strategy` for the number of neighbouring ranks that compute one model
    in parallel. `recipe/rules.py` has what it needs of other keys. What it needs of the model is
    checked where it is implemented, in `models`."""

    key: str
    divides: str
    """What the ranks have parts of."""
    same_sequences: bool
    """Whether the ranks compute the same sequences, and are one data parallel rank together."""

    @property
    def term(self) -> str:
        """What this is called in messages."""
        return self.key.removesuffix("_size").replace("_", " ")


CONTEXT = ParallelSize(key="context_parallel_size", divides="sequences", same_sequences=True)
EXPERT = ParallelSize(key="expert_parallel_size", divides="experts", same_sequences=False)
TENSOR = ParallelSize(key="tensor_parallel_size", divides="layers", same_sequences=True)
PARALLEL_SIZES = (CONTEXT, EXPERT, TENSOR)


class Strategy(Protocol):
    """What a layout reads of the section `strategy` of a recipe."""

    @property
    def replicate(self) -> int:
        """`LayoutSizes.replicate`."""

    @property
    def context_parallel_size(self) -> int:
        """`LayoutSizes.context_parallel_size`."""

    @property
    def expert_parallel_size(self) -> int:
        """`LayoutSizes.expert_parallel_size`."""

    @property
    def tensor_parallel_size(self) -> int:
        """`LayoutSizes.tensor_parallel_size`."""


def sizes_of(strategy: Strategy) -> dict[str, int]:
    """The fields of `LayoutSizes` that a recipe names."""
    return {
        "replicate": strategy.replicate,
        "context_parallel_size": strategy.context_parallel_size,
        "expert_parallel_size": strategy.expert_parallel_size,
        "tensor_parallel_size": strategy.tensor_parallel_size,
    }


@dataclass(frozen=True, kw_only=True)
class LayoutSizes:
    """The number of ranks, and the sizes of the groups into which the recipe divides them.

    Ranks are numbered as replicate x shard x context parallel x tensor parallel, the last ones
    neighbours, because they exchange most. FSDP shards over the context parallel ranks, too. Ranks
    that hold different experts are neighbours among the ranks that shard: they compute different
    tokens, and hold parts of the same other parameters.
    """

    size: int
    """All ranks."""
    replicate: int = 1
    """Copies of the sharded model."""
    context_parallel_size: int = 1
    """Ranks that compute parts of the same sequences."""
    expert_parallel_size: int = 1
    """Ranks that hold different experts."""
    tensor_parallel_size: int = 1
    """Ranks that hold parts of the same layers, and compute the same tokens."""

    @property
    def data_parallel_size(self) -> int:
        """The number of parts into which the sequences of a global batch are divided."""
        return max(1, self.size // math.prod(size for _, size in self.same_sequences))

    @property
    def same_sequences(self) -> list[tuple[ParallelSize, int]]:
        """The sizes above 1 of groups whose ranks compute the same sequences."""
        sizes = [(each, getattr(self, each.key)) for each in PARALLEL_SIZES if each.same_sequences]
        return [(each, size) for each, size in sizes if size > 1]

    @property
    def tensor_parallel_groups(self) -> int:
        """The number of tensor parallel groups, each of which computes as one rank would. Gradients
        are averaged over them."""
        return max(1, self.size // self.tensor_parallel_size)

    @property
    def shard_size(self) -> int:
        """The number of ranks over which FSDP shards a parameter, or a rank's part of it."""
        return max(1, self.size // (self.replicate * self.tensor_parallel_size))

    def allows_replicas(self, replicate: int) -> bool:
        """Whether the ranks can hold this number of copies of the sharded model."""
        return self.size % (replicate * self.expert_parallel_size * self.tensor_parallel_size) == 0

    def problems(self) -> Iterator[tuple[str, str]]:
        """The sizes that do not divide the ranks: keys of the recipe's `strategy`, and why not."""
        ranks = self.size
        counts = {"replicate": ranks, CONTEXT.key: ranks}
        counts[EXPERT.key] = counts[TENSOR.key] = ranks // self.replicate
        found = False
        for key, count in counts.items():
            size = getattr(self, key)
            if count % size:
                divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
                what = f"{count} (ranks{' of a copy' if count < ranks else ''})"
                yield key, f"{size} does not divide {what}; try one of {divisors}"
                found = True
        context, tensor = self.context_parallel_size, self.tensor_parallel_size
        if ranks % (context * tensor) and not found:
            sizes = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % (n * context) == 0)
            what = f"{tensor} x {context} (strategy.{CONTEXT.key}) does not divide {ranks} (ranks)"
            yield TENSOR.key, f"{what}; try one of {sizes}"


def layout_sizes(strategy: Strategy, *, ranks: int) -> LayoutSizes:
    """The sizes that a recipe names, on this number of ranks."""
    return LayoutSizes(size=ranks, **sizes_of(strategy))


@dataclass(frozen=True, kw_only=True)
class RankLayout(LayoutSizes):
    """The ranks that train one model together: all, or some in the self-test; in a memory plan, a
    group that does not exist. Groups and meshes are made when they are first read, which every rank
    must do."""

    rank: int
    group: dist.ProcessGroup
    """All ranks of the layout. Losses and tokens are summed over them."""
    device: torch.device
    waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """A context that is entered while compute waits for the other ranks; a run passes a timer."""

    def with_sizes(self, strategy: Strategy) -> RankLayout:
        """A layout of these ranks with the parallel sizes of a recipe's strategy."""
        sizes: Any = sizes_of(strategy)
        return replace(self, **sizes)

    @property
    def data_parallel_rank(self) -> int:
        """The number of this rank's part of a global batch's sequences, from 0 to
        `data_parallel_size` - 1."""
        return self.rank // (self.context_parallel_size * self.tensor_parallel_size)

    @property
    def context_parallel_rank(self) -> int:
        """The number of this rank's part of each sequence, from 0 to `context_parallel_size` - 1."""
        return self.rank // self.tensor_parallel_size % self.context_parallel_size

    @property
    def tensor_parallel_rank(self) -> int:
        """The number of this rank's part of each layer, from 0 to `tensor_parallel_size` - 1. Sums
        over all ranks count the tokens of the ranks with number 0."""
        return self.rank % self.tensor_parallel_size

    @property
    def tensor_parallel_group_index(self) -> int:
        """The number of this rank's tensor parallel group, from 0 to `tensor_parallel_groups` - 1.
        Ranks of a group draw the same random numbers."""
        return self.rank // self.tensor_parallel_size

    @cached_property
    def context_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that compute parts of this rank's sequences."""
        if self.context_parallel_size == self.size:
            return self.group
        sizes = {"data": -1, "context": self.context_parallel_size}
        if self.tensor_parallel_size > 1:
            sizes["tensor"] = self.tensor_parallel_size
        return self._mesh(**sizes).get_group("context")

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks over which FSDP shards and replicates parameters: (shard), or (replicate,
        shard), in which the ranks of a node shard. With tensor parallelism, only the ranks that
        hold the same part of each layer as this rank."""
        from torch.distributed.device_mesh import DeviceMesh

        if self.tensor_parallel_size > 1:
            return _without_last(self.tensor_parallel_mesh)
        if self.replicate > 1:
            return self._mesh(replicate=self.replicate, shard=-1)
        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("shard",))

    @cached_property
    def expert_parallel_mesh(self) -> DeviceMesh:
        """(replicate, shard, expert): ranks along `expert` hold different experts."""
        return self._mesh(replicate=self.replicate, shard=-1, expert=self.expert_parallel_size)

    @cached_property
    def same_experts_mesh(self) -> DeviceMesh:
        """The ranks with the same experts as this rank, as in `shard_mesh`."""
        return _without_last(self.expert_parallel_mesh)

    @cached_property
    def tensor_parallel_mesh(self) -> DeviceMesh:
        """(replicate, shard, tensor): ranks along `tensor` hold parts of the same layers."""
        return self._mesh(replicate=self.replicate, shard=-1, tensor=self.tensor_parallel_size)

    def _mesh(self, **sizes: int) -> DeviceMesh:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        members = torch.tensor(dist.get_process_group_ranks(self.group)).view(*sizes.values())
        return DeviceMesh(self.device.type, members, mesh_dim_names=tuple(sizes))


def _without_last(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["replicate", "shard"] if mesh.size(0) > 1 else mesh["shard"]
