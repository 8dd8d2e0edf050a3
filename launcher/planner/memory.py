"""What is known of a recipe's memory: the components of a step, its peaks, the plan. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from launcher.planner.machine import Machine

Phase = Literal["forward", "backward", "optimizer"]

CUBLAS_WORKSPACES = 2 * 32 * 2**20
"""Bytes that PyTorch allocates for cuBLAS at the first matrix product: 32 MiB each for the threads
of the forward and the backward pass. Before compute capability 9.0 they are 8.125 MiB each."""


def pinned(size: int) -> int:
    """Bytes that PyTorch's pinned-memory allocator takes for a request: the next power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


@dataclass(frozen=True, kw_only=True)
class Components:
    """Bytes on the device of one rank."""

    parameters: int = 0
    """Master weights (this rank's shards), frozen ones and buffers too. 0 with CPU offload."""
    gradients: int = 0
    """Gradients of this rank: shards, or whole ones before they are reduced; DDP: its buckets."""
    optimizer: int = 0
    """The two moments of AdamW."""
    gathered: int = 0
    """Unsharded weights (FSDP), and copies of weights in the compute dtype (autocast)."""
    activations: int = 0
    """What the forward pass saves for the backward pass, or recomputes, without the logits."""
    logits: int = 0
    """Logits, the loss over them, and their gradient."""
    communication: int = 0
    """Buffers that collectives send from and receive into."""
    temporary: int = 0
    """All else: workspaces of operators, gradients of activations, the batch."""

    @property
    def total(self) -> int:
        """Bytes of all components."""
        return sum(dataclasses.asdict(self).values())


COMPONENTS = tuple(field.name for field in dataclasses.fields(Components))


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A point in a step."""

    phase: Phase
    micro_batch: int
    """0-based."""
    where: str
    """The module whose forward or backward runs; empty: outside of the blocks and the head."""
    components: Components


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of one optimizer step on one rank, once the optimizer state exists."""

    method: Literal["traced", "arithmetic"]
    peak: Moment
    phases: dict[Phase, Moment]
    """The peak of each phase."""
    held: Components
    """Between steps, without cuBLAS workspaces, which moments count as temporary."""
    after_forward: Components
    """At the end of the first micro-batch's forward pass, without cuBLAS workspaces."""
    timeline: tuple[Moment, ...]
    """In order: the highest moment of each module's forward and backward, as far as examined."""
    host: int
    """Host memory of this rank that offload takes: shards, gradients, moments, activations."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of host memory on one node."""

    processes: int
    """The ranks: interpreter, torch, on a GPU its driver, on a CPU all tensors."""
    offload: int
    """Parameters, gradients, moments and activations offloaded to the host."""
    workers: int
    """Loader processes and the batches they prefetch."""
    staging: int
    """Copies that asynchronous checkpoints are written from."""

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.processes + self.offload + self.workers + self.staging


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe needs on a machine."""

    machine: Machine
    step: StepMemory
    arithmetic: StepMemory | None
    """The analytic estimate, as a cross-check; None where `step` is the estimate."""
    context: int
    """Bytes a rank that the driver, libraries and communicators take, outside of tensors."""
    margin: int
    """Bytes a rank for what the allocator cannot use (fragmentation)."""
    host: HostMemory
    checkpoint_bytes: int
    """On disk, of each checkpoint."""
    checkpoints: int
    """Checkpoints that are on disk at once."""
    notes: tuple[str, ...]
    """What the plan leaves out or estimates."""

    @property
    def needed(self) -> int:
        """Bytes of one device."""
        return self.step.peak.components.total + self.context + self.margin

    @property
    def spare(self) -> int | None:
        """Bytes left of a device; negative: it does not fit; None: its memory is not known."""
        return None if self.machine.memory is None else self.machine.memory - self.needed

    @property
    def host_spare(self) -> int | None:
        """Bytes left of a node's host memory; None: its size is not known."""
        known = self.machine.host_memory
        return None if known is None else known - self.host.total

    @property
    def fits(self) -> bool | None:
        """Whether it fits device and host; None where neither's memory is known."""
        known = [spare for spare in (self.spare, self.host_spare) if spare is not None]
        return all(spare >= 0 for spare in known) if known else None
