"""What the memory of a training step is made of, and when there is most of it. Standard library only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "optimizer"]

CUBLAS_WORKSPACES = 2 * 32 * 2**20
"""Bytes that PyTorch allocates for cuBLAS with the first matrix product: 32 MiB each for the thread of the forward pass and that
of the backward pass. Before compute capability 9.0 they are 8.125 MiB each; deterministic runs have 32 MiB."""


def pinned(size: int) -> int:
    """Bytes that PyTorch's allocator of page-locked host memory takes for an allocation: the next power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


@dataclass(frozen=True, kw_only=True)
class Components:
    """Bytes on the device of one rank."""

    parameters: int = 0
    """This rank's master weights (its shards), frozen ones and buffers too. In host memory with offload: 0 here."""
    gradients: int = 0
    """This rank's gradients: shards, or, where reduction is held back, whole ones; ddp: its buckets."""
    optimizer: int = 0
    """The two moments of AdamW."""
    gathered: int = 0
    """Whole weights that are gathered (fsdp), and copies of weights cast for compute (ddp under autocast)."""
    activations: int = 0
    """What forward keeps for backward, or a checkpointed block computes again: all but the logits."""
    logits: int = 0
    """Logits, the loss over them, and their gradient."""
    communication: int = 0
    """Buffers that collectives send from and receive into."""
    temporary: int = 0
    """All else: working space of operations, gradients of activations, the batch itself."""

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(dataclasses.asdict(self).values())

    def __add__(self, other: Components) -> Components:
        return Components(**{name: getattr(self, name) + getattr(other, name) for name in COMPONENTS})


COMPONENTS = tuple(field.name for field in dataclasses.fields(Components))


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A point in a step."""

    phase: Phase
    micro_batch: int
    """0-based."""
    where: str
    """The module whose forward or backward runs, by clean name; empty: outside of all."""
    components: Components


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of one optimizer step on one rank, once training is under way (the optimizer's state is there)."""

    method: Literal["traced", "arithmetic"]
    peak: Moment
    """Where most is held."""
    phases: dict[Phase, Moment]
    """The highest moment of each phase."""
    held: Components
    """Between steps, without cuBLAS' workspaces, which the moments count as temporary."""
    after_forward: Components
    """When the first micro-batch's forward pass has ended: what its backward pass will need. Without cuBLAS' workspaces."""
    timeline: tuple[Moment, ...]
    """In order: the highest moment of each module's forward and backward, for a drawing."""
    host: int
    """Host memory of this rank that offload takes: shards, gradients, moments, activations."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of host memory on one node."""

    processes: int
    """The ranks themselves: interpreter, torch, and on a GPU its driver."""
    offload: int
    """Parameters, gradients, moments and activations that live there."""
    workers: int
    """Loader processes and the batches they keep ready."""
    staging: int
    """Copies that asynchronous checkpoints are written from."""

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.processes + self.offload + self.workers + self.staging
