"""Data classes of a memory plan: components, moments and peaks of a step. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from launcher.planner.machine import Machine

if TYPE_CHECKING:
    from launcher.planner.measurement import Measurement

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Component = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "logits",
    "communication",
    "temporary",
]
"""A part of the memory of a step: a field of `Components`, which documents it."""
COMPONENTS: tuple[Component, ...] = get_args(Component)

CUBLAS_WORKSPACES = 2 * 32 * 2**20
"""Bytes that PyTorch allocates for cuBLAS in the threads of the forward and the backward pass.
Before compute capability 9.0 they are 8.125 MiB each."""
OVER, UNDER = 0.05, 0.02
"""Shares of the measured peak by which the planned peak may exceed it, or fall below it."""


def pinned(size: int) -> int:
    """Bytes that PyTorch's pinned-memory allocator takes for a request: the next power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


@dataclass(frozen=True, kw_only=True)
class Components:
    """Bytes on the device of one rank."""

    parameters: int = 0
    """This rank's master weights, frozen ones and buffers too. 0 with CPU offload."""
    gradients: int = 0
    """Shards, whole gradients before they are reduced, and DDP's buckets."""
    optimizer: int = 0
    """Optimizer state. 0 with CPU offload."""
    gathered: int = 0
    """Unsharded weights (FSDP), and copies of weights in the compute dtype (autocast)."""
    activations: int = 0
    """What the forward pass saves, or recomputation computes again, without the logits."""
    logits: int = 0
    """Logits, the loss over them, and their gradient."""
    communication: int = 0
    """Buffers that collectives send from and receive into."""
    temporary: int = 0
    """Workspaces of operators, gradients of activations, the batch."""

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A point in a step, with the memory that a rank holds there."""

    phase: Phase
    micro_batch: int
    """0-based."""
    where: str
    """The module whose forward or backward pass runs; empty outside of the blocks and the head."""
    components: Components

    @property
    def total(self) -> int:
        """Bytes of all components."""
        return self.components.total


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of one optimizer step on one rank, once the optimizer state exists."""

    timeline: tuple[Moment, ...]
    """In order, the highest moment in the forward and backward pass of each examined module."""
    held: Components
    """Memory between steps, without cuBLAS workspaces, which moments count as temporary."""
    after_forward: Components
    """Memory after the forward pass of the first micro-batch, without cuBLAS workspaces."""
    host: int
    """Host memory that offload takes: shards, gradients, optimizer state, activations."""
    disk: int = 0
    """Bytes of this rank's optimizer state in a file."""

    @cached_property
    def phases(self) -> dict[Phase, Moment]:
        """The peak of each phase."""
        moments = {phase: [m for m in self.timeline if m.phase == phase] for phase in PHASES}
        return {phase: max(m, key=lambda m: m.total) for phase, m in moments.items() if m}

    @property
    def peak(self) -> Moment:
        """The moment of highest memory."""
        return max(self.phases.values(), key=lambda moment: moment.total)


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of host memory on one node."""

    processes: int
    """The processes of all ranks: interpreter, torch, and the driver (GPU) or all tensors (CPU)."""
    offload: int
    """What is offloaded to the host."""
    workers: int
    """Loader processes and the batches they prefetch."""
    staging: int
    """Copies of the state from which asynchronous checkpoints are written."""

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe needs on a machine."""

    machine: Machine
    step: StepMemory
    arithmetic: StepMemory | None
    """The analytic estimate, as a cross-check; None where `step` is the estimate."""
    context: int
    """Bytes per rank that the driver, libraries and communicators take."""
    margin: int
    """Bytes per rank that the allocator cannot use (fragmentation)."""
    room: int = 0
    """Bytes of a device beyond `needed` that the allocator's caches take. With less, it frees them
    and waits for the device in each step."""
    host: HostMemory
    checkpoint_bytes: int
    """Bytes of each checkpoint on disk."""
    checkpoints: int
    """Number of checkpoints on disk at the same time."""
    notes: tuple[str, ...]
    """Notes on what the plan does not count, or estimates."""
    before: int = 0
    """Bytes of tensors on one device at the peak of a teacher's pass, which ends before the model is
    loaded. An estimate."""

    @property
    def traced(self) -> bool:
        """Whether `step` is traced, not estimated."""
        return self.arithmetic is not None

    @property
    def tensors(self) -> int:
        """Bytes of tensors on one device, at the peak."""
        return self.step.peak.total

    @property
    def needed(self) -> int:
        """Bytes that the plan needs on one device."""
        return max(self.tensors + self.margin, self.before) + self.context

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
        return min(known) >= 0 if known else None

    @property
    def has_room(self) -> bool | None:
        """Whether it fits with `room`, and is not slowed down by the allocator; None as `fits`."""
        return self.fits and (self.spare is None or self.spare >= self.room)


def compare(planned: StepMemory, measured: Measurement) -> list[tuple[str, int, int]]:
    """Rows of (what, planned bytes, measured bytes), the peak last."""
    held, optimizer = planned.held, planned.phases["optimizer"].components
    return [
        ("parameters", held.parameters, measured.parameters),
        ("gradients", optimizer.gradients, measured.gradients),
        ("optimizer state", held.optimizer, measured.optimizer),
        ("between steps", held.total, measured.step_start),
        ("after forward", planned.after_forward.total, measured.after_forward),
        *(
            (f"peak in {phase}", moment.total, measured.phases[phase])
            for phase, moment in planned.phases.items()
        ),
        ("peak", planned.peak.total, measured.peak),
    ]


def peak_holds(planned: StepMemory, measured: Measurement) -> bool:
    """Whether the planned peak is within `OVER` and `UNDER` of the measured one. What the allocator
    caches beyond it does not count: it is freed when the device is full."""
    return -UNDER <= planned.peak.total / measured.peak - 1 <= OVER
