"""What a recipe is to run on: devices, their memory, and how fast they are. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a rank really gets, in units a second: achievable rates, not those of data sheets."""

    half_flops: float
    """Matrix products in bfloat16 or float16."""
    float32_flops: float
    """Matrix products in float32 (TF32 where run.float32_matmul allows it)."""
    memory_bandwidth: float
    """Bytes read and written in the device's memory."""
    intra_node_bandwidth: float
    """Bytes that a rank sends (and receives) in a collective among the ranks of a node."""
    inter_node_bandwidth: float
    """Bytes that a rank sends (and receives) in a collective across nodes."""
    host_bandwidth: float
    """Bytes between host and device, one way, each rank of a full node at once."""
    host_adamw: float
    """Parameters that a rank's share of the host's cores updates with fused AdamW."""
    source: str
    """Where the figures come from, in words: a data sheet and a share of it, or `measured here`."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of equal devices."""

    name: str
    """As people call the device: H100, CPU."""
    device: Literal["cuda", "cpu"]
    nodes: int
    gpus_per_node: int
    """Ranks a node."""
    memory: int | None
    """Bytes of one device; None: not known."""
    host_memory: int | None
    """Bytes of one node's host memory; None: not known."""
    rates: Rates

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.gpus_per_node
