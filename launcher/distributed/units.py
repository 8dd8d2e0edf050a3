"""What strategies are told about the modules of a model, and about how ranks divide them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Unit:
    """Modules beside the blocks whose weights FSDP gathers together. The other fields say why FSDP
    treats them in another way than a block."""

    modules: tuple[nn.Module, ...]
    called: bool = True
    """False: their weights are never gathered."""
    used_in_backward: bool = True
    """False: their gradients do not depend on their weights, as those of an embedding."""
    ends_forward: bool = False
    """True: the backward pass begins with them, so their weights stay gathered in between."""
    mesh: DeviceMesh | None = None
    """The ranks that hold the same parts of them, where they are inside of a block and are divided
    beside FSDP. None: those of the other weights."""


@dataclass(frozen=True)
class PartialGradients:
    """Ranks that compute the same tokens with parts of the same layers."""

    mesh: DeviceMesh
    """The ranks, along one dimension. Each rank holds a parameter whole that is not divided along it:
    the ranks compute the same gradient of it, up to rounding."""
    summed: tuple[tuple[nn.Module, str], ...] = ()
    """Parameters, as modules and names, that each rank holds whole, and of whose gradient it computes a
    part: the gradient is their sum."""
