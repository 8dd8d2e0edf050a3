"""The plan of one recipe on one machine."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.planner.components import HostMemory, StepMemory
from launcher.planner.machine import Machine


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe needs on a machine."""

    machine: Machine
    step: StepMemory
    arithmetic: StepMemory | None
    """The same by closed formulas, as a cross-check; None where `step` is arithmetic itself."""
    context: int
    """Bytes a rank that the device's driver, libraries and communicators take, outside of tensors."""
    margin: int
    """Bytes a rank for what the allocator cannot use (fragmentation)."""
    host: HostMemory
    checkpoint_bytes: int
    """On disk, each checkpoint."""
    checkpoints: int
    """That are on disk at once."""
    notes: tuple[str, ...]
    """What is known to be left out, or was done by arithmetic."""

    @property
    def needed(self) -> int:
        """Bytes of one device."""
        return self.step.peak.components.total + self.context + self.margin

    @property
    def spare(self) -> int | None:
        """Bytes of a device that are left; negative where it does not fit; None where the device's memory is not known."""
        return None if self.machine.memory is None else self.machine.memory - self.needed

    @property
    def host_spare(self) -> int | None:
        """The same for a node's host memory."""
        return None if self.machine.host_memory is None else self.machine.host_memory - self.host.total

    @property
    def fits(self) -> bool | None:
        """Device and host; None where neither's memory is known."""
        known = [spare for spare in (self.spare, self.host_spare) if spare is not None]
        return all(spare >= 0 for spare in known) if known else None
