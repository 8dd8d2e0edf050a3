"""Signs of life of the nodes in the ranks' store, which tell a lost node from its neighbours.

When a node is lost, NCCL aborts ranks of other nodes some time later. Those ranks end without a
message, too, perhaps all ranks of a node at once. The node that was silent first is the probable
cause.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from torch.distributed import Store

from launcher.distributed.environment import Environment
from launcher.distributed.network import node_name
from launcher.reliability.store_calls import absent

_BEAT_SECONDS = 5.0
"""Time between two signs of life of a node."""
_SILENT_SECONDS = 10.0
"""Time for a node to notice a failure. Its ranks look at the store each second."""
# Keys of the store. A node has the number of its first rank
_BEATS = "node/beats"
"""How many signs of life all nodes have given."""
_BEAT, _NOTICED = "node/beat_{}".format, "node/noticed_{}".format
"""The number of the node's last sign of life, with its name; a rank of it has noticed a failure."""


class LostNode(NamedTuple):
    """A node from which nothing is heard."""

    name: str
    """As Slurm's `--exclude` takes it; without Slurm the host name."""
    ranks: range


class Nodes:
    """The nodes of a run, as one rank sees them. Methods raise RuntimeError if the store fails."""

    def __init__(self, environment: Environment) -> None:
        self._own = environment.rank - environment.local_rank  # a node's ranks are consecutive
        self._size = environment.local_world_size
        self._all = range(0, environment.world_size, self._size)
        self._beats = environment.several_nodes and environment.local_rank == 0
        self._next = 0.0

    def beat(self, store: Store) -> None:
        """Gives a sign of life of this node if one is due. The signs of all nodes are numbered, so that
        their order does not depend on the nodes' clocks."""
        if self._beats and time.monotonic() >= self._next:
            self._next = time.monotonic() + _BEAT_SECONDS
            store.set(_BEAT(self._own), f"{store.add(_BEATS, 1)} {node_name()}")

    def notice(self, store: Store) -> None:
        """A rank of this node has noticed a failure, so the node is not lost."""
        store.set(_NOTICED(self._own), "")

    def lost(self, store: Store) -> list[LostNode]:
        """The nodes of which no rank notices a failure in time, except those that were heard longer
        than the first of them: their ranks were aborted because of it. Waits for that."""
        if len(self._all) == 1:
            return []
        silent = set(
            absent(store, [_NOTICED(first) for first in self._all], seconds=_SILENT_SECONDS)
        )
        beats: dict[int, tuple[int, str]] = {}
        for first in self._all:
            if _NOTICED(first) in silent and store.check([_BEAT(first)]):
                number, name = store.get(_BEAT(first)).decode().split(" ", 1)
                beats[first] = int(number), name
        # Between two signs of life of a node, each other node gives one
        last = min((number for number, _ in beats.values()), default=0) + len(self._all)
        return [
            LostNode(name, range(first, first + self._size))
            for first, (number, name) in sorted(beats.items(), key=lambda item: item[1])
            if number <= last
        ]
