"""The ranks that train one model together: the sizes of their groups, and what each rank computes
and holds.

The recipe is checked with these sizes, so importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A dimension of the ranks: what its ranks have parts of, and what they have in common.

    `recipe/rules.py` has what a size above 1 needs of other keys. What it needs of the model is
    checked where it is implemented, in `models`."""

    name: str
    """Of the dimension in meshes."""
    key: str = ""
    """The key of the recipe's `strategy` with its size; empty: the ranks that the others leave."""
    divides: str = ""
    """What the ranks have parts of."""
    same_sequences: bool = False
    """Whether the ranks compute the same sequences, and are one data parallel rank together."""
    counts: Literal["each", "first", "last"] = "each"
    """Which ranks' losses and tokens are counted. first, last: the ranks compute the same tokens, and
    together what one rank would."""
    same_random_numbers: bool = False
    """Whether the ranks draw the same random numbers."""
    across_nodes: bool = False
    """Whether the ranks along it are on different nodes. They exchange little."""

    @property
    def term(self) -> str:
        """What this is called in messages."""
        return (self.key or self.name).removesuffix("_size").replace("_", " ")


OTHERS, STAGES = "other ranks", "other stages"
"""What `RankLayout.waiting` takes: STAGES where a rank of a pipeline waits for another stage."""
PIPELINE = Dimension(
    name="pipeline",
    key="pipeline_parallel_size",
    divides="blocks",
    same_sequences=True,
    counts="last",  # it computes the loss
    across_nodes=True,
)
REPLICATE = Dimension(name="replicate", key="replicate")
SHARD = Dimension(name="shard", divides="parameters")
CONTEXT = Dimension(
    name="context", key="context_parallel_size", divides="sequences", same_sequences=True
)
TENSOR = Dimension(
    name="tensor",
    key="tensor_parallel_size",
    divides="layers",
    same_sequences=True,
    counts="first",
    same_random_numbers=True,
)
DIMENSIONS = (PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR)
"""From the outermost to the innermost, whose ranks are neighbours, because they exchange most."""
EXPERT = Dimension(name="expert", key="expert_parallel_size", divides="experts")
"""Ranks that hold different experts are neighbours among the ranks along SHARD and CONTEXT: they
compute different tokens, and hold parts of the same other parameters."""
PARALLEL_SIZES = (PIPELINE, CONTEXT, EXPERT, TENSOR)
"""The dimensions that divide what the ranks compute."""


class Strategy(Protocol):
    """What a layout reads of the section `strategy` of a recipe: the fields of `LayoutSizes`."""

    @property
    def pipeline_parallel_size(self) -> int:
        """`LayoutSizes.pipeline_parallel_size`."""

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
    keys = (each.key for each in (*DIMENSIONS, EXPERT) if each.key)
    return {key: getattr(strategy, key) for key in keys}


