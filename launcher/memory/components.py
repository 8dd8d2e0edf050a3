"""What the memory of a training step is made of, and when there is most of it. Standard library only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "optimizer"]


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
    """Between steps."""
    after_forward: Components
    """When the first micro-batch's forward pass has ended: what its backward pass will need."""
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