@dataclass(frozen=True, kw_only=True)
class LayoutSizes:
    """The number of ranks, and the sizes of the groups into which the recipe divides them.

    Ranks are numbered by their coordinates along `DIMENSIONS`. FSDP shards over the ranks along SHARD
    and CONTEXT.
    """

    size: int
    """All ranks."""
    pipeline_parallel_size: int = 1
    """Stages, whose ranks hold different blocks."""
    replicate: int = 1
    """Copies of the sharded model."""
    context_parallel_size: int = 1
    """Ranks that compute parts of the same sequences."""
    expert_parallel_size: int = 1
    """Ranks that hold different experts."""
    tensor_parallel_size: int = 1
    """Ranks that hold parts of the same layers, and compute the same tokens."""

    def along(self, dimension: Dimension) -> int:
        """The number of ranks along a dimension."""
        if dimension.key:
            size: int = getattr(self, dimension.key)
            return size
        return max(1, self.size // math.prod(self.along(d) for d in DIMENSIONS if d.key))

    @property
    def data_parallel_size(self) -> int:
        """The number of parts into which the sequences of a global batch are divided."""
        return max(1, self.size // math.prod(size for _, size in self.same_sequences))

    @property
    def same_sequences(self) -> list[tuple[Dimension, int]]:
        """The dimensions with more than one rank, whose ranks compute the same sequences."""
        sizes = [(each, self.along(each)) for each in DIMENSIONS if each.same_sequences]
        return [(each, size) for each, size in sizes if size > 1]

    @property
    def computing_groups(self) -> int:
        """The number of groups of ranks that compute the same tokens, each of which computes as one
        rank would. Gradients are averaged over them."""
        together = math.prod(self.along(d) for d in DIMENSIONS if d.counts != "each")
        return max(1, self.size // together)

    @property
    def shard_size(self) -> int:
        """The number of ranks over which FSDP shards a parameter, or a rank's part of it."""
        others = self.pipeline_parallel_size * self.replicate * self.tensor_parallel_size
        return max(1, self.size // others)

    def allows_replicas(self, replicate: int) -> bool:
        """Whether the ranks can hold this number of copies of the sharded model."""
        others = self.pipeline_parallel_size * self.expert_parallel_size * self.tensor_parallel_size
        return self.size % (replicate * others) == 0

    def problems(self) -> Iterator[tuple[str, str]]:
        """The sizes that do not divide the ranks: keys of the recipe's `strategy`, and why not."""
        stage = self.size // self.pipeline_parallel_size
        copy = stage // self.replicate
        counts = {PIPELINE: (self.size, "ranks")}
        if self.size % self.pipeline_parallel_size == 0:
            of_stage = "ranks" if stage == self.size else "ranks of a stage"
            of_copy = of_stage if copy == stage else "ranks of a copy"
            counts |= {REPLICATE: (stage, of_stage), CONTEXT: (stage, of_stage)}
            counts |= {EXPERT: (copy, of_copy), TENSOR: (copy, of_copy)}
        found = False
        for dimension, (count, what) in counts.items():
            size = self.along(dimension)
            if count % size:
                divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
                why = f"{size} does not divide {count} ({what}); try one of {divisors}"
                yield dimension.key, why
                found = True
        context, tensor = self.context_parallel_size, self.tensor_parallel_size
        if stage % (context * tensor) and not found:
            sizes = ", ".join(str(n) for n in range(1, stage + 1) if stage % (n * context) == 0)
            what = f"{tensor} x {context} (strategy.{CONTEXT.key}) does not divide {stage}"
            yield TENSOR.key, f"{what} ({counts[CONTEXT][1]}); try one of {sizes}"


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
    waiting: Callable[..., contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """A context that is entered while compute waits for the other ranks; a run passes a timer. Its
    argument says for which: OTHERS, the default, or STAGES."""

    whole: RankLayout | None = None
    """The layout that this layout is a stage of (`stage`)."""

    def with_sizes(self, strategy: Strategy) -> RankLayout:
        """A layout of these ranks with the parallel sizes of a recipe's strategy."""
        sizes: Any = sizes_of(strategy)
        return replace(self, **sizes)

    def coordinate(self, dimension: Dimension) -> int:
        """The number of this rank along a dimension."""
        inner = DIMENSIONS[DIMENSIONS.index(dimension) + 1 :]
        return self.rank // math.prod(map(self.along, inner)) % self.along(dimension)

    def _number(self, dimensions: Iterable[Dimension]) -> int:
        """The number of this rank among the ranks along these dimensions, in order."""
        number = 0
        for dimension in dimensions:
            number = number * self.along(dimension) + self.coordinate(dimension)
        return number

    @property
    def data_parallel_rank(self) -> int:
        """The number of this rank's part of a global batch's sequences, from 0 to
        `data_parallel_size` - 1."""
        return self._number(d for d in DIMENSIONS if not d.same_sequences)

    @property
    def context_parallel_rank(self) -> int:
        """The number of this rank's part of each sequence, from 0 to `context_parallel_size` - 1."""
        return self.coordinate(CONTEXT)

    @property
    def counts(self) -> bool:
        """Whether sums over all ranks count the losses and tokens of this rank: of the ranks that
        compute the same tokens, one does."""
        return all(
            self.coordinate(d) == (0 if d.counts == "first" else self.along(d) - 1)
            for d in DIMENSIONS
            if d.counts != "each"
        )

    @property
    def computing_group(self) -> int:
        """The number of the group of ranks that computes the tokens of this rank, from 0 to
        `computing_groups` - 1."""
        return self._number(d for d in DIMENSIONS if d.counts == "each")

    @property
    def random_stream(self) -> int:
        """Ranks with the same number draw the same random numbers."""
        return self._number(d for d in DIMENSIONS if not d.same_random_numbers)

    @cached_property
    def stage(self) -> RankLayout:
        """The ranks with the same blocks as this rank, as a layout of their own: all ranks without
        pipeline parallelism."""
        if self.pipeline_parallel_size == 1:
            return self
        size = self.size // self.pipeline_parallel_size
        return replace(
            self,
            size=size,
            rank=self.rank % size,
            pipeline_parallel_size=1,
            group=self._stages.get_group("stage"),
            whole=self,
        )

    def pipeline_groups(self, count: int) -> list[dist.ProcessGroup]:
        """Several groups, for different messages, of the ranks of all stages that compute the same
        sequences."""
        import torch.distributed as dist

        if self.stage.size == 1:  # for all ranks together a mesh makes no group of its own
            ranks = dist.get_process_group_ranks(self.group)
            made = [dist.new_group(ranks) for _ in range(count)]
            return [group for group in made if isinstance(group, dist.ProcessGroup)]
        meshes = [self._stages]
        meshes += [self._mesh(**self._stage_sizes) for _ in range(count - 1)]
        return [mesh.get_group("pipeline") for mesh in meshes]

    @cached_property
    def _stages(self) -> DeviceMesh:
        return self._mesh(**self._stage_sizes)

    @property
    def _stage_sizes(self) -> dict[str, int]:
        return {"pipeline": self.pipeline_parallel_size, "stage": -1}

    @cached_property
    def context_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that compute parts of this rank's sequences."""
        if self.context_parallel_size == self.size:
            return self.group
        sizes = {"data": -1, "context": self.context_parallel_size}
        if self.tensor_parallel_size > 1:
            sizes["tensor"] = self.tensor_parallel_size
        return self._mesh(**sizes).get_group("context")

    def context_groups(
        self, ring: int
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The context parallel ranks that divide the attention heads of the same tokens, which are
        neighbours, and those that have the same heads of other tokens; None: only this rank. ring: the
        number of the latter."""
        if ring == 1:
            return self.context_parallel_group, None
        made, heads = self._context_groups, self.context_parallel_size // ring
        if ring not in made:
            sizes = {"data": -1, "ring": ring, "heads": heads}
            if self.tensor_parallel_size > 1:
                sizes["tensor"] = self.tensor_parallel_size
            mesh = self._mesh(**sizes)
            made[ring] = mesh.get_group("heads") if heads > 1 else None, mesh.get_group("ring")
        return made[ring]

    @cached_property
    def _context_groups(
        self,
    ) -> dict[int, tuple[dist.ProcessGroup | None, dist.ProcessGroup]]:
        return {}

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
        """The ranks of this layout by these sizes, in order; one may be -1. Every rank of the whole
        layout must call it: the meshes of all stages are made together."""
        if self.whole is not None:
            stages = self.whole.pipeline_parallel_size
            return self.whole._mesh(pipeline=stages, **sizes)[tuple(sizes)]
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        members = torch.tensor(dist.get_process_group_ranks(self.group)).view(*sizes.values())
        return DeviceMesh(self.device.type, members, mesh_dim_names=tuple(sizes))


def _without_last(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["replicate", "shard"] if mesh.size(0) > 1 else mesh["shard"]
